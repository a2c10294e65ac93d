"""Who shards the workload. Every system wraps each block and then the whole network, and uses one optimizer."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from side_by_side.networks import Block
from side_by_side.workloads import Workload

Autocast = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Place:
    """Where a rank runs. `group` spans all ranks of the system, also where nothing is sharded."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class System:
    """A network ready to train. `around_forward` opens what the forward runs in.

    `shards`: each rank holds a part of the gradients, so that their squares add up over the ranks.
    `averages`: gradients are averaged over the ranks.
    `prepare_optimizer`: what the system's users are told to do with an element-wise optimizer.
    """

    network: nn.Module
    around_forward: Autocast
    shards: bool
    averages: bool
    prepare_optimizer: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None


def _shardkit(workload: Workload, place: Place) -> System:
    from shardkit.core import MixedPrecisionPolicy, fully_shard, optimizer_step_on_shards

    system = _per_block(workload, place, fully_shard, MixedPrecisionPolicy)
    return dataclasses.replace(system, prepare_optimizer=optimizer_step_on_shards)


def _fsdp2(workload: Workload, place: Place) -> System:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    return _per_block(workload, place, fully_shard, MixedPrecisionPolicy)


def _per_block(
    workload: Workload, place: Place, fully_shard: Callable[..., object], policy_type: Callable[..., object]
) -> System:
    mesh = dist.device_mesh.init_device_mesh(place.device.type, (place.world_size,))
    network = workload.build()
    policy = policy_type(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if workload.bf16 else policy_type()
    for module in network.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
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
}


def optimizer_for(system: System) -> torch.optim.Optimizer:
    """AdamW over all trained parameters at once: its default loop would cost more than sharding does."""
    trained = [parameter for parameter in system.network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    system.prepare_optimizer(optimizer)
    return optimizer
