"""`training_state.py`: state of unusual kinds comes back unchanged, in its dtypes, to its groups."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from shardkit.core import fully_shard
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from shardkit.core.checkpoint.command import main
from tests.core.checkpoint.trainee import Extra, Held, local, saved
from tests.support import on_ranks, rank_mesh
from tests.support.twins import differences

EXTRAS: list[Any] = [
    {"scale": torch.tensor(2.0), "names": ["a"], "deep": {3: {}}},
    {},
    [torch.ones(2), {"x": 1}],
    torch.arange(4),
    (1, "two"),
    None,
]


@pytest.mark.parametrize("fresh", [{}, {"other": torch.zeros(1)}, torch.zeros(9), None], ids=str)
@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_extra_state_of_modules(tmp_path, extra: Any, fresh: Any):
    model = nn.Sequential(Extra(copy.deepcopy(extra)), nn.Linear(2, 2))
    manager = saved(tmp_path, TrainingState(model), 1)
    model[0].extra = fresh
    manager.restore(TrainingState(model))
    assert differences(model[0].extra, extra) == []


def test_states_that_cannot_be_saved(tmp_path):
    model = nn.Linear(3, 2)
    both = [torch.optim.SGD(model.parameters(), momentum=0.9), torch.optim.SGD([model.bias], momentum=0.9)]
    strange = torch.optim.SGD(model.parameters())
    strange.state["all"] = {"count": 1}
    for state, text in (
        (TrainingState(model, user={"user": Held([1])}), r"user: its state_dict\(\) is a list, expected a dict"),
        (TrainingState(model, both), "bias: both optimizer 0 and optimizer 1 hold it"),
        (TrainingState(model, strange), "optimizer 0 holds all, which is not a parameter of the model"),
        (TrainingState(nn.ModuleList([model, nn.Linear(2, 2, device="meta")])), r"model\.1\.weight: is on the meta"),
    ):
        with pytest.raises(CheckpointError, match=text):
            CheckpointManager(tmp_path).save(1, state)


def test_milestones_of_schedulers(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def schedulers() -> Any:
        first = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4])
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [5])

    first, other = schedulers(), schedulers()
    saved(tmp_path, TrainingState(model, optimizer, first), 1).restore(TrainingState(model, optimizer, other))
    assert differences(other.state_dict(), first.state_dict()) == []
    assert type(other._schedulers[0].milestones) is Counter and other._schedulers[0].milestones == {2: 2, 4: 1}


def test_info_is_as_it_was_when_saved(tmp_path):
    losses = [1.0]
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(nn.Linear(1, 1)), info={"losses": losses})
    losses += [2.0] * 10**5
    manager.wait()
    restored = manager.restore(TrainingState(nn.Linear(1, 1)))
    assert restored is not None and restored.info == {"losses": [1.0]}


@pytest.mark.parametrize("step", [-1, 1.5, 2**63, "5", True, None])
def test_steps_that_are_none(tmp_path, step: Any):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=f"step={step!r}, expected a whole number from 0 on; pass"):
        manager.save(step, TrainingState(nn.Linear(1, 1)))
    manager.save(torch.tensor(3), TrainingState(nn.Linear(1, 1)), blocking=True)
    assert [one.step for one in manager.checkpoints()] == [3]


def test_keys_keep_their_order(tmp_path):
    """A loader may go through its data sets in the order of a dict, whatever their states are made of."""
    state = {"b": 1, "a": {"z": torch.ones(1), "y": "text", "x": torch.zeros(2)}, 3: torch.ones(1), "c": None}
    user, own, plain = Held(state), Held({**state, "more": 1}), Held({"first": torch.ones(1), "then": 2})
    run = TrainingState(nn.Linear(1, 1), user={"user": user, "plain": plain}, per_rank={"own": own})
    manager = saved(tmp_path, run, 1)
    user.state, own.state, plain.state = {"c": 0}, {}, {"then": 1, "first": torch.zeros(1)}
    manager.restore(run)
    assert repr(user.state) == repr(state)
    assert repr(own.state) == repr({**state, "more": 1})
    assert list(plain.state) == ["first", "then"]


def test_optimizers_that_are_cut_otherwise(tmp_path):
    model = nn.Linear(2, 2)
    state = {"weight": [model.weight], "bias": [model.bias]}
    apart = torch.optim.SGD([{"params": one, "lr": 0.1 * len(name)} for name, one in state.items()])
    manager = saved(tmp_path, TrainingState(model, apart), 1)
    together = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(CheckpointError, match="no parameter group of the checkpoint has weight, bias together"):
        manager.restore(TrainingState(model, together))
    assert together.param_groups[0]["lr"] == 1.0


def test_a_checkpoint_of_weights_alone_says_so(tmp_path):
    model = nn.Linear(2, 2)
    manager = saved(tmp_path, TrainingState(model), 1)
    with pytest.raises(CheckpointError, match="has no optimizer state; restore TrainingState"):
        manager.restore(TrainingState(model, torch.optim.SGD(model.parameters())))
    with pytest.raises(CheckpointError, match="has nothing under 'user', which the state has"):
        manager.restore(TrainingState(model, user={"user": Held({"a": 1})}))
    with pytest.raises(CheckpointError, match="has nothing under 'own', which the state has per rank"):
        manager.restore(TrainingState(model, per_rank={"own": Held({"a": 1})}))


@on_ranks(1, 2)
def test_tensors_without_elements(rank: int, world_size: int, tmp_path) -> None:
    """A buffer, a parameter that is sharded, and in user state."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    model.none = nn.Parameter(torch.zeros(0, 4))
    model.register_buffer("empty", torch.zeros(3, 0, dtype=torch.bfloat16))
    fully_shard(model, mesh=rank_mesh((world_size,), ("shard",)))
    model.register_buffer("later", torch.zeros(0))
    user, own = Held({"a": torch.zeros(0, 2), "b": 1}), Held({"own": torch.zeros(0)})
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = TrainingState(model, optimizer, user={"user": user}, per_rank={"own": own})
    expected = copy.deepcopy((user.state, own.state))
    manager = saved(tmp_path, state, 1)
    user.state, own.state = {"a": torch.ones(0, 2), "b": 2}, {}
    manager.restore(state)
    stock = {"model": {"empty": torch.ones(3, 0, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}}
    dcp.load(stock, checkpoint_id=tmp_path / "step-000001", no_dist=True)
    assert differences((user.state, own.state), expected) == []
    if rank == 0:
        assert main(["reshard", str(tmp_path), str(tmp_path / "x"), "--ranks", "3"]) == 0
        assert main(["diff", str(tmp_path), str(tmp_path / "x")]) == 0


@on_ranks(2, isolated=True)
def test_tensors_on_a_mesh_of_some_ranks(rank: int, world_size: int, tmp_path) -> None:
    """User state that lies on rank 1 alone; rank 0 has nothing of it, and knows."""
    mesh = DeviceMesh("cpu", [1])
    held = Held({"w": distribute_tensor(torch.arange(4.0), mesh, [Replicate()])})
    state = TrainingState(torch.nn.Linear(1, 1), user={"user": held})
    manager = saved(tmp_path, state, 1)
    held.state = {"w": distribute_tensor(torch.zeros(4), mesh, [Replicate()])}
    manager.restore(state)
    assert held.state["w"].to_local().tolist() == ([0.0, 1.0, 2.0, 3.0] if rank else [])
    held.state = {"w": DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Partial()])}
    with pytest.raises(CheckpointError, match=r"user\.w: placements \(Partial.*expected Shard or Replicate; redist"):
        manager.save(2, state)


