"""`torch.amp.GradScaler` on models that several axes cut: an overflow is found on all ranks, or a warning tells."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardkit.core as ours
from tests.support import rank_mesh, run_ranks


class Layers(nn.Module):
    def __init__(self, *, scalar: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5)) if scalar else None
        self.embed, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(self.embed(x)).relu())
        return y if self.scale is None else y * self.scale


def scalar_first(world_size: int) -> Any:
    """As CLIP: a scalar among the root's parameters, before all others."""
    model: Any = Layers(scalar=True)
    ours.fully_shard(model.up)
    return ours.fully_shard(model)


def replicas(world_size: int) -> Any:
    model = Layers(scalar=True)
    mesh = rank_mesh((2, world_size // 2), ("replicate", "shard"))
    ours.fully_shard(model.up, mesh=mesh)
    return ours.fully_shard(model, mesh=mesh)


def tensor_parallel(world_size: int) -> Any:
    model, mesh = Layers(), rank_mesh((world_size // 2, 2), ("dp", "tp"))
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"embed": whole, "up": ColwiseParallel(), "down": RowwiseParallel()})
    return ours.fully_shard(model, mesh=mesh["dp"])


def replicas_first(world_size: int) -> Any:
    model = Layers()
    ours.fully_shard(model.embed, mesh=rank_mesh((world_size, 1), ("replicate", "shard")))
    return ours.fully_shard(model)


def tensor_parallel_later(world_size: int) -> Any:
    model, mesh = Layers(), rank_mesh((world_size // 2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return ours.fully_shard(model, mesh=mesh["dp"])


def expert_in_bfloat16(world_size: int) -> Any:
    """The expert's gradients are a list of their own, and lie on half of the ranks."""
    model, mesh = Layers(), rank_mesh((2, world_size // 2), ("ep", "dp"))
    model.up.to(torch.bfloat16)
    model.up.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
    model.up.register_forward_hook(lambda module, args, output: output.float())
    ours.fully_shard(model.up, mesh=mesh["dp"])
    return ours.fully_shard(model)


def expert_beside_replicas(world_size: int) -> Any:
    model, mesh = Layers(), rank_mesh((2, world_size // 2), ("replicate", "shard"))
    ours.fully_shard(model.up, mesh=mesh["shard"])
    return ours.fully_shard(model, mesh=mesh)


def scaled_backward(model: nn.Module, scaler: Any) -> None:
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()


def finds_an_overflow(
    rank: int, world_size: int, build: Callable[[int], Any], scaler: Any, options: dict[str, bool]
) -> None:
    """An overflow in one shard makes all ranks skip the step and halve the scale; the next step is right."""
    model, reference = build(world_size), build(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    scaled_backward(model, scaler)
    if rank == 1 or (build is replicas and rank == 3):  # its replica
        model.up.weight.grad.to_local()[-1, -1] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(map(torch.equal, before, [parameter.full_tensor() for parameter in model.parameters()]))
    optimizer.zero_grad()
    scaled_backward(model, scaler)
    reference(torch.ones(2, 4)).sum().backward()
    scaler.unscale_(optimizer)
    for parameter, same in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad.to_local(), same.grad.to_local())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not any(map(torch.equal, before, [parameter.full_tensor() for parameter in model.parameters()]))


def _finds_an_overflow(rank: int, world_size: int, build: Callable[[int], Any], options: dict[str, bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        finds_an_overflow(rank, world_size, build, torch.amp.GradScaler("cpu", init_scale=4.0), options)


@pytest.mark.parametrize(
    ("build", "world_size", "options"),
    [
        (scalar_first, 2, {"foreach": False}),
        (scalar_first, 3, {"fused": True}),
        (replicas, 4, {"foreach": True}),
        (tensor_parallel, 4, {"foreach": False}),
    ],
)
def test_an_overflow_on_one_rank_is_found_on_all(
    build: Callable[[int], Any], world_size: int, options: dict[str, bool]
) -> None:
    run_ranks(world_size, _finds_an_overflow, build, options)


OVERLOOKED = {
    replicas_first: (2, r"2 ranks share .* parameter 'embed\.weight', .* is sharded: 1\."),
    tensor_parallel_later: (4, r"4 ranks share .* parameter 'embed\.weight', .* is sharded: 2\."),
    expert_in_bfloat16: (4, r"4 ranks share .* parameter 'up\.weight', .* is sharded: 2\."),
    expert_beside_replicas: (4, r"4 ranks share .* parameter 'embed\.weight', .* is sharded: 2\."),
}


def _goes_apart(rank: int, world_size: int, build: Callable[[int], Any], match: str) -> float:
    model = build(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled_backward(model, scaler)
    if rank == 1:
        model.up.weight.grad.to_local()[-1, -1] = float("inf")
    with pytest.warns(UserWarning, match=match + " .*ShardedGradScaler"):
        scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


def _checked_again(rank: int, world_size: int, build: Callable[[int], Any]) -> None:
    """Of the layer that remains to be trained, all ranks decide alike; the check of an optimizer is not repeated."""
    model = build(world_size)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for warns in (True, False):
        scaled_backward(model, scaler)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            scaler.step(optimizer)
        assert [one.category for one in seen] == [UserWarning] * warns
        scaler.update()
    model.up.requires_grad_(requires_grad=False)
    model.down.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.embed.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)


@pytest.mark.parametrize("build", OVERLOOKED)
def test_a_warning_tells_of_overflows_that_may_be_overlooked(build: Callable[[int], Any]) -> None:
    world_size, match = OVERLOOKED[build]
    scales = run_ranks(world_size, _goes_apart, build, match)
    assert set(scales) == {2.0, 4.0}, "torch looks at all ranks now: the warning is wrong"
    run_ranks(world_size, _checked_again, build)


class _Synced(torch.amp.GradScaler):
    """Reduces the flag over all ranks itself."""

    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        for found in state["found_inf_per_device"].values():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return super()._maybe_opt_step(optimizer, state, *args, **kwargs)


def _of_another_class(rank: int, world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        finds_an_overflow(rank, world_size, replicas_first, _Synced("cpu", init_scale=4.0), {})


def test_scalers_of_other_classes_may_know_better() -> None:
    run_ranks(2, _of_another_class)


def _one_optimizer_of_two(rank: int, world_size: int) -> None:
    model = expert_in_bfloat16(world_size)
    expert = torch.optim.SGD(model.up.parameters(), lr=0.1)
    dense = torch.optim.SGD([*model.embed.parameters(), *model.down.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled_backward(model, scaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.unscale_(dense)
    with pytest.warns(UserWarning, match=r"4 ranks share .* parameter 'up\.weight', .* is sharded: 2\."):
        scaler.unscale_(expert)


def test_an_optimizer_of_experts_alone_would_let_scales_go_apart() -> None:
    run_ranks(4, _one_optimizer_of_two)


def _ignored_expert(rank: int, world_size: int) -> None:
    """A DTensor that is not ours, on half of the ranks, behind a list of its own."""
    mesh = rank_mesh((2, world_size // 2), ("ep", "dp"))
    model: Any = Layers()
    model.up = nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh["dp"], [Shard(0)]))
    model.up.forward = lambda x: x.new_zeros(len(x), 8) + x.sum()
    ours.fully_shard(model, ignored_params={model.up.weight})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled_backward(model, scaler)
    model.up.weight.grad = torch.zeros_like(model.up.weight)
    with pytest.warns(UserWarning, match=r"4 ranks share .* parameter of shape \(8, 4\), .* is sharded: 2\."):
        scaler.unscale_(optimizer)


def test_a_warning_tells_of_tensors_that_are_not_sharded_by_us() -> None:
    run_ranks(4, _ignored_expert)


def _unscales_what_waits(rank: int, world_size: int) -> None:
    model = Layers()
    ours.fully_shard(model.embed, shard_placement_fn=lambda parameter: ours.Owned() if parameter.ndim == 2 else None)
    later: Any = ours.fully_shard(model.up)
    ours.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    later.set_requires_gradient_sync(False)
    scaled_backward(model, scaler)
    with pytest.raises(RuntimeError, match=r"'up\.weight' was left unreduced"):
        scaler.unscale_(optimizer)


def test_gradients_that_wait_are_not_unscaled() -> None:
    run_ranks(2, _unscales_what_waits)


def _other_programs(rank: int, world_size: int) -> None:
    """A plain model, and an optimizer's wrapper that can be neither hashed nor referred to weakly."""

    class Wrapper:
        __slots__ = ("param_groups", "step")
        __hash__ = None  # type: ignore[assignment]

    ours.fully_shard(nn.Linear(4, 4))
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapper: Any = Wrapper()
    wrapper.param_groups, wrapper.step = inner.param_groups, inner.step
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaled_backward(model, scaler)
    scaler.step(wrapper)
    scaler.update()


def test_other_programs_are_left_alone() -> None:
    run_ranks(1, _other_programs)


def _scalar_state(rank: int, world_size: int) -> None:
    model = scalar_first(world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    copied = copy.deepcopy(model.scale.grad)
    assert type(copied) is DTensor and torch.equal(copied.to_local(), model.scale.grad.to_local())
    optimizer.step()
    assert {type(value) for value in optimizer.state[model.scale].values()} <= {torch.Tensor, DTensor}


def test_the_class_of_a_scalar_gradient_does_not_spread() -> None:
    run_ranks(2, _scalar_state)
