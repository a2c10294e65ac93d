"""`torch.func` and forward-mode differentiation over sharded modules: the numbers of stock and of a single process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.models import Block
from tests.support.sharding import shard_each

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def _vjp(model: nn.Module) -> Any:
    output, backward = vjp(model, X)
    return output, backward(torch.ones_like(output)), backward(output.detach())


def _forward_mode(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))))


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: grad(lambda x: model(x).square().mean())(X),
    "grad_and_value": lambda model: grad_and_value(lambda x: model(x).square().mean())(X),
    "vjp": _vjp,
    "jvp": lambda model: jvp(model, (X,), (torch.ones_like(X),)),
    "vmap": lambda model: vmap(model)(X),
    "vmap of grad": lambda model: vmap(grad(lambda x: model(x).sum()))(X),
    "jacrev": lambda model: jacrev(lambda x: model(x).sum(0))(X),
    "jacfwd": lambda model: jacfwd(lambda x: model(x).sum(0))(X),
    "hessian": lambda model: hessian(lambda x: model(x).square().sum())(X[:1]),
    "jacobian": lambda model: torch.autograd.functional.jacobian(model, X),
}
STOCK_RUNS_THEM = torch.__version__ >= (2, 13)  # 2.11's asks for the storage of a tensor that a transform has wrapped
# Stock raises: its functions have no jvp.
BEYOND_STOCK = {"forward mode": _forward_mode}
# Backward outside of the transform. Stock raises at some of them.
OUTER = {
    "grad": lambda model: grad_and_value(lambda x: model(x).square().mean())(X)[1],
    "vjp": lambda model: vjp(model, X)[0].square().mean(),
    "jvp": lambda model: sum(one.square().mean() for one in jvp(model, (X,), (torch.ones_like(X),))),
    "vmap": lambda model: vmap(model)(X).square().mean(),
    "forward mode": lambda model: sum(one.square().mean() for one in _forward_mode(model)),
}


def _model(api: Any, world_size: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(6, 9), Block(6, 9), nn.Linear(6, 2))
    if api is not None:
        shard_each(*model[:2], model, api=api, mesh=rank_mesh((world_size,)), **options)
    return model


def _gradients(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]


def _results(api: Any, world_size: int, transform: Callable[[nn.Module], Any]) -> list[Tensor]:
    """The results of the transform, twice, and of an ordinary step afterwards."""
    model = _model(api, world_size)
    results = [tensor for _ in range(2) for tensor in pytree.tree_leaves(transform(model))]
    model(X).square().mean().backward()
    return [*results, *_gradients(model)]


@on_ranks(2, timeout=120)
def test_transforms(rank: int, world_size: int) -> None:
    for name, transform in (TRANSFORMS | BEYOND_STOCK).items():
        whole, seen = (_results(api, world_size, transform) for api in (None, shardkit))
        torch.testing.assert_close(seen, whole, msg=lambda message, name=name: f"{name}: {message}")
        if name in TRANSFORMS and STOCK_RUNS_THEM:
            expected = _results(stock, world_size, transform)
            assert all(torch.equal(one, two) for one, two in zip(expected, seen, strict=True)), name


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@on_ranks(2, timeout=120)
def test_backward_outside(rank: int, world_size: int, reshard_after_forward: bool | None) -> None:
    """The gradients of parameters when the value of a transform is differentiated in turn."""
    for name, loss_of in OUTER.items():
        seen = []
        for api in (None, shardkit):
            options = {} if api is None else {"reshard_after_forward": reshard_after_forward}
            model = _model(api, world_size, **options)
            loss_of(model).backward()
            seen.append(_gradients(model))
        torch.testing.assert_close(*seen, msg=lambda message, name=name: f"{name}: {message}")


@on_ranks(2)
def test_functional_call(rank: int, world_size: int) -> None:
    """It computes with DTensors like those of the state dict; others are refused. Stock ignores or keeps the values."""
    model, whole = _model(shardkit, world_size), _model(None, world_size)
    twice = {fqn: 2 * parameter.detach() for fqn, parameter in model.named_parameters()}
    plain = {fqn: 2 * parameter.detach() for fqn, parameter in whole.named_parameters()}
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(functional_call(model, twice, X), functional_call(whole, plain, X))
            assert torch.equal(model(X), whole(X))
    with pytest.raises(ValueError, match=r"'2\.weight' was replaced by a plain tensor.*functional_call"):
        functional_call(model, plain, X)
    model.reset_iter_state()
    with pytest.raises(ValueError, match=r"'2\.weight' was replaced by a DTensor that requires grad.*functional_call"):
        functional_call(model, {fqn: tensor.requires_grad_() for fqn, tensor in twice.items()}, X)
    model.reset_iter_state()
    model(X).sum().backward()
