"""Lists, dicts and dataclasses that a caller hands down get the same contents from forward as in one process."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import MixedPrecisionPolicy, fully_shard
from tests.support import on_ranks
from tests.support.twins import Twins, batch


@dataclasses.dataclass
class Cache:
    """Values that blocks leave for later blocks."""

    total: Any = 0.0
    calls: int = 0


class _Block(nn.Module):
    """Has a router, whose loss goes into a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.router = nn.Linear(5, 5), nn.Linear(5, 1)
        self.kind = kind

    def forward(self, x: Tensor, into: Any) -> Tensor | None:
        hidden = self.linear(x).relu()
        loss = self.router(hidden).square().mean()
        if self.kind == "dict":
            into["losses"] = [*into.get("losses", ()), loss]
            into.pop("first", None)
        elif self.kind == "dataclass":
            into.total, into.calls = into.total + loss, into.calls + 1
        else:
            losses = into[0]["losses"] if self.kind == "nested" else into
            losses.append(loss)
            if self.kind == "nothing returned":
                losses.append(hidden)
                return None
        return hidden


class _Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(kind) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Any] = []
        into: Any = {"dict": {"first": x}, "dataclass": Cache(), "nested": ({"losses": losses},)}.get(self.kind, losses)
        for block in self.blocks:
            returned = block(x, into=into)
            x = losses.pop() if returned is None else returned
        if self.kind == "dataclass":
            assert into.calls == 3
            return x.square().mean() + into.total
        losses = into["losses"] if self.kind == "dict" else losses
        assert len(losses) == 3
        assert "first" not in into
        return x.square().mean() + torch.stack(losses).sum()


def _shard(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


@pytest.mark.parametrize("kind", ["list", "dict", "dataclass", "nested", "nothing returned"])
@on_ranks(2)
def test_blocks_hand_their_losses_on(rank: int, world_size: int, kind: str) -> None:
    twins = Twins.of(rank, world_size, lambda: _Model(kind), _shard)
    for needs_gradient in (False, True, False):
        twins.step(lambda model, of, needs=needs_gradient: model(batch(of, 2, 5).requires_grad_(needs)))
    with torch.no_grad():
        twins.sharded(batch(rank, 2, 5))


class _Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, cache: dict[str, Any]) -> Tensor:
        cache["seen"].append(x)
        cache["last"] = self.linear(x)
        return cache["last"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_cache_is_filled_although_inputs_are_cast(rank: int, world_size: int, fails: bool) -> None:
    model = _Caching()
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


class _Recomputing(_Model):
    """Recomputes blocks in backward, which adds to the list once more; the tensors of forward need no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        into: list[Tensor] = []
        for block in self.blocks:
            x = checkpoint(block, x, into, use_reentrant=True)
        assert len(into) == 3
        return x.square().mean()


@on_ranks(2)
def test_a_recomputation_is_not_given_what_others_added(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, lambda: _Recomputing("list"), _shard)
    for _ in range(2):
        twins.step(lambda model, of: model(batch(of, 2, 5).requires_grad_()))


class _Filling(nn.Module):
    """Appends its loss to a list, and counts its calls in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, losses: list[Tensor], calls: dict[str, Any]) -> Tensor:
        hidden = self.linear(x)
        losses.append(hidden.float().square().mean())
        calls["count"] = calls.get("count", 0) + 1
        return hidden


class _Reading(nn.Module):
    """Calls a module of the same group, and reads at once what it has left."""

    def __init__(self, filling: nn.Module) -> None:
        super().__init__()
        self.filling = [filling]
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        losses, calls = [torch.zeros(())], {"scale": torch.ones(())}
        hidden = self.filling[0](self.linear(x), losses, calls)
        assert (len(losses), calls["count"]) == (2, 1)
        return hidden.square().mean() + sum(losses)


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filling = _Filling()
        self.reading = _Reading(self.filling)

    def forward(self, x: Tensor) -> Tensor:
        return self.reading(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_module_reads_what_another_of_its_group_has_left(rank: int, world_size: int) -> None:
    def shard(model: Any, **options: Any) -> None:
        fully_shard([model.reading, model.filling], **options)
        fully_shard(model, **options)

    twins = Twins.of(rank, world_size, _Both, shard)
    for _ in range(2):
        twins.step(lambda model, of: model(batch(of, 2, 5).requires_grad_()))
    model = _Both()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))  # inputs are cast, so copied
    model(batch(rank, 2, 5)).backward()
    assert model.filling.linear.weight.grad is not None
