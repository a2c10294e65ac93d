"""Who shards the workload. Every system wraps each block and then the whole network, and uses one optimizer."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from side_by_side.networks import Block, Workload

Autocast = Callable[[], contextlib.AbstractContextManager[None]]
Prepare = Callable[[torch.optim.Optimizer], object]


def _as_it_is(optimizer: torch.optim.Optimizer) -> None:
    """Stock's optimizers step on DTensors."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `group` spans all ranks of the system, also where nothing is sharded."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class System:
    """A network ready to train. `around_forward` makes the context that forward runs in.

    `shards`: each rank holds a part of the gradients, so that their squares add up over the ranks.
    `averages`: gradients are averaged over the ranks.
    `prepare_optimizer`: the change to an element-wise optimizer that the system's documentation recommends.
    """

    network: nn.Module
    around_forward: Autocast
    shards: bool
    averages: bool
    prepare_optimizer: Prepare = _as_it_is


def _shardkit(workload: Workload, place: Place, **options: object) -> System:
    from shardkit import core

    network = workload.build()
    if workload.optimizer == "muon":
        options["shard_placement_fn"] = core.placements_for(network, torch.optim.Muon)
    return _per_block(core, network, workload, place, core.optimizer_step_on_shards, **options)


def _shardkit_int8(workload: Workload, place: Place) -> System:
    from shardkit.core import CompressionPolicy

    policy = CompressionPolicy(gather="int8", reduce="int8")
    return _shardkit(workload, place, compression_policy=policy)


def _fsdp2(workload: Workload, place: Place) -> System:
    from torch.distributed import fsdp

    return _per_block(fsdp, workload.build(), workload, place)


def _per_block(
    api: Any, network: nn.Module, workload: Workload, place: Place, prepare: Prepare = _as_it_is, **options: object
) -> System:
    options["mesh"] = dist.device_mesh.init_device_mesh(place.device.type, (place.world_size,))
    if workload.bf16:
        options["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in network.modules():
        if isinstance(module, Block):
            api.fully_shard(module, **options)
    api.fully_shard(network, **options)
    return System(network, contextlib.nullcontext, shards=True, averages=True, prepare_optimizer=prepare)


def _fsdp1(workload: Workload, place: Place) -> System:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if workload.bf16 else None
    network = FullyShardedDataParallel(
        workload.build(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=precision,
        device_id=place.device,
        # One flat parameter a unit is the faster way, but cannot hold trained and frozen parameters together.
        use_orig_params=workload.frozen,
    )
    return System(network, contextlib.nullcontext, shards=True, averages=True)


def _ddp(workload: Workload, place: Place) -> System:
    network = nn.parallel.DistributedDataParallel(workload.build())
    return System(network, _autocast(workload, place.device), shards=False, averages=True)


def _alone(workload: Workload, place: Place) -> System:
    return System(workload.build(), _autocast(workload, place.device), shards=False, averages=False)


def _autocast(workload: Workload, device: torch.device) -> Autocast:
    """Where nobody casts parameters once for all their uses, autocast comes nearest to the same computation."""
    return functools.partial(torch.autocast, device.type, torch.bfloat16) if workload.bf16 else contextlib.nullcontext


SYSTEMS: dict[str, Callable[[Workload, Place], System]] = {
    "shardkit": _shardkit,
    "fsdp2": _fsdp2,
    "fsdp1": _fsdp1,
    "ddp": _ddp,
    "alone": _alone,
    "shardkit-int8": _shardkit_int8,
}
COMPARED = ("shardkit", "fsdp2", "fsdp1", "ddp", "alone")
"""Default systems of `--systems`: those that give the same results up to rounding."""
ON_GPUS = ("shardkit", "fsdp2")
"""The same on GPUs, where all systems of a large model would not fit beside each other."""


def optimizers_for(system: System, workload: Workload) -> list[torch.optim.Optimizer]:
    """AdamW over all trained parameters at once: its default loop would cost more than sharding does.

    With Muon, the matrices of the blocks are its own.
    """
    trained = [parameter for parameter in system.network.parameters() if parameter.requires_grad]
    matrices = set(_matrices(system.network)) if workload.optimizer == "muon" else set()
    optimizer = torch.optim.AdamW([p for p in trained if p not in matrices], lr=1e-3, foreach=True)
    system.prepare_optimizer(optimizer)
    if not matrices:
        return [optimizer]
    return [torch.optim.Muon([p for p in trained if p in matrices], lr=1e-3, adjust_lr_fn="match_rms_adamw"), optimizer]


def _matrices(network: nn.Module) -> Iterator[nn.Parameter]:
    for block in network.modules():
        if isinstance(block, Block):
            yield from (p for p in block.parameters() if p.ndim == 2 and p.requires_grad)
