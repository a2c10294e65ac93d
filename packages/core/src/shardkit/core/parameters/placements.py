"""Placements besides `Shard`: a parameter that lies whole on one rank, or is cut only between blocks.

Note [Where the bytes lie]
A weight of 6 rows on 3 ranks; a digit says which rank holds the element::

    Shard(0)     Owned(rank=1)    Blocks(rows=4)    Blocks(elements=8), rows of 5
    0 0 0 0 0     1 1 1 1 1         0 0 0 0 0          0 0 0 0 0
    0 0 0 0 0     1 1 1 1 1         0 0 0 0 0          0 0 0 0 0
    1 1 1 1 1     1 1 1 1 1         0 0 0 0 0          0 0 0 0 0
    1 1 1 1 1     1 1 1 1 1         0 0 0 0 0          0 1 1 1 1
    2 2 2 2 2     1 1 1 1 1         1 1 1 1 1          1 1 1 1 1
    2 2 2 2 2     1 1 1 1 1         1 1 1 1 1          1 1 1 1 1

Like `Shard`, they determine the elements of every rank, so writing and reading a checkpoint needs no communication.
torch's own operators do not know them: see `placed.py`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Placement, Shard

from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.torch_compat import is_plain


@dataclass(frozen=True, init=False, repr=False)
class Owned(Placement):
    """The whole parameter, its gradient and its optimizer state lie on one rank of the shard group.

    For optimizers that need a whole matrix: their step sees a plain tensor on the owner, and no gradient elsewhere.

    Args:
        rank: the owner's rank in the shard group. None: `fully_shard` chooses the rank with the least work so far.
        plan: a plan that chooses the rank instead and knows all parameters of a model (`shardkit.core.plan_owners`).
    """

    rank: int | None = None

    def __init__(self, rank: int | None = None, *, plan: Any = None) -> None:
        super().__init__()
        if rank is not None and (not isinstance(rank, int) or rank < 0):
            raise ValueError(f"Owned(rank={rank!r}): expected a rank of the shard group, counted from 0, or None")
        vars(self).update(rank=rank, plan=plan)  # frozen

    def __reduce__(self) -> Any:
        return Owned, (self.rank,)

    def __repr__(self) -> str:
        return "Owned()" if self.rank is None else f"Owned(rank={self.rank})"

    __str__ = __repr__


@dataclass(frozen=True, init=False, repr=False)
class Blocks(Placement):
    """Like `Shard(0)`, but cut only at multiples of `rows`, or of `elements` in memory.

    Multiples are counted from the start of the whole tensor, so an optimizer that quantizes its state in blocks has the
    same blocks on any number of ranks. Each rank holds `ceil(blocks / ranks)` of them; the last ranks may hold fewer or
    none.

    With `elements` the local tensor has the first dims merged, as few as leave each block whole rows: an experts'
    weight `(experts, in, out)` with `elements=out` has local tensors `(rows, out)`. At worst it is 1-D.

    Raises:
        ValueError: unless exactly one of `rows` and `elements` is given, and it is at least 1.
    """

    rows: int | None = None
    elements: int | None = None

    def __init__(self, *, rows: int | None = None, elements: int | None = None) -> None:
        super().__init__()
        if (rows is None) == (elements is None):
            raise ValueError(f"Blocks(rows={rows}, elements={elements}): give either rows or elements")
        size = elements if rows is None else rows
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"Blocks: a block has {size!r} {'elements' if rows is None else 'rows'}; expected >= 1")
        vars(self).update(rows=rows, elements=elements)  # frozen

    def __reduce__(self) -> Any:
        return _blocks, (self.rows, self.elements)

    def __repr__(self) -> str:
        return f"Blocks(elements={self.elements})" if self.rows is None else f"Blocks(rows={self.rows})"

    __str__ = __repr__


def _blocks(rows: int | None, elements: int | None) -> Blocks:
    return Blocks(rows=rows, elements=elements)


def is_ours(placement: Placement | None) -> bool:
    """Whether torch's operators do not know the placement."""
    # torch's metaclass makes `isinstance` slow, and a set-up asks for each parameter.
    return type(placement) is not Shard and isinstance(placement, Owned | Blocks)


def layout_for(placement: Placement | None, shape: tuple[int, ...], world_size: int) -> ChunkLayout:
    """The layout that a placement gives a tensor of `shape`; None replicates it, as a tensor of at least one dim.

    With `Blocks(elements=...)` it is the layout of the tensor with its first dims merged, at most all of them.
    """
    if isinstance(placement, Owned):
        return _layout(shape, 0, world_size, owner=placement.rank)
    if isinstance(placement, Blocks):
        if placement.elements is not None:
            rest = shape[1:]
            while not (row := math.prod(rest)) or placement.elements % row:
                rest = rest[1:]
            return _layout((math.prod(shape) // row, *rest), 0, world_size, unit=placement.elements // row)
        assert placement.rows is not None
        return _layout(shape, 0, world_size, unit=placement.rows)
    dim = 0 if placement is None else placement.dim  # type: ignore[attr-defined]
    return _layout(shape or (1,), dim, world_size)


# Parameters that are cut alike, as a model's layers have, share what a layout works out once.
_layout = functools.lru_cache(maxsize=256)(ChunkLayout)


def shard_of(whole: torch.Tensor, layout: ChunkLayout, rank: int, device: torch.device) -> torch.Tensor:
    """The contiguous shard of `whole` on `rank`, moved to `device`, or on meta if `whole` is.

    With several ranks the shard has its own memory, so `whole` can be freed.
    """
    if whole.shape and tuple(whole.shape) != layout.shape:  # cut between rows of merged dims
        whole = whole.reshape(layout.shape)
    world, chunk = layout.world_size, whole
    if world > 1 and is_plain(whole):
        chunk = whole.narrow(layout.dim, layout.offset(rank), layout.length(rank))
    elif world > 1:
        chunks = torch.chunk(whole, world, layout.dim)
        # new_zeros is one of the few operators through which wrapper subclasses keep their class.
        chunk = chunks[rank] if rank < len(chunks) else chunks[0].new_zeros(layout.local_shape(rank))
    moved = chunk.to(whole.device if whole.device.type == "meta" else device)
    if moved is chunk and world > 1:
        if not is_plain(chunk):  # clone may quantize again
            return chunk.new_zeros(chunk.shape).copy_(chunk)
        return chunk.clone(memory_format=torch.contiguous_format)
    return moved.contiguous()


torch.serialization.add_safe_globals([Owned, Blocks, _blocks])  # for torch.load(weights_only=True)
