"""`training_state.py`: state comes back in its own dtypes, and to the groups that it belongs to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from tests.core.checkpoint.trainee import differences, local, saved
from tests.support import on_ranks, rank_mesh


class Precise(torch.optim.Optimizer):
    """Low-precision parameters, whose state is not of their dtype: a master weight, a count, nested values."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"master": p.float(), "count": torch.tensor(2**24 + 1), "below": {"list": [p.double()]}}
                state["master"] -= group["lr"] * 1e-4 * torch.ones_like(state["master"])
                state["below"]["list"][0] += 1e-9
                p.copy_(state["master"])


@on_ranks(2)
def test_sharded_state_keeps_dtype_and_place(rank: int, world_size: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    fully_shard(model, mesh=rank_mesh((world_size,), ("shard",)))
    optimizer, other = Precise(model.parameters()), Precise(model.parameters())
    optimizer.step()
    saved(tmp_path, TrainingState(model, optimizer), 1).restore(TrainingState(model, other))
    for p in model.parameters():
        pairs = (
            (one[p]["master"], one[p]["count"], one[p]["below"]["list"][0]) for one in (other.state, optimizer.state)
        )
        for seen, expected in zip(*pairs, strict=True):
            assert type(seen) is type(expected) and differences(local(seen), local(expected)) == []
    other.step()


class Wrapper:
    """An optimizer's interface without its class, as some trainers wrap one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


@pytest.mark.parametrize("given", [lambda one: iter([one]), lambda one: (one for _ in range(1)), Wrapper])
def test_optimizers_that_come_as_something_else(tmp_path: Path, given: Callable[[torch.optim.Optimizer], Any]):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved(tmp_path, TrainingState(model, given(optimizer)), 1)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    CheckpointManager(tmp_path).restore(TrainingState(model, given(other)))
    assert torch.equal(other.state[model.weight]["momentum_buffer"], model.weight.grad)


def test_what_is_no_optimizer():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(TypeError, match="optimizer 0 is a Parameter, expected an Optimizer; pass optimizers"):
        TrainingState(model, model.parameters())
    with pytest.raises(TypeError, match="optimizer 1 is a Linear, expected an Optimizer"):
        TrainingState(model, [torch.optim.SGD(model.parameters()), model])
    with pytest.raises(TypeError, match="optimizer is a float, expected an Optimizer or several; pass"):
        TrainingState(model, 0.1)


def empty_groups(model: torch.nn.Module, *rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [], "lr": rates[0]}, {"params": model.parameters(), "lr": rates[1]}, {"params": [], "lr": rates[2]}]
    )


def test_an_empty_group_gets_its_own_options(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    saved(tmp_path, TrainingState(model, empty_groups(model, 0.1, 0.2, 0.3)), 1)
    optimizer = empty_groups(model, 1.0, 2.0, 3.0)
    CheckpointManager(tmp_path).restore(TrainingState(model, optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]


def test_optimizers_that_do_not_share_out_the_parameters(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    both = [torch.optim.SGD(model.parameters(), momentum=0.9), torch.optim.SGD([model.bias], momentum=0.9)]
    with pytest.raises(CheckpointError, match="bias: both optimizer 0 and optimizer 1 hold it"):
        CheckpointManager(tmp_path).save(1, TrainingState(model, both))
    both[0].state["all"] = {"count": 1}
    with pytest.raises(CheckpointError, match="optimizer 0 holds all, which is not a parameter of the model"):
        CheckpointManager(tmp_path).save(1, TrainingState(model, both[0]))
