"""`training_state.py`: state comes back in its own dtypes, and to the groups that it belongs to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from tests.core.checkpoint.trainee import differences
from tests.support import rank_mesh, run_ranks


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


def sharded_state(rank: int, world_size: int, path: Path) -> Any:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
    fully_shard(model, mesh=rank_mesh((world_size,), ("shard",)))
    optimizer = Precise(model.parameters())
    optimizer.step()
    manager = CheckpointManager(path)
    manager.save(1, TrainingState(model, optimizer), blocking=True)
    other = Precise(model.parameters())
    manager.restore(TrainingState(model, other))
    found = []
    for p in model.parameters():
        for seen, expected in zip(_tensors(other.state[p]), _tensors(optimizer.state[p]), strict=True):
            found += [type(seen) is type(expected), *differences(_local(seen), _local(expected))]
    other.step()
    return found


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [state["master"], state["count"], state["below"]["list"][0]]


def _local(value: torch.Tensor) -> torch.Tensor:
    return getattr(value, "to_local", lambda: value)()


def test_sharded_state_keeps_dtype_and_place(tmp_path: Path):
    assert run_ranks(2, sharded_state, tmp_path) == [[True] * 6] * 2


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
    CheckpointManager(tmp_path).save(1, TrainingState(model, given(optimizer)), blocking=True)
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
    CheckpointManager(tmp_path).save(1, TrainingState(model, empty_groups(model, 0.1, 0.2, 0.3)), blocking=True)
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
