"""Uses of parameters, whose memory comes and goes, in forward: each works, or is an error that names the module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from shardkit.core import Blocks, Owned, fully_shard
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_children, shard_each


def _keeping(keep: Callable[[Tensor], Any]) -> nn.Module:
    """Keeps its weight, or a view of it, in the attribute `kept`."""

    def run(module: Any, x: Tensor) -> Tensor:
        module.kept = keep(module.weight)
        return x @ module.weight

    return Composed(run, weight=nn.Parameter(torch.randn(8, 8)))


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "a view": torch.t,
    "a view without gradient, in a dict": lambda weight: {"flat": weight.detach().flatten()},
    "the parameter, in a list": lambda weight: [weight],
}


@pytest.mark.parametrize("what", KEPT)
@on_ranks(1, 2)
def test_parameter_that_is_kept_on_a_module(rank: int, world_size: int, what: str) -> None:
    model = nn.Sequential(_keeping(KEPT[what]), _keeping(torch.clone))
    shard_children(model, mesh=rank_mesh((world_size,)))
    if world_size == 1:  # nothing is freed
        model(torch.ones(2, 8)).sum().backward()
        return
    with pytest.raises(RuntimeError, match=r"0' keeps parameter '0\.weight', or a view.*'kept'.*Keep a clone"):
        model(torch.ones(2, 8))


def _around(module: Any, x: Tensor) -> Tensor:
    """Keeps a view of its child's weight, as a module does that is put around it later."""
    module.kept = module.inner.weight.t()
    return module.inner(x)


@on_ranks(2)
def test_a_module_that_is_put_in_after_fully_shard_keeps_nothing_either(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=rank_mesh((world_size,)))
    model[0] = Composed(_around, inner=model[0])
    with pytest.raises(RuntimeError, match=r"0' keeps parameter '0\.inner\.weight', or a view.*Keep a clone"):
        model(torch.ones(2, 8))


@on_ranks(2)
def test_parameter_of_another_call(rank: int, world_size: int) -> None:
    run = lambda module, x: module.first(x) @ module.second.weight  # noqa: E731
    model = Composed(run, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
    shard_each(model.second, model, mesh=rank_mesh((world_size,)))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        model(torch.randn(2, 8))
    assert "'FSDPComposed' computes with a sharded parameter" in "".join(raised.value.__notes__)


@on_ranks(2, isolated=True)
def test_array_over_a_parameter(rank: int, world_size: int) -> None:
    model = nn.Sequential(_keeping(lambda weight: weight.detach().numpy()), nn.Linear(8, 8))
    shard_children(model, mesh=rank_mesh((world_size,)))
    model.set_prefetch_depth(0)
    with pytest.raises(RuntimeError, match=r"the memory of parameter '0\.weight' cannot be freed.*numpy"):
        model(torch.randn(2, 8))


def _unfrozen(head: Any) -> None:
    head.weight.requires_grad_(False)
    head(torch.ones(2, 8))
    head.weight.requires_grad_()
    head(torch.ones(2, 8))
    head.reshard()


@on_ranks(2)
@pytest.mark.parametrize(
    ("placement", "first"),
    [
        (Shard(0), _unfrozen),
        (Shard(1), nn.Module.double),
        (Replicate(), nn.Module.train),
        (Owned(), _unfrozen),
        (Blocks(rows=3), nn.Module.double),
        (Blocks(elements=5), nn.Module.train),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_weight_gathered_outside_forward(
    rank: int, world_size: int, placement: Placement, first: Callable[[Any], Any]
) -> None:
    """Each rank keeps the gradient of its own loss, as on stock; with `Owned` and `Blocks` there was none."""
    mesh = rank_mesh((world_size,))
    body = fully_shard(nn.Linear(8, 8), mesh=mesh)
    head = fully_shard(nn.Linear(8, 4, bias=False), mesh=mesh, shard_placement_fn=lambda _: placement)
    first(head)
    x = torch.randn(2, 8) * (rank + 1)
    loss = F.linear(body(x), head.weight.full_tensor().float()).sum()
    with pytest.warns(
        UserWarning, match=r"reached the sharded parameter 'weight' itself.*full_tensor\(\).*Otherwise use"
    ):
        loss.backward()
    weight = head.weight.full_tensor().detach()
    (gradient,) = torch.autograd.grad(head.weight.full_tensor().square().sum(), [head.weight])
    assert gradient.placements == head.weight.placements and torch.equal(gradient.full_tensor(), 2 * weight)


@on_ranks(2)
def test_weight_after_forward_without_grad(rank: int, world_size: int) -> None:
    """Log-probabilities from hidden states. Stock keeps the root's parameters after each forward."""
    x = torch.ones(2, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    expected = F.linear(model(x), model[1].weight.t())
    fully_shard(model, mesh=rank_mesh((world_size,)))
    with torch.no_grad():
        hidden = model(x)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            F.linear(hidden, model[1].weight.t())
        model.unshard()
        assert torch.equal(F.linear(hidden, model[1].weight.t()), expected)
        model.set_reshard_after_forward(False)
        assert torch.equal(F.linear(model(x), model[1].weight.t()), expected)
