"""Files of every FSDP1 state dict type, and torch's helpers for state dicts, between stock and ours."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.legacy_fsdp_compat.both import OURS, STOCK, TOLERANCE, Engine, Setting, assert_same_tensors, train
from tests.support import on_ranks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # stock warns of its own retirement at every call

TYPES = ["FULL", "SHARDED", "LOCAL"]


# Of type, layout and writer any two meet in every way; the optimizer and the world size in turn.
CASES = [
    (kind, Setting(use_orig_params=orig, optimizer=["momentum", "adamw"][o]), writer, 2 + k % 2)
    for (k, kind), (o, orig), (w, writer) in itertools.product(*map(enumerate, (TYPES, [True, False], [STOCK, OURS])))
    if (k + o + w) % 2 == 0
]
# Stock's Adagrad has state for empty shards, which its own optim_state_dict refuses with use_orig_params.
CASES += [
    ("FULL", Setting(use_orig_params=False, optimizer="sgd"), STOCK, 2),
    ("LOCAL", Setting(optimizer="sgd"), OURS, 2),
    ("SHARDED", Setting(optimizer="adam"), STOCK, 2),
    ("FULL", Setting(use_orig_params=False, optimizer="adagrad"), STOCK, 2),
    ("SHARDED", Setting(optimizer="adagrad"), OURS, 2),
]


@pytest.mark.parametrize(("kind", "setting", "writer", "world_size"), CASES, ids=str)
@on_ranks()
def test_files_go_both_ways(
    rank: int, world_size: int, kind: str, setting: Setting, writer: Engine, tmp_path: Path
) -> None:
    """Ours goes on from a file as stock does, even if the file is wrong: with use_orig_params=True stock's FULL exp_avg
    holds exp_avg_sq where nothing has to be moved to the CPU.
    """
    model, optimizer = writer.start(setting, 0)
    train(model, optimizer, rank, range(2))
    torch.save(writer.state_of(kind, model, optimizer), tmp_path / f"rank{rank}.pt")
    expected = train(model, optimizer, rank, range(2, 4))
    losses = {}
    for reader in (OURS, STOCK):
        model, optimizer = reader.start(setting, 1)
        reader.load_state(kind, model, optimizer, torch.load(tmp_path / f"rank{rank}.pt", weights_only=False))
        losses[reader] = train(model, optimizer, rank, range(2, 4))
    torch.testing.assert_close(losses[OURS], losses[STOCK], **TOLERANCE)
    if writer == OURS:
        torch.testing.assert_close(losses[OURS], expected, **TOLERANCE)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2, 4)
def test_local_state_dict_is_that_of_stock(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Element by element, padding included."""
    setting = Setting(use_orig_params=use_orig_params)
    stock, ours = (engine.state_of("LOCAL", *engine.start(setting, 0))["model"] for engine in (STOCK, OURS))
    assert set(stock) == set(ours)
    for name, value in stock.items():
        if not name.endswith("_flat_param"):
            torch.testing.assert_close(ours[name], value, rtol=0, atol=0)
            continue
        assert ours[name].metadata().shards_metadata == value.metadata().shards_metadata
        assert ours[name].size() == value.size()
        for mine, theirs in zip(ours[name].local_shards(), value.local_shards(), strict=True):
            assert mine.metadata == theirs.metadata
            torch.testing.assert_close(mine.tensor, theirs.tensor, rtol=0, atol=0)


def start(engine: Engine, seed: int, with_mesh: bool) -> tuple[Any, torch.optim.Optimizer]:
    """With a mesh, SHARDED state is in DTensors, for torch's helpers; else in ShardedTensors, for FSDP1's methods."""
    arguments = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if with_mesh else {}
    model, optimizer = engine.start(Setting(optimizer="momentum"), seed, **arguments)
    engine.api.FSDP.set_state_dict_type(model, engine.api.StateDictType.SHARDED_STATE_DICT)
    return model, optimizer


def whole(engine: Engine, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    full = engine.state_of("FULL", model, optimizer)
    momentum = {name: one["momentum_buffer"] for name, one in full["optim"]["state"].items()}
    return full["model"] | {f"momentum of {name}": momentum[name] for name in sorted(momentum)}


def save(rank: int, world_size: int, engine: Engine, with_mesh: bool, path: Path) -> dict[str, Any]:
    model, optimizer = start(engine, 0, with_mesh)
    train(model, optimizer, rank, range(2))
    weights = model.state_dict()
    states = engine.api.FSDP.optim_state_dict(model, optimizer)
    if with_mesh:
        weights, states = get_state_dict(model, optimizer)
    for value in (weights["inp.weight"], states["state"]["inp.weight"]["momentum_buffer"]):
        assert isinstance(value, DTensor if with_mesh else ShardedTensor)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
    return whole(engine, model, optimizer)


def load(rank: int, world_size: int, engine: Engine, with_mesh: bool, path: Path) -> dict[str, Any]:
    model, optimizer = start(engine, 1, with_mesh)
    if with_mesh:
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return whole(engine, model, optimizer)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    found = load_sharded_optimizer_state_dict(
        model_state_dict=state["model"], optimizer_key="optim", storage_reader=dcp.FileSystemReader(path)
    )
    optimizer.load_state_dict(engine.api.FSDP.optim_state_dict_to_load(model, optimizer, found["optim"]))
    return whole(engine, model, optimizer)


@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize(
    ("writer", "reader", "sizes"), [(STOCK, OURS, (2, 3)), (OURS, STOCK, (3, 2)), (OURS, OURS, (2, 4))], ids=str
)
def test_distributed_checkpoints_on_another_world_size(
    writer: Engine, reader: Engine, sizes: tuple[int, int], with_mesh: bool, tmp_path
):
    saved = run_ranks(sizes[0], save, writer, with_mesh, tmp_path)[0]
    assert_same_tensors(saved, run_ranks(sizes[1], load, reader, with_mesh, tmp_path)[0], rtol=0, atol=0)


WHOLE = StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_whole_state_dicts(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Whole tensors: the same names as stock's, the same weights; ours go on from them as stock goes on."""
    setting = Setting(use_orig_params=use_orig_params, optimizer="momentum")
    found, expected = {}, {}
    for engine in (STOCK, OURS):
        model, optimizer = engine.start(setting, 0)
        train(model, optimizer, rank, range(2))
        found[engine] = get_state_dict(model, optimizer, options=WHOLE)
        expected[engine] = train(model, optimizer, rank, range(2, 4))
    torch.testing.assert_close(expected[OURS], expected[STOCK], **TOLERANCE)
    (theirs, their_states), (ours, our_states) = found[STOCK], found[OURS]
    assert_same_tensors(theirs, ours, **TOLERANCE)
    assert their_states["state"].keys() == our_states["state"].keys()
    for name, states in our_states["state"].items():
        torch.testing.assert_close(
            states["momentum_buffer"].cpu(), their_states["state"][name]["momentum_buffer"].cpu(), **TOLERANCE
        )
    assert {*our_states["param_groups"][0]["params"]} == {*their_states["param_groups"][0]["params"]}
    for options in (WHOLE, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        for weights, states in (found[OURS], found[STOCK]):
            model, optimizer = OURS.start(setting, 1)
            mine = rank == 0 or not options.broadcast_from_rank0
            set_model_state_dict(model, dict(weights) if mine else {}, options=options)
            set_optimizer_state_dict(model, optimizer, dict(states) if mine else {}, options=options)
            torch.testing.assert_close(train(model, optimizer, rank, range(2, 4)), expected[OURS], **TOLERANCE)
