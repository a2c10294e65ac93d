"""Optimizer state of one process, loaded into sharded parameters: the next step is that of the one process."""

import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from shardkit.core import optimizer_step_on_shards
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.torch_compat import local_of
from tests.core.optimizer_steps.placed_training import build, check, optimizer_for, part, sharded, step
from tests.support import on_ranks, run_ranks

# With the placements that each can step on.
KINDS = {
    "torch.optim.AdamW": ["owned", "rows", "elements", "shard"],
    "torch.optim.Muon": ["owned"],
    "torch.optim.Adafactor": ["owned"],
    "pytorch_optimizer.SOAP": ["owned"],
    "torchao.optim.AdamW8bit": ["owned", "rows", "elements"],
    "torchao.optim.AdamW4bit": ["owned", "rows", "elements"],
    "bitsandbytes.optim.AdamW8bit": ["owned", "rows", "elements"],
}


def alone(kind: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any], list[torch.Tensor]]:
    """A model after two steps, state dicts of its optimizer by number and by name, and parameters a step later."""
    model = build()
    optimizer = optimizer_for(kind, model.parameters())
    for number in range(2):
        step(model, optimizer, number)
    copies = [_copy(one) for one in (model, optimizer.state_dict(), get_optimizer_state_dict(model, optimizer))]
    step(model, optimizer, 2)
    return *copies, [p.detach() for p in model.parameters()]


def _copy(value: Any) -> Any:
    """A copy of state: deepcopy does not support torchao's 4-bit tensors."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize(
    ("world_size", "kind"),
    [*((3, kind) for kind in KINDS), *((1, kind) for kind in KINDS if kind.startswith(("torch.optim.A", "torchao")))],
)
@on_ranks(timeout=120)
def test_loads_before_the_first_step_and_later(rank: int, world_size: int, kind: str) -> None:
    warnings.simplefilter("ignore")
    for place in KINDS[kind]:
        for how in ("first", "later", "on_shards"):
            before, saved, _, expected = alone(kind)
            model = sharded(before, world_size, place)
            optimizer = optimizer_for(kind, model.parameters())
            if how == "on_shards":
                if kind.startswith(("torch.optim.Mu", "torch.optim.Adaf", "pytorch")):
                    continue
                optimizer_step_on_shards(optimizer)
            if how == "later":  # the optimizer has state, and is known
                step(model, optimizer, 7)
                for parameter, value in zip(model.parameters(), before.parameters(), strict=True):
                    local_of(parameter).copy_(part(parameter, value.detach()))
            optimizer.load_state_dict(saved)
            step(model, optimizer, 2)
            check(model, expected, (kind, place, how))
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        assert isinstance(value, DTensor), (kind, place, how, key)


def _other_ways(rank: int, world_size: int, path: Path) -> None:
    for kind, places in KINDS.items():
        if not kind.startswith(("torch.optim.AdamW", "torch.optim.Mu")):
            continue
        for place in places:
            before, saved, named, expected = alone(kind)
            model = sharded(before, world_size, place)
            optimizer = optimizer_for(kind, model.parameters())
            set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))
            step(model, optimizer, 2)
            check(model, expected, (kind, place))
            model = sharded(before, world_size, place)
            optimizer = optimizer_for(kind, model.parameters())
            optimizer.load_state_dict(saved)
            with CheckpointManager(path / kind / place) as manager:  # before any step
                manager.save(2, TrainingState(model, optimizer))
            again = sharded(build(), world_size, place)
            optimizer = optimizer_for(kind, again.parameters())
            assert CheckpointManager(path / kind / place).restore(TrainingState(again, optimizer)) is not None
            step(again, optimizer, 2)
            check(again, expected, (kind, place))


def test_by_name_and_saved_again_before_a_step(tmp_path: Path) -> None:
    run_ranks(2, _other_ways, tmp_path)


@pytest.mark.parametrize("later", [False, True])
@on_ranks(2)
def test_whole_quantised_state_on_shard_is_refused(rank: int, world_size: int, later: bool) -> None:
    warnings.simplefilter("ignore")
    before, saved, _, _ = alone("torchao.optim.AdamW8bit")
    model = sharded(before, world_size, "shard")
    optimizer = optimizer_for("torchao.optim.AdamW8bit", model.parameters())
    act: Callable[[], None] = lambda: optimizer.load_state_dict(saved)  # noqa: E731
    if later:
        step(model, optimizer, 7)
    else:
        act()
        act = lambda: step(model, optimizer, 2)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"state 'exp_avg' of parameter '0\.weight'.*placements_for"):
        act()


class KeepsWhole(torch.optim.Optimizer):
    """Keeps a whole tensor for each parameter, as the user meant it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            total = self.state[parameter].setdefault("total", torch.zeros(parameter.shape))
            total.add_(parameter.grad.full_tensor())


@on_ranks(2)
def test_whole_state_of_unknown_optimizers_on_shard_stays(rank: int, world_size: int) -> None:
    model = sharded(build(), world_size, "shard")
    optimizer = KeepsWhole(model.parameters())
    step(model, optimizer, 0)
    saved = _copy(optimizer.state_dict())
    for again in (optimizer, KeepsWhole(model.parameters())):
        again.load_state_dict(saved)
        step(model, again, 1)
        assert all(not isinstance(state["total"], DTensor) for state in again.state.values())
