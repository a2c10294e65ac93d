"""State dicts and checkpoints of any placements: by stock and by ours, from and into any layout and engine."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.tensor import Shard

from shardkit.core import Blocks, Owned, full_state_dict, load_full_state_dict, plan_owners
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.checkpoint.command import main
from shardkit.core.torch_compat import local_of
from tests.core.checkpoint.trainee import whole
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal

LAYOUTS = ["owned", "rows", "elements"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 10)
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.cube = nn.Parameter(torch.randn(3, 5, 2))
        self.register_buffer("counts", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return y.sum() * self.cube.square().sum()


def build(layout: str, world_size: int, seed: int) -> nn.Module:
    """On one of our layouts, or, for "stock", on stock's engine."""
    torch.manual_seed(seed)
    model = Net()
    modules, mesh = (*model.layers, model), rank_mesh((world_size,))
    if layout == "stock":
        return shard_each(*modules, api=stock, mesh=mesh)
    choose = {
        "shard": lambda p: Shard(0),
        "owned": plan_owners(model, lambda p: Owned() if p.ndim > 1 else None),
        "rows": lambda p: Blocks(rows=3),
        "elements": lambda p: Blocks(elements=2 if p.ndim == 3 else 7),
    }
    return shard_each(*modules, mesh=mesh, shard_placement_fn=choose[layout])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randint(11, (4,), generator=torch.Generator().manual_seed(step))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything as whole tensors, by way of the parameters: an owner's state is sent to all."""
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state.get(parameter, {}).get(key)
            found[f"{name}.{key}"] = whole(torch.zeros_like(parameter) if value is None else value)
    return found


