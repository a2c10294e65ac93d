"""Gradients that wait for their reduction follow `zero_grad`, against a single process: stock FSDP2 keeps them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Partial

from shardkit.core import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, optimizer_step_on_shards
from tests.support import rank_mesh, run_ranks

Zero = Callable[[nn.Module, torch.optim.Optimizer], None]

WAYS: dict[str, Zero] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "module around it": lambda model, optimizer: nn.Sequential(model).zero_grad(),
    "one by one": lambda model, optimizer: [setattr(p, "grad", None) for p in optimizer.param_groups[0]["params"]],
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def _sharded(hybrid: bool, policy: MixedPrecisionPolicy, reshard_after_forward: bool) -> nn.Module:
    model = _model()
    mesh = rank_mesh((2, 1), ("replicate", "shard")) if hybrid else None
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    return model


def _inputs(rank: int, step: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def _backward(model: nn.Module, rank: int, step: int, *, sync: bool = True, zero: Callable[[], None] | None = None):
    model.set_requires_gradient_sync(sync)
    loss = model(_inputs(rank, step)).square().sum()
    if zero is not None:
        zero()
    loss.backward()


def _expected(steps: list[int], world_size: int) -> list[Tensor]:
    model = _model()
    sum(model(_inputs(rank, step)).square().sum() for step in steps for rank in range(world_size)).backward()
    return [parameter.grad / world_size for parameter in model.parameters()]


def _compare(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-5, atol=1e-5)


_POLICIES = {
    "full precision": MixedPrecisionPolicy(),
    "accumulated in another dtype": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


def _zeroed(rank: int, world_size: int, way: str, policy: str, hybrid: bool) -> None:
    for reshard_after_forward in (True, False):
        for synced_before in (False, True):
            model = _sharded(hybrid, _POLICIES[policy], reshard_after_forward)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if synced_before:
                _backward(model, rank, 0)
            _backward(model, rank, 1, sync=False)
            _backward(model, rank, 2, sync=False)
            WAYS[way](model, optimizer)
            _backward(model, rank, 3, sync=False)
            _backward(model, rank, 4)
            _compare(model, _expected([3, 4], world_size))
            if way == "module around it":  # it does not see sharded parameters while unsharded ones are registered
                continue
            WAYS[way](model, optimizer)
            _backward(model, rank, 5, sync=False)
            _backward(model, rank, 6, zero=lambda: WAYS[way](model, optimizer))  # noqa: B023 - called at once
            _compare(model, _expected([6], world_size))


@pytest.mark.parametrize("hybrid", [False, True], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_zeroed_gradients_are_not_reduced(way: str, policy: str, hybrid: bool) -> None:
    run_ranks(2, _zeroed, way, policy, hybrid)


def _kept(rank: int, world_size: int, policy: str) -> None:
    """Zeros that were there before, a change of other gradients, a step of another optimizer: nothing is dropped."""
    model = _sharded(False, _POLICIES[policy], True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model, rank, 0)
    optimizer.zero_grad(set_to_none=False)
    _backward(model, rank, 1, sync=False)
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).zero_grad()
    _backward(model, rank, 2)
    _compare(model, _expected([1, 2], world_size))


@pytest.mark.parametrize("policy", _POLICIES)
def test_nothing_else_drops_gradients_that_wait(policy: str) -> None:
    run_ranks(2, _kept, policy)


def _shown(rank: int, world_size: int) -> None:
    """Until it is reduced a gradient is a DTensor that says so, and nothing takes it for a reduced one."""
    model = _sharded(False, MixedPrecisionPolicy(), True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model, rank, 0, sync=False)
    for parameter, gradient in zip(model.parameters(), _expected([0], world_size), strict=True):
        assert parameter.grad.placements == (Partial("avg"),)
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter '0\.weight' was left unreduced"):
        clip_grad_norm_(model.named_parameters(), 1.0)
    optimizer_step_on_shards(optimizer)
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' still waits for its reduction"):
        optimizer.step()
    _backward(model, rank, 1)
    _compare(model, _expected([0, 1], world_size))


def test_gradients_that_wait_are_seen_as_partial() -> None:
    run_ranks(2, _shown)