def test_a_data_loader_goes_on_behind_its_last_batch(tmp_path):
    """torchdata's, by one argument, with worker processes."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(torch.arange(40), batch_size=4, shuffle=True, num_workers=2)

    torch.manual_seed(1)
    model, first, expected = torch.nn.Linear(2, 1), loader(), []
    for number, batch in enumerate(first, 1):
        if number > 3:
            expected.append(batch.tolist())
        if number == 3:
            state = TrainingState(model, per_rank={"loader": first})
            saved(tmp_path, state, 3)
    torch.manual_seed(2)
    second = loader()
    CheckpointManager(tmp_path).restore(TrainingState(model, per_rank={"loader": second}))
    assert [batch.tolist() for batch in second] == expected and len(expected) == 7


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
def test_sharded_state_keeps_dtype_and_place(rank: int, world_size: int, tmp_path) -> None:
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
def test_optimizers_that_come_as_something_else(tmp_path, given: Callable[[torch.optim.Optimizer], Any]):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved(tmp_path, TrainingState(model, given(optimizer)), 1)
    other = torch.optim.SGD(model.parameters(), momentum=0.9)
    CheckpointManager(tmp_path).restore(TrainingState(model, given(other)))
    assert torch.equal(other.state[model.weight]["momentum_buffer"], model.weight.grad)


def empty_groups(model: torch.nn.Module, *rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [], "lr": rates[0]}, {"params": model.parameters(), "lr": rates[1]}, {"params": [], "lr": rates[2]}]
    )


def test_an_empty_group_gets_its_own_options(tmp_path):
    model = torch.nn.Linear(3, 2)
    saved(tmp_path, TrainingState(model, empty_groups(model, 0.1, 0.2, 0.3)), 1)
    optimizer = empty_groups(model, 1.0, 2.0, 3.0)
    CheckpointManager(tmp_path).restore(TrainingState(model, optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]


@on_ranks(1, 2)
def test_values_that_begin_in_one_memory(rank: int, world_size: int, tmp_path) -> None:
    """A new run's average is its parameters, and its two counters are one tensor: each gets its own value back."""

    def begin() -> tuple[nn.Module, Held]:
        model, zeros = fully_shard(nn.Linear(4, 3), mesh=rank_mesh((world_size,))), torch.zeros(2)
        return model, Held({"average": model.weight.detach(), "a": zeros, "b": zeros})

    model, held = begin()
    held.state = {"average": model.weight.detach() + 1, "a": torch.ones(2), "b": torch.full((2,), 2.0)}
    expected = [local(one).clone() for one in (model.weight, *held.state.values())]
    saved(tmp_path, TrainingState(model, user={"held": held}), 1)
    model, held = begin()
    CheckpointManager(tmp_path).restore(TrainingState(model, user={"held": held}))
    assert isinstance(held.state["average"], DTensor)
    assert differences([local(one) for one in (model.weight, *held.state.values())], expected) == []
