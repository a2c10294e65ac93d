"""Where a receiver puts which part of which checkpoint tensor: by hand, from a state dict, or by rules for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.plan import boxes_of
from shardkit.core.parameters.region import Region
from shardkit.weights.boxes import Wanted


@dataclass(frozen=True)
class Target:
    """A part of a checkpoint tensor, and the tensor that it is written into.

    Args:
        name: the tensor's name in the checkpoint, as the sender's `names=` gives it.
        region: the indices of each dim, such as `(slice(0, 4), slice(None))`; None: the whole tensor. Where ranks hold
            several runs of a dim, a `shardkit.core` region. A slice without an end takes the size of `tensor`.
        tensor: the tensor or view to write into, of the shape of the region. It may have another floating dtype.
        shape: that of the whole tensor in the checkpoint, for a check; None: any in which the region lies.

    Raises:
        TypeError: if `tensor` is a DTensor, for which `targets_of` makes targets, or another one that wraps tensors.
        ValueError: if the region is not of the shape of `tensor`, or `tensor` is on the meta device.
    """

    name: str
    region: Region | Sequence[slice] | None
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape, kind = tuple(self.tensor.shape), type(self.tensor)
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # writing to its parts may fail, or be lost
            raise TypeError(
                f"{self.name}: its tensor is a {kind.__name__}, expected a plain tensor; pass one, and quantise it "
                "afterwards"
            )
        if self.tensor.is_meta:
            raise ValueError(
                f"{self.name}: its tensor is on the meta device, which keeps nothing; give it memory first"
            )
        if (seen := self._region().shape) != shape:
            raise ValueError(f"{self.name}: the region has shape {seen}, expected {shape}, the shape of its tensor")

    def _region(self) -> Region:
        if isinstance(self.region, Region):
            return self.region
        sizes = self.tensor.shape
        slices = [slice(0, size) for size in sizes] if self.region is None else self.region
        if len(slices) != len(sizes) or any(
            one.step not in (None, 1) or (one.start or 0) < 0 or (one.stop or 0) < 0 for one in slices
        ):
            raise ValueError(
                f"{self.name}: region {tuple(slices)}, expected {len(sizes)} slices without a step, from the beginning "
                "of each dim of its tensor"
            )
        starts = [one.start or 0 for one in slices]
        stops = [s + size if one.stop is None else one.stop for one, s, size in zip(slices, starts, sizes, strict=True)]
        return Region(tuple(((start, max(start, stop)),) for start, stop in zip(starts, stops, strict=True)))

    def parts(self) -> Iterator[tuple[Wanted, torch.Tensor]]:
        """The boxes of the checkpoint tensor that are wanted, each with the view that takes it."""
        tensor = self.tensor.detach()
        shape = tuple(tensor.shape) if self.region is None else self.shape
        for in_full, in_piece in self._region().boxes():
            box = tuple((one.start, one.stop) for one in in_full)
            view = tensor[in_piece].view([stop - start for start, stop in box])
            yield Wanted(self.name, tensor.dtype, box, shape), view


def targets_of(state: Mapping[str, torch.Tensor], names: Callable[[str], str | None] = str) -> list[Target]:
    """Targets for the tensors of a state dict: plain tensors whole, and of DTensors the part of this rank.

    Tied tensors are written twice if both of their names are sent; the sender knows which it sends. Not collective.

    Args:
        state: tensors by name; they are written in place.
        names: from a name here to that of the checkpoint tensor; None leaves it out.

    Raises:
        TypeError: for a tensor that wraps others, such as a quantised one of torchao.
        ValueError: for a DTensor with a placement that is neither Replicate nor sharding.
    """
    targets = []
    for here, tensor in state.items():
        name = names(here)
        if name is None:
            continue
        if not isinstance(tensor, DTensor):
            targets.append(Target(name, None, tensor))
            continue
        for offsets, sizes, view in boxes_of((here,), tensor):
            region = [slice(start, start + size) for start, size in zip(offsets, sizes, strict=True)]
            targets.append(Target(name, region, view, tuple(tensor.shape)))
    return targets


@dataclass(frozen=True)
class Cut:
    """This rank's slice of one dim of a tensor of the same name: column-parallel is `Cut(0)`, row-parallel `Cut(1)`.

    A tensor without that dim, such as the bias of a row-parallel layer, is whole on each rank.

    Args:
        dim: the dim that is cut, evenly.
        size: its size in the checkpoint, if the module's is padded, as vocabularies are; the padding is not written.
    """

    dim: int = 0
    size: int | None = None


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor of a fused stack.

    Args:
        name: its module in place of the fused one's, such as "q_proj" for "qkv_proj"; or its whole name, with
            "{parent}" for the path above the fused module.
        size: rows of the whole tensor in the checkpoint.
        copies: ranks that hold the same rows, as with fewer key heads than ranks.
    """

    name: str
    size: int
    copies: int = 1