def made(layout: str, world_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(layout, world_size, seed)
    return model, adamw(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def save(rank: int, world_size: int, how: str, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model, optimizer = made(layout, world_size, 1)
    train(model, optimizer, 3)
    if how == "ours":
        with CheckpointManager(path) as manager:
            manager.save(3, TrainingState(model, optimizer))
        return contents(model, optimizer)
    state = dict(zip(("model", "optimizer"), helpers.get_state_dict(model, optimizer), strict=True))
    if how == "dcp.async_save":
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    return contents(model, optimizer)


def load(rank: int, world_size: int, how: str, layout: str, path: Path) -> dict[str, torch.Tensor]:
    """By `CheckpointManager` or by torch's helpers, whichever has saved it."""
    model, optimizer = made(layout, world_size, 2)
    ours = path / "step-000003"
    if how == "ours":
        manager = CheckpointManager(path if ours.exists() else path.with_name("none"))
        source = None if ours.exists() else path
        assert manager.restore(TrainingState(model, optimizer), source=source) is not None
    else:
        path = ours if ours.exists() else path
        state = dict(zip(("model", "optimizer"), helpers.get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path)
        helpers.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = contents(model, optimizer)
    train(model, optimizer, 1)  # training goes on after a load
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("dcp.save", "shard", 3), [("dcp.load", "stock", 2), ("dcp.load", "shard", 4)]),
        (("dcp.async_save", "owned", 4), [("dcp.load", "stock", 3), ("dcp.load", "shard", 1)]),
        (("dcp.save", "rows", 2), [("dcp.load", "owned", 2), ("dcp.load", "rows", 3)]),
        (("dcp.save", "elements", 4), [("dcp.load", "stock", 3), ("dcp.load", "elements", 3)]),
        (("dcp.save", "stock", 3), [("dcp.load", "owned", 4), ("dcp.load", "rows", 2), ("ours", "elements", 2)]),
        (("ours", "shard", 4), [("ours", "owned", 4), ("ours", "elements", 3), ("dcp.load", "stock", 2)]),
        (("ours", "rows", 4), [("ours", "owned", 4), ("ours", "rows", 3), ("ours", "shard", 2)]),
        (("ours", "elements", 1), [("ours", "shard", 2), ("ours", "elements", 3)]),
    ],
    ids=str,
)
def test_checkpoints_go_from_any_layout_to_any(
    tmp_path, saved: tuple[str, str, int], loaded: list[tuple[str, str, int]]
) -> None:
    how, layout, world_size = saved
    expected = run_ranks(world_size, save, how, layout, tmp_path / "saved")[0]
    for how, layout, world_size in loaded:
        for seen in run_ranks(world_size, load, how, layout, tmp_path / "saved"):
            assert_equal(seen, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_full_state_dicts(rank: int, world_size: int, layout: str) -> None:
    expected = weights(build("shard", world_size, 1))
    model = build(layout, world_size, 1)
    assert_equal(full_state_dict(model, rank0_only=False), expected)
    assert_equal(helpers.get_model_state_dict(model, options=helpers.StateDictOptions(full_state_dict=True)), expected)
    other = build(layout, world_size, 2)
    load_full_state_dict(other, expected if rank == 0 else None)
    assert_equal(weights(other), expected)
    more = {name: value + 1 for name, value in expected.items()}
    load_full_state_dict(other, more if rank == 0 else None, assign=True)
    assert_equal(weights(other), more)
    train(other, adamw(other), 1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_equal(weights(other), expected)


@on_ranks(2)
def test_files_of_torch_save_keep_the_layout(rank: int, world_size: int, tmp_path) -> None:
    for layout in LAYOUTS:
        state = build(layout, world_size, 1).state_dict()
        torch.save(state, tmp_path / f"{layout}{rank}.pt")
        loaded = torch.load(tmp_path / f"{layout}{rank}.pt", weights_only=False)
        assert all(torch.equal(local_of(state[name]), local_of(loaded[name])) for name in state if name != "counts")


def read(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    """Weights that torch reads, or from a file of safetensors, which every rank reads for itself."""
    model = build(layout, world_size, 2)
    if path.suffix == ".safetensors":
        load_full_state_dict(model, path)
        return weights(model)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return weights(model)


@pytest.mark.parametrize("layout", ["owned", "elements"])
def test_files_for_others_and_from_others(layout: str, tmp_path) -> None:
    everything = run_ranks(3, save, "ours", layout, tmp_path / "run")[0]
    expected = {name: one for name, one in everything.items() if not name.endswith((".exp_avg", ".exp_avg_sq"))}
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert_equal(load_file(file), expected)
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "five"), "--ranks", "5"]) == 0
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "five")]) == 0
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "back"), "--ranks", "2"]) == 0
    save_file(expected, tmp_path / "whole.safetensors")
    for source in ("five", "back", "whole.safetensors"):
        assert_equal(run_ranks(2, read, layout, tmp_path / source)[0], expected)


@pytest.mark.parametrize(
    ("layout", "broadcast"), [("owned", False), ("owned", True), ("rows", False), ("elements", True)]
)
@on_ranks(3)
def test_whole_optimizer_state_of_any_placements_goes_into_shards(
    rank: int, world_size: int, layout: str, broadcast: bool
) -> None:
    model, optimizer = made(layout, world_size, 1)
    train(model, optimizer, 3)
    expected = contents(model, optimizer)
    options = helpers.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: list[Any] = [copy.deepcopy(helpers.get_optimizer_state_dict(model, optimizer, options=options))]
    if not broadcast:
        dist.broadcast_object_list(full, src=0)
    resumed_model, first = made("shard", world_size, 1)
    train(resumed_model, first, 3)
    resumed = adamw(resumed_model)
    options = helpers.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    helpers.set_optimizer_state_dict(resumed_model, resumed, copy.deepcopy(full[0]), options=options)
    assert_equal(contents(resumed_model, resumed), expected)


@on_ranks(2)
def test_torch_does_not_gather_what_owners_alone_have(rank: int, world_size: int) -> None:
    model = build("owned", world_size, 1)
    optimizer = torch.optim.Adafactor([one for one in model.parameters() if one.ndim > 1])
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"some ranks have no state of Adafactor.*CheckpointManager"):
        helpers.get_optimizer_state_dict(model, optimizer, options=helpers.StateDictOptions(full_state_dict=True))
    assert helpers.get_optimizer_state_dict(model, optimizer)["state"]
