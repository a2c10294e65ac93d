"""The attributes that other software uses of a sharded module: one contract per row, tested without the consumer."""

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import _fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelining
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.comms import CountingAllGather, RankOrderReduceScatter
from tests.support.models import Block, Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal

# -- names -------------------------------------------------------------------------------------------------------------


def _methods(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("__")}


def test_every_method_of_stock_is_overridden() -> None:
    """A method that torch adds would otherwise run against a state that is not stock's."""
    assert _methods(stock.FSDPModule) - _methods(shardkit.FSDPModule) == set()
    assert _methods(stock.UnshardHandle) - _methods(shardkit.UnshardHandle) == set()


def test_public_names_of_stock_are_offered() -> None:
    names = [name for name in _fully_shard.__all__ if not name.startswith("_")]
    assert [name for name in names if not hasattr(shardkit, name)] == []


# -- isinstance and state ----------------------------------------------------------------------------------------------


def _sharded_mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Block(7, 13), Block(7, 5), nn.Linear(7, 3))
    return shard_each(model[0], model[1], model, mesh=rank_mesh((dist.get_world_size(),)))


@on_ranks(2)
def test_isinstance_and_state(rank: int, world_size: int) -> None:
    model = _sharded_mlp()
    for module in (model, model[0]):
        assert isinstance(module, stock.FSDPModule)
        assert isinstance(module, shardkit.FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert not isinstance(model[2], stock.FSDPModule)
    assert type(model).__name__ == "FSDPSequential"
    assert type(model[0]).__name__ == "FSDPBlock"
    for module, original in ((model, nn.Sequential), (model[0], Block)):
        assert type(module).__mro__[type(module)._orig_cls_mro_index] is original
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, stock.UnshardHandle)
    handle.wait()
    model[0].reshard()
    # Indexing a sharded container makes a plain one of the original class.
    assert type(model[:2]) is nn.Sequential
    # Stock's state lookup finds our state, with the attributes that torch's pipelining reads.
    model(torch.randn(2, 7)).sum().backward()
    state = stock.fully_shard.state(model)
    assert state is not None
    assert state is shardkit.fully_shard.state(model)
    assert stock.fully_shard.state(model[2]) is None
    assert [
        one is stock.fully_shard.state(module)
        for one, module in zip(state._state_ctx.all_states, (model, model[0], model[1]), strict=True)
    ] == [True] * 3
    for one in state._state_ctx.all_states:
        assert len(one._fsdp_param_groups) == 1
    # Dynamo
    for module in model.modules():
        assert module._is_fsdp_managed_module is True
        assert module._fsdp_use_orig_params is True


class _OwnNames(nn.Linear):
    """Attributes and methods with names that an engine might use, too."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self._groups = self._states = [1, 2]

    def _params(self) -> list[nn.Parameter]:
        return [*self.parameters()]

    _set = _sharded_groups = _root_schedule = _params

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(self._params()) * len(self._groups)


@on_ranks(2)
def test_names_of_the_users_class_stay_its_own(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = _OwnNames()
    model = shardkit.fully_shard(copy.deepcopy(plain))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.synchronize_gradients()
    plain(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), plain.weight.grad)
    model.reset_iter_state()
    model.zero_grad()
    assert model.weight.grad is None


@on_ranks(1)
def test_replicate_is_refused(rank: int, world_size: int) -> None:
    """The composable `replicate` of torch asks the registry of composable calls, and refuses sharded modules."""
    model = _sharded_mlp()
    for managed in (model, model[0], model[2], next(model[0].children())):
        with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
            replicate(managed)
    child = replicate(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"replicate\(\) was called on this DDPLinear"):
        shardkit.fully_shard(child)
    tied = nn.Linear(3, 3)
    tied.weight = child.weight
    model = shardkit.fully_shard(nn.Sequential(child, tied))
    with pytest.raises(RuntimeError, match=r"plain tensor that was parameter '1.weight' before fully_shard"):
        model(torch.ones(1, 3)).sum().backward()


def _replicate_within_parent(api: Any, how: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), Block(7, 9), nn.Linear(7, 3))
    mesh = rank_mesh((dist.get_world_size(),))
    if how == "DDP":
        replicate(model[1])
    else:
        replicate_with_fsdp(model[1], mesh=mesh)
    api.fully_shard(model[0], mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(3):
        torch.manual_seed(10 * dist.get_rank() + step)
        loss = model(torch.randn(2, 7)).square().mean()
        loss.backward()
        seen += [loss.detach(), *[_local(parameter.grad) for parameter in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *[_local(parameter.detach()) for parameter in model.parameters()]]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.mark.parametrize("how", ["DDP", "FSDP"])
@on_ranks(2)
def test_a_replicated_child_is_left_alone(rank: int, world_size: int, how: str) -> None:
    """Its gradients are reduced by torch, and its parameters are not sharded with the parent's."""
    assert_equal(*(_replicate_within_parent(api, how) for api in (shardkit, stock)))


# -- torch's tools -----------------------------------------------------------------------------------------------------


def _counts(model: nn.Module) -> dict[str, int]:
    with CommDebugMode() as mode:
        model(torch.randn(2, 7)).sum().backward()
    return {str(operation).rpartition(".")[2]: count for operation, count in mode.get_comm_counts().items() if count}


