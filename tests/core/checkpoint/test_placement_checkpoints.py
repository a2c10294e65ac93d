"""State dicts and checkpoints of `Owned` and `Blocks`: by stock DCP and ours, from and into any layout and world."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from shardkit.core import full_state_dict, load_full_state_dict
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.torch_compat import local_of
from tests.core.checkpoint.placed import adamw, build, contents, same, train, whole
from tests.support import run_ranks

LAYOUTS = ["shard", "owned", "rows", "elements"]


def _stock_save(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = build(layout, world_size, 1)
    optimizer = adamw(model)
    train(model, optimizer, 3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return contents(model, optimizer)


def _stock_load(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = build(layout, world_size, 2)
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = contents(model, optimizer)
    train(model, optimizer, 1)
    return found


@pytest.mark.daily(world_size=[4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stock_checkpoints_go_from_any_layout_to_any(tmp_path: Path, world_size: int, layout: str) -> None:
    expected = run_ranks(world_size, _stock_save, layout, tmp_path)[0]
    for other, loaded in ((4 // world_size, "shard"), (world_size, "owned"), (3, layout)):
        for seen in run_ranks(other, _stock_load, loaded, tmp_path):
            same(seen, expected)


def _manager_save(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = build(layout, world_size, 1)
    optimizer = adamw(model)
    train(model, optimizer, 3)
    with CheckpointManager(path) as manager:
        manager.save(3, TrainingState(model, optimizer))
    return contents(model, optimizer)


def _manager_load(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = build(layout, world_size, 2)
    optimizer = adamw(model)
    assert CheckpointManager(path).restore(TrainingState(model, optimizer)) is not None
    found = contents(model, optimizer)
    train(model, optimizer, 1)
    return found


@pytest.mark.daily(world_size=[4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_our_checkpoints_go_from_any_layout_to_any(tmp_path: Path, world_size: int, layout: str) -> None:
    expected = run_ranks(world_size, _manager_save, layout, tmp_path)[0]
    for other, loaded in ((2, "shard"), (world_size, "owned"), (3, layout)):
        for seen in run_ranks(other, _manager_load, loaded, tmp_path):
            same(seen, expected)


def _moves(rank: int, world_size: int, path: Path) -> None:
    """AdamW on Shard, then Muon on Owned for the matrices, then AdamW on Shard again."""
    model = build("shard", world_size, 1)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    with CheckpointManager(path / "a") as manager:
        manager.save(2, TrainingState(model, optimizer))
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    model = build("owned", world_size, 2)
    CheckpointManager(path / "a").restore(TrainingState(model))
    same({name: whole(value) for name, value in model.state_dict().items()}, expected)
    optimizers = [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01),
    ]
    for optimizer in optimizers:
        train(model, optimizer, 1)
    with CheckpointManager(path / "b") as manager:
        manager.save(3, TrainingState(model, optimizers))
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    model = build("shard", world_size, 3)
    CheckpointManager(path / "b").restore(TrainingState(model))
    same({name: whole(value) for name, value in model.state_dict().items()}, expected)
    train(model, adamw(model), 1)


def test_a_run_moves_from_adamw_to_muon_and_back(tmp_path: Path) -> None:
    run_ranks(3, _moves, tmp_path)


def _full(rank: int, world_size: int, path: Path) -> None:
    expected = {name: value.detach().clone() for name, value in build("shard", world_size, 1).state_dict().items()}
    expected = {name: whole(value) for name, value in expected.items()}
    for layout in LAYOUTS:
        model = build(layout, world_size, 1)
        same(full_state_dict(model, rank0_only=False), expected)
        stock = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        same(stock, expected)
        other = build(layout, world_size, 2)
        load_full_state_dict(other, expected if rank == 0 else None)
        same({name: whole(value) for name, value in other.state_dict().items()}, expected)
        if rank == 0:
            save_file(expected, path / "whole.safetensors")
        dist.barrier()
        fresh = build(layout, world_size, 3)
        load_full_state_dict(fresh, path / "whole.safetensors")
        same({name: whole(value) for name, value in fresh.state_dict().items()}, expected)
        load_full_state_dict(other, {k: v + 1 for k, v in expected.items()} if rank == 0 else None, assign=True)
        same(
            {name: whole(value) for name, value in other.state_dict().items()}, {k: v + 1 for k, v in expected.items()}
        )
        train(other, adamw(other), 1)
        copied = copy.deepcopy(model.state_dict())
        same({name: whole(value) for name, value in copied.items()}, expected)
        other.load_state_dict(copied)
        same({name: whole(value) for name, value in other.state_dict().items()}, expected)
        torch.save(model.state_dict(), path / f"{layout}{rank}.pt")
        loaded = torch.load(path / f"{layout}{rank}.pt", weights_only=False)
        assert all(
            torch.equal(local_of(v), local_of(loaded[k])) for k, v in model.state_dict().items() if k != "counts"
        )


@pytest.mark.daily(world_size=[1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_full_state_dicts(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, _full, tmp_path)


def _async_saved(rank: int, world_size: int, path: Path) -> dict[str, torch.Tensor]:
    model = build("owned", world_size, 1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.async_save(state, checkpoint_id=path).result()
    return contents(model, optimizer)


def test_stock_asynchronous_saves(tmp_path: Path) -> None:
    expected = run_ranks(2, _async_saved, tmp_path)[0]
    for seen in run_ranks(2, _stock_load, "shard", tmp_path):
        same(seen, expected)


def soap(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return pytest.importorskip("pytorch_optimizer").SOAP(matrices, lr=0.01, precondition_frequency=2)


def _row_by_row(optimizer: torch.optim.Optimizer) -> None:
    """Checkpoints keep values and not strides: QR leaves columns, and their products may have other last bits."""
    for state in optimizer.state.values():
        for key in {"Q", "GG"} & state.keys():
            state[key] = [matrix.contiguous() for matrix in state[key]]


def _preconditioned(rank: int, world_size: int, path: Path) -> None:
    """Twice, a run goes on after a restore as without one: no rank saves a value that another rank changed."""
    model = build("owned", world_size, 1)
    optimizer = soap(model)
    train(model, optimizer, 3)
    for step in range(2):
        with CheckpointManager(path) as manager:
            manager.save(step, TrainingState(model, optimizer))
        other = build("owned", world_size, 2)
        restored = soap(other)
        assert CheckpointManager(path).restore(TrainingState(other, restored)) is not None
        _row_by_row(optimizer)
        train(model, optimizer, 2)
        train(other, restored, 2)
        expected = {name: whole(value) for name, value in model.state_dict().items()}
        same({name: whole(value) for name, value in other.state_dict().items()}, expected)
        model, optimizer = other, restored


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_of_other_shapes_stays_with_the_owner(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, _preconditioned, tmp_path)
