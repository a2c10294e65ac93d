"""Notes on modules about fused parameters, and how tensor parallelism has cut these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from shardkit.core.parameters.adapters import Holder
from shardkit.core.parameters.region import regions_of_mesh
from shardkit.tp_adapter.placing import cuts
from shardkit.tp_adapter.sub_blocks import SubBlocks, check_sub_blocks
from shardkit.tp_adapter.torch_compat import StridedShard

__all__ = ["Declared", "check_whole_groups", "declare_sub_blocks", "declared_of", "placements_in_whole"]

_DECLARED = "_shardkit_sub_blocks"
"""Attribute of a module: a `Declared` for each of its fused parameters, by name. A note on a parameter itself would get
lost, as `module.to()` and `load_state_dict(assign=True)` put another tensor in its place."""


@dataclass(frozen=True)
class Declared:
    """The note about a fused parameter.

    Attributes:
        blocks: its logical tensors.
        axes: names of the axes over which the module's own DTensor cuts a stack. Its placements there say Shard, which
            is wrong for the whole stack (see Note [Fused weights] in `sub_blocks`).
    """

    blocks: SubBlocks
    axes: frozenset[str] = frozenset()

    def check_placed(self, value: DTensor, fqn: str) -> None:
        """Raises for a tensor with the module's own placements, which would be taken for other rows than its own.

        Raises:
            ValueError: if the parameter has not been through `fully_shard`; the message has the placements.
        """
        names = value.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, value.placements, strict=False):
            if name in self.axes and isinstance(placement, Shard) and not isinstance(placement, StridedShard):
                raise ValueError(
                    f"'{fqn}' has placements {tuple(value.placements)} on {value.device_mesh}, with which its module "
                    f"computes, but a rank's parts of {self.blocks.names} are not a Shard of the whole: call "
                    "fully_shard (on a data-parallel axis of one rank, if there is no other), and take its state dict"
                )


def declare_sub_blocks(module: nn.Module, name: str, sub_blocks: SubBlocks) -> None:
    """Notes on a module, for `fully_shard`, that its parameter `name` is fused. Call it before `fully_shard`.

    A plain parameter can be fused as well. Under tensor parallelism each rank's local tensor must hold its part of
    every logical tensor, in order, while the placements say Shard, as `FusedColwiseParallel` does. With sizes it holds
    whole groups and the placements are exact, as `ColwiseParallel` does. The note stays when the module is moved, cast,
    or loaded into.

    Raises:
        AttributeError: if the module has no such parameter.
        ValueError: as `check_sub_blocks`.
    """
    parameter = module.get_parameter(name)
    check_sub_blocks(parameter, f"'{type(module).__name__}.{name}'", sub_blocks)
    axes: frozenset[str] = frozenset()
    if isinstance(parameter, DTensor) and sub_blocks.sizes is None:
        along = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=False)
        axes = frozenset(axis for axis, placement in along if cuts(placement, sub_blocks.dim))
    declared = Declared(sub_blocks, axes)
    module.__dict__[_DECLARED] = {**module.__dict__.get(_DECLARED, {}), name: declared}


def declared_of(holders: Iterable[Holder]) -> Declared | None:
    """The declaration that `declare_sub_blocks` stored on one of the modules that hold a parameter, or None."""
    for module, name in holders:
        declared = module.__dict__.get(_DECLARED, {}).get(name)
        if isinstance(declared, Declared):
            return declared
    return None


def placements_in_whole(parameter: DTensor, blocks: SubBlocks, fqn: str) -> tuple[Placement, ...]:
    """The placements of a fused parameter's local tensor in the whole one: see Note [Fused weights].

    Raises:
        ValueError: if the number of ranks does not divide each logical tensor, so that placements could not tell them
            apart, or if ranks cut through a group.
    """
    if blocks.sizes is not None:
        described = f"parameter '{fqn}' with placements {tuple(parameter.placements)}"
        axes = zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)
        check_whole_groups(described, parameter.shape, blocks, [axis for axis in axes if cuts(axis[1], blocks.dim)])
        return tuple(parameter.placements)
    ranks = 1
    placements: list[Placement] = []
    for axis, placement in enumerate(parameter.placements):
        if cuts(placement, blocks.dim):
            ranks *= parameter.device_mesh.size(axis)
            parts = getattr(placement, "split_factor", 1) * len(blocks.names)
            placement = StridedShard(blocks.dim, split_factor=parts)
        placements.append(placement)
    length = parameter.shape[blocks.dim] // len(blocks.names)
    if length % ranks:
        raise ValueError(
            f"parameter '{fqn}' with placements {tuple(parameter.placements)} is made of {blocks.names}, of {length} "
            f"each on dim {blocks.dim}, which {ranks} ranks do not divide; "
            "use a number that does"
        )
    return tuple(placements)


def check_whole_groups(
    described: str, shape: Sequence[int], blocks: SubBlocks, cutting: Sequence[tuple[int, Placement]]
) -> None:
    """Raises unless every rank gets whole groups of a parameter, which messages call `described`.

    Args:
        described: name of the parameter.
        shape: shape of the whole parameter.
        blocks: its logical tensors, with sizes.
        cutting: axes that cut `blocks.dim`: the number of ranks along each, and its placement.

    Raises:
        ValueError: with the sizes, where groups are cut, and how to pack a weight so that none is.
    """
    assert blocks.sizes is not None, described
    sizes, placements = [size for size, _ in cutting], [placement for _, placement in cutting]
    regions = regions_of_mesh(described, shape, placements, sizes)
    edges = {edge for region in regions for run in region.runs[blocks.dim] for edge in run}
    group, length = sum(blocks.sizes), shape[blocks.dim]
    if within := sorted(edge for edge in edges if edge % group):
        raise ValueError(
            f"{described}: dim {blocks.dim} of {length} consists of groups of {group}, made of {blocks.names} with "
            f"{blocks.sizes} in each, and {math.prod(sizes)} ranks cut through groups at {within}. Use a number of "
            f"ranks that divides {length // group}, the number of groups. A stack of whole logical tensors (all "
            "queries, all keys, all values) is one group: pack it group by group instead (the queries of a group, its "
            "key, its value, then the next group), by SubBlocks.fuse, and compute so; or keep the logical tensors as "
            "layers of their own"
        )