@on_ranks(2, 4)
def test_counted_communication(rank: int, world_size: int) -> None:
    """CommDebugMode sees c10d's collectives: set-up, HSDP's all-reduces, the user's own; no other of ours on gloo."""
    model = _sharded_mlp()
    first = _counts(model)
    assert first.pop("allreduce_") == 1  # do the ranks have the same parameters?
    assert first.keys() <= {"allgather_", "_allgather_base_"}  # they meet; torch 2.15 has the latter
    assert _counts(model) == {}
    for module in (model, model[0], model[1]):
        module.set_custom_all_gather(CountingAllGather())
        module.set_custom_reduce_scatter(RankOrderReduceScatter())
    gathers, reductions = 4, 3  # the first block is gathered twice; backward begins with the other and the root
    assert _counts(model) == {"allgather_": gathers + reductions}  # the custom reduction also calls an all-gather
    if world_size == 4:
        model = shardkit.fully_shard(Block(7, 13), mesh=rank_mesh((2, 2), ("replicate", "shard")))
        _counts(model)
        assert _counts(model) == {"allreduce_": 1}


# -- torch's pipelining ------------------------------------------------------------------------------------------------

WIDTH, MICRO_BATCHES = 8, 4


def _stage() -> Any:
    """A stage of two blocks, each sharded on its own, and a bias that belongs to the root."""

    def run(stage: Any, x: Tensor) -> Tensor:
        for block in stage.blocks:
            x = block(x)
        return x + stage.bias

    blocks = nn.ModuleList([Block(WIDTH, 12), Block(WIDTH, 5)])
    return Composed(run, blocks=blocks, bias=nn.Parameter(torch.zeros(WIDTH)))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _pipelined(api: Any, schedule: str, stages_per_rank: int, calls: int = 1) -> dict[str, Tensor]:
    """Gradients of three steps; with several `calls` in each, the last one reduces the gradients of all."""
    mesh = rank_mesh((2, dist.get_world_size() // 2), ("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    count = 2 * stages_per_rank
    place = pp.get_local_rank()
    torch.manual_seed(0)
    all_stages = [_stage() for _ in range(count)]
    cls = getattr(pipelining, schedule)
    indices = [place, count - 1 - place] if "ZBV" in schedule else list(range(place, count, 2))
    stages, trace = [], {}
    for index in indices:
        module = all_stages[index]
        for block in module.blocks:
            # Schedules that split backward look for unsharded parameters on the stage when its input part begins.
            api.fully_shard(block, mesh=dp, reshard_after_forward="Zero" not in schedule)
        api.fully_shard(module, mesh=dp, reshard_after_forward=False)
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=pp.get_group()))
    runner = cls(stages[0] if stages_per_rank == 1 else stages, MICRO_BATCHES, loss_fn=_loss)
    optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=0.1) for stage in stages]
    has_first, has_last = 0 in indices, count - 1 in indices
    for step in range(3):
        losses: list[Tensor] = []
        for call in range(calls):
            inputs, target = _batch(dp.get_local_rank(), step * calls + call)
            runner.step(
                *([inputs] if has_first else []),
                target=target if has_last else None,
                losses=losses if has_last else None,
                **({"finalize_gradients": call == calls - 1} if calls > 1 else {}),
            )
        for micro, loss in enumerate(losses):
            trace[f"step {step}: loss {micro}"] = loss.detach()
        for index, stage, optimizer in zip(indices, stages, optimizers, strict=True):
            for fqn, parameter in stage.submod.named_parameters():
                assert isinstance(parameter, DTensor), fqn
                trace[f"step {step}: gradient {index}.{fqn}"] = parameter.grad.to_local().clone()
            optimizer.step()
            optimizer.zero_grad()
    return trace


def _batch(data_rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * data_rank + step)
    shape = (2 * MICRO_BATCHES, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.daily(schedule=["ScheduleGPipe", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize(
    ("world_size", "schedule", "stages_per_rank"),
    [
        (2, "ScheduleGPipe", 1),
        (2, "Schedule1F1B", 1),
        (4, "Schedule1F1B", 1),
        (2, "ScheduleInterleaved1F1B", 2),
        (4, "ScheduleInterleaved1F1B", 2),
        (2, "ScheduleInterleavedZeroBubble", 2),
        pytest.param(
            *(4, "ScheduleZBVZeroBubble", 2),
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 13), reason="torch 2.11 sends from a rank to itself, over gloo in vain"
            ),
        ),
    ],
)
@on_ranks()
def test_pipelining(rank: int, world_size: int, schedule: str, stages_per_rank: int) -> None:
    assert_equal(*(_pipelined(api, schedule, stages_per_rank) for api in (shardkit, stock)))


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="the option came with torch 2.15")
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("Schedule1F1B", 1), ("ScheduleInterleavedZeroBubble", 2)])
@on_ranks(2)
def test_pipelining_reduces_gradients_of_several_calls(
    rank: int, world_size: int, schedule: str, stages_per_rank: int
) -> None:
    assert_equal(*(_pipelined(api, schedule, stages_per_rank, calls=2) for api in (shardkit, stock)))
