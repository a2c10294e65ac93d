"""Lists, dicts and dataclasses that a caller hands down get the same contents from forward as in one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import MixedPrecisionPolicy, fully_shard
from tests.support import on_ranks
from tests.support.models import Composed
from tests.support.sharding import shard_each
from tests.support.twins import Twins, batch


@dataclasses.dataclass
class Cache:
    """Values that blocks leave for later blocks."""

    total: Any = 0.0
    calls: int = 0


def _fill(block: Any, x: Tensor, into: Any) -> Tensor | None:
    """Has a router, whose loss goes into a container."""
    hidden = block.linear(x).relu()
    loss = block.router(hidden).square().mean()
    if block.kind == "dict":
        into["losses"] = [*into.get("losses", ()), loss]
        into.pop("first", None)
    elif block.kind == "dataclass":
        into.total, into.calls = into.total + loss, into.calls + 1
    else:
        losses = into[0]["losses"] if block.kind == "nested" else into
        losses.append(loss)
        if block.kind == "nothing returned":
            losses.append(hidden)
            return None
    return hidden


def _model(run: Callable[..., Any], kind: str) -> nn.Module:
    blocks = [Composed(_fill, linear=nn.Linear(5, 5), router=nn.Linear(5, 1), kind=kind) for _ in range(3)]
    return Composed(run, blocks=nn.ModuleList(blocks), kind=kind)


def _hand_down(model: Any, x: Tensor) -> Tensor:
    losses: list[Any] = []
    into: Any = {"dict": {"first": x}, "dataclass": Cache(), "nested": ({"losses": losses},)}.get(model.kind, losses)
    for block in model.blocks:
        returned = block(x, into=into)
        x = losses.pop() if returned is None else returned
    if model.kind == "dataclass":
        assert into.calls == 3
        return x.square().mean() + into.total
    losses = into["losses"] if model.kind == "dict" else losses
    assert len(losses) == 3
    assert "first" not in into
    return x.square().mean() + torch.stack(losses).sum()


def _shard(model: Any) -> None:
    shard_each(*model.blocks, model)


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "nested", "nothing returned"])
@on_ranks(2)
def test_blocks_hand_their_losses_on(rank: int, world_size: int, kind: str) -> None:
    twins = Twins.of(rank, world_size, lambda: _model(_hand_down, kind), _shard)
    for needs_gradient in (False, True, False):
        twins.step(lambda model, of, needs=needs_gradient: model(batch(of, 2, 5).requires_grad_(needs)))
    with torch.no_grad():
        twins.sharded(batch(rank, 2, 5))


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_cache_is_filled_although_inputs_are_cast(rank: int, world_size: int, fails: bool) -> None:
    def run(module: Any, x: Tensor, cache: dict[str, Any]) -> Tensor:
        cache["seen"].append(x)
        cache["last"] = module.linear(x)
        return cache["last"]

    model = Composed(run, linear=nn.Linear(5, 5))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen: list[Tensor] = []
    cache = {"seen": seen, "scale": torch.ones(3)}
    scale, x = cache["scale"], batch(rank, 2, 5)
    with torch.no_grad():
        for _ in range(2):
            if fails:
                with pytest.raises(RuntimeError, match="shapes"):
                    model(x[:, 1:], cache)
                model.reset_iter_state()
            else:
                model(x, cache)
    assert cache["seen"] is seen
    assert len(seen) == 2
    assert cache["scale"] is scale, "the cast copy of an unchanged entry came back"
    assert ("last" in cache) is not fails


def _recompute(model: Any, x: Tensor) -> Tensor:
    """Recomputes blocks in backward, which adds to the list once more; the tensors of forward need no gradient."""
    into: list[Tensor] = []
    for block in model.blocks:
        x = checkpoint(block, x, into, use_reentrant=True)
    assert len(into) == 3
    return x.square().mean()


@on_ranks(2)
def test_a_recomputation_is_not_given_what_others_added(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, lambda: _model(_recompute, "list"), _shard)
    twins.step(lambda model, of: model(batch(of, 2, 5).requires_grad_()), times=2)