class Stack:
    """Tensors that lie one after the other in dim 0 of one parameter, each cut: qkv, or gate and up."""

    def __init__(self, *parts: Part) -> None:
        self.parts = parts


@dataclass(frozen=True)
class Experts:
    """A parameter of one more dim, the first, in which the experts of this rank lie; the checkpoint has one for each.

    Args:
        rule: how one expert is cut; None: it is whole.
        name: the checkpoint's name with "{parent}", the path above the parameter's last two names, and "{expert}".
            A `Stack` needs none: its parts have such names themselves.
        first: the first expert of this rank.
    """

    rule: Cut | Stack | None
    name: str = ""
    first: int = 0


Rule = Cut | Stack | Experts


def targets_for(
    module: nn.Module,
    rules: Mapping[str, Rule],
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    names: Callable[[str], str | None] = str,
) -> list[Target]:
    """Targets for the parameters of a module that tensor parallelism has cut, or that fuses tensors of the checkpoint.

    Parameters that no rule matches are taken whole, by their own name. Not collective.

    Args:
        module: the module of this inference rank, with plain parameters.
        rules: by pattern of a parameter's name, such as "*.qkv_proj.weight"; the first that matches holds.
        tp_rank: this rank's number among those that share the tensors.
        tp_size: their number.
        names: from a name that the rules give to that of the checkpoint tensor; None leaves it out.

    Raises:
        ValueError: if a rule matches no parameter, or its sizes do not fit one.
    """
    found: list[Target] = []
    unused = set(rules)
    for name, parameter in module.named_parameters():
        pattern = next((one for one in rules if fnmatchcase(name, one)), "")
        unused.discard(pattern)
        found += _targets(rules.get(pattern), name, parameter.detach(), tp_rank, tp_size)
    if unused:
        raise ValueError(
            f"rules {sorted(unused)} match no parameter of {type(module).__name__}; remove or correct them"
        )
    return [replace(one, name=renamed) for one in found if (renamed := names(one.name)) is not None]


def _targets(rule: Rule | None, name: str, tensor: torch.Tensor, rank: int, size: int) -> Iterator[Target]:
    if isinstance(rule, Experts):
        for number, expert in enumerate(tensor, rule.first):
            for one in _targets(rule.rule, rule.name or name, expert, rank, size):
                full = one.name.replace("{parent}", _parent(name)).replace("{expert}", str(number))
                yield replace(one, name=full)
    elif isinstance(rule, Stack):
        yield from _stacked(rule, name, tensor, rank, size)
    elif rule is None or rule.dim >= tensor.ndim:
        yield Target(name, None, tensor)
    else:
        local = tensor.shape[rule.dim]
        whole = local * size if rule.size is None else rule.size
        if local * size < whole:
            raise ValueError(
                f"{name}: {local} of {whole} rows or columns on this rank, which {size} equal ranks do not cover; "
                "correct the sizes, or give each rank a Target by hand"
            )
        start, stop = min(rank * local, whole), min((rank + 1) * local, whole)
        yield _slice(name, tensor.narrow(rule.dim, 0, stop - start), rule.dim, start, whole)


def _stacked(rule: Stack, name: str, tensor: torch.Tensor, rank: int, size: int) -> Iterator[Target]:
    rows = []
    for part in rule.parts:
        if size % part.copies or part.size % (size // part.copies):
            raise ValueError(
                f"{name}: part {part.name} of {part.size} rows, {part.copies} copies of each, does not divide among "
                f"{size} ranks; correct its size or its copies"
            )
        rows.append(part.size * part.copies // size)
    if sum(rows) != tensor.shape[0]:
        raise ValueError(
            f"{name}: the parts of its rule have {sum(rows)} rows on this rank, expected {tensor.shape[0]} rows; "
            "correct the sizes"
        )
    for part, view in zip(rule.parts, tensor.split(rows), strict=True):
        if "{" in part.name:
            full = part.name.replace("{parent}", _parent(name))
        else:
            full = ".".join(filter(None, [_parent(name), part.name, name.rpartition(".")[2]]))
        yield _slice(full, view, 0, rank // part.copies * len(view), part.size)


def _slice(name: str, view: torch.Tensor, dim: int, start: int, size: int) -> Target:
    """The indices from `start` of a dim of `size`, all of the others."""
    region = [slice(None)] * view.ndim
    region[dim] = slice(start, None)
    return Target(name, region, view, (*view.shape[:dim], size, *view.shape[dim + 1 :]))


def _parent(name: str) -> str:
    """The path above the last two names, those of a module and its parameter."""
    return ".".join(name.split(".")[:-2])
