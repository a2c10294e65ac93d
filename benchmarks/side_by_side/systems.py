"""Who shards the workload. Every system wraps each block and then the whole network, and uses one optimizer."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from side_by_side.networks import WORKLOADS, Block, Workload

Autocast = Callable[[], contextlib.AbstractContextManager[None]]
Shard = Callable[..., object]


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
    prepare_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None


def _shardkit(workload: Workload, place: Place, **options: object) -> System:
    from shardkit.core import MixedPrecisionPolicy, fully_shard, optimizer_step_on_shards, placements_for

    def shard(network: nn.Module) -> Shard:
        if workload.optimizer == "muon":
            options["shard_placement_fn"] = placements_for(network, torch.optim.Muon)
        return functools.partial(fully_shard, **options)

    system = _per_block(workload, place, shard, MixedPrecisionPolicy)
    return dataclasses.replace(system, prepare_optimizer=optimizer_step_on_shards)


def _shardkit_int8(workload: Workload, place: Place) -> System:
    from shardkit.core import CompressionPolicy

    policy = CompressionPolicy(gather="int8", reduce="int8")
    return _shardkit(workload, place, compression_policy=policy)


def _fsdp2(workload: Workload, place: Place) -> System:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return _per_block(workload, place, lambda network: fully_shard, MixedPrecisionPolicy)


def _per_block(
    workload: Workload, place: Place, shard_for: Callable[[nn.Module], Shard], policy_type: Callable[..., object]
) -> System:
    """`shard_for` gives the network's `fully_shard`."""
    mesh = dist.device_mesh.init_device_mesh(place.device.type, (place.world_size,))
    network = workload.build()
    shard = shard_for(network)
    policy = policy_type(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if workload.bf16 else policy_type()
    for module in network.modules():
        if isinstance(module, Block):
            shard(module, mesh=mesh, mp_policy=policy)
    shard(network, mesh=mesh, mp_policy=policy)
    return System(network, contextlib.nullcontext, shards=True, averages=True)


def _fsdp1(workload: Workload, place: Place) -> System:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if workload.bf16 else None
    network = FullyShardedDataParallel(
        workload.build(),
        auto_wrap_policy=ModuleWrapPolicy(set(_leaves(Block))),
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
    if not workload.bf16:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with torch.autocast(device.type, torch.bfloat16):
            yield

    return around


def _leaves(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for child in kind.__subclasses__():
        yield child
        yield from _leaves(child)


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


def imbalance(workload: str, world_size: int) -> float:
    """The largest over the mean load of the ranks that shardkit's plan gives the matrices to, for Muon's step."""
    from shardkit.core import placements_for

    with torch.device("meta"):
        network = WORKLOADS[workload].build()
    return placements_for(network, torch.optim.Muon).plan.imbalance(world_size)
