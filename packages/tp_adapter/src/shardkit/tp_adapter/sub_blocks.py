"""Fused weights: a parameter that is several logical tensors on one dim (SwiGLU's gate and up, packed QKV).

Note [Fused weights]
A fused weight is used as one tensor, so tensor parallelism must give every rank its part of each logical tensor: rows
0-1 and 4-5 of

    gate 0 1 2 3 | up 4 5 6 7

on the first of two ranks. The module's own DTensor says Shard(0) of that local tensor, which is right for computing:
the outputs of a rank are its part of gate and its part of up. In the whole parameter the same rows are a strided shard.
The sharded parameter, its gradient and its optimizer state say so. `full_tensor()`, a full state dict and a checkpoint
therefore have the fused weight in its own order.

Logical tensors of different sizes, such as queries, keys and values of grouped-query attention, are not strided shards
of a stack: no placement leaves gaps of several lengths. Packed group by group they need none::

    q q k v | q q k v | q q k v | q q k v

Whole groups are an ordinary Shard. The groups matter only for access to logical tensors by name: each has some rows of
every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardkit.core.parameters.region import Run

__all__ = ["SubBlocks", "check_sub_blocks"]


@dataclass(frozen=True)
class SubBlocks:
    """The logical tensors of a parameter.

    Without `sizes` they are equally large and stacked: all of the first, all of the second. With `sizes` the parameter
    is a sequence of groups, and each group has that many indices of every logical tensor, in order. For attention whose
    queries share keys and values, packed group by group::

        SubBlocks(("q", "k", "v"), sizes=(heads // kv_heads * head_size, head_size, head_size))

    A logical tensor then consists of its parts of all groups, concatenated, as in checkpoints of separate layers.

    Attributes:
        names: names of the logical tensors, in the order of the stack or of each group; a list becomes a tuple.
        dim: the dim on which they lie.
        sizes: indices of `dim` in one group, for each name; a list becomes a tuple. The whole length is a multiple of
            their sum. If it equals the sum there is one group: a stack of logical tensors of different sizes, which
            tensor parallelism cannot cut.

    Raises:
        ValueError: when constructed, for repeated names, sizes that are not one positive int for each name, or a
            negative dim.
    """

    names: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))  # a list cannot be hashed
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"{self}: expected distinct names of logical tensors, at least one")
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(self.sizes))
            whole = all(isinstance(size, int) and size > 0 for size in self.sizes)
            if len(self.sizes) != len(self.names) or not whole:
                raise ValueError(
                    f"{self}: expected one positive size for each of the names, of type int (divide by //, not /)"
                )
        if self.dim < 0:
            raise ValueError(f"{self}: expected a dim counted from 0")

    def runs(self, number: int, length: int) -> list[Run]:
        """Where logical tensor `number` lies in a dim of `length` indices, in its own order."""
        if self.sizes is None:
            one = length // len(self.names)
            return [(number * one, (number + 1) * one)]
        start, size = sum(self.sizes[:number]), self.sizes[number]
        return [(at + start, at + start + size) for at in range(0, length, sum(self.sizes))]

    def split(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The logical tensors of a plain fused tensor, in the order of `names`: views where they lie in one piece.

        Concatenated on `dim`, they form the tensor with its logical tensors stacked.

        Raises:
            ValueError: as `check_sub_blocks`.
        """
        check_sub_blocks(fused, "a tensor", self)
        length, count = fused.shape[self.dim], len(self.names)
        sizes = (length // count,) * count if self.sizes is None else self.sizes
        groups = 1 if self.sizes is None else length // sum(sizes)
        grouped = fused.unflatten(self.dim, (groups, sum(sizes)))
        return tuple(part.flatten(self.dim, self.dim + 1) for part in grouped.split(sizes, self.dim + 1))

    def fuse(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new fused tensor of its logical tensors: the inverse of `split`.

        Raises:
            ValueError: for a wrong number of tensors, or sizes that do not match.
        """
        shapes = [tuple(part.shape) for part in parts]
        if len(parts) != len(self.names) or not all(self.dim < len(shape) for shape in shapes):
            raise ValueError(f"{self} got tensors of shapes {shapes}, expected one for each name, with dim {self.dim}")
        length = shapes[0][self.dim]
        sizes = (length,) * len(parts) if self.sizes is None else self.sizes
        groups = 1 if self.sizes is None else length // sizes[0]
        expected = [(*shapes[0][: self.dim], groups * size, *shapes[0][self.dim + 1 :]) for size in sizes]
        if shapes != expected:
            raise ValueError(f"{self} got tensors of shapes {shapes}; after the first, expected {expected}")
        grouped = [part.unflatten(self.dim, (groups, size)) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(grouped, self.dim + 1).flatten(self.dim, self.dim + 1)


def check_sub_blocks(parameter: torch.Tensor, described: str, sub_blocks: SubBlocks) -> None:
    """Checks that a parameter, which messages call `described`, can consist of these logical tensors.

    Raises:
        ValueError: if the dim cannot be divided into that many equal parts, or into whole groups.
    """
    names, dim, sizes = sub_blocks.names, sub_blocks.dim, sub_blocks.sizes
    parts = len(names) if sizes is None else sum(sizes)
    if 0 <= dim < parameter.ndim and parameter.shape[dim] % parts == 0:
        return
    seen = f"{described} of shape {tuple(parameter.shape)} is not "
    if sizes is not None:
        raise ValueError(
            f"{seen}groups of {parts} on dim {dim}, made of {names} with {sizes} in each; give the sizes that one "
            "group has on that dim, or another dim"
        )
    raise ValueError(
        f"{seen}{parts} logical tensors {names} of one size stacked on dim {dim}. For grouped-query attention "
        "pass the sizes in one group: SubBlocks(names, sizes=...). SubBlocks.fuse packs tensors group by group (the "
        "queries of a group, its key, its value, then the next group)"
    )
