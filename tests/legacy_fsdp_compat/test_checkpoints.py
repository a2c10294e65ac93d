"""Files of every FSDP1 state dict type, and torch's helpers for state dicts, between stock and ours."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
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


def save_distributed(rank: int, world_size: int, writer: Engine, setting: Setting, directory: Path) -> dict[str, Any]:
    model, optimizer = writer.start(setting, 0)
    train(model, optimizer, rank, range(2))
    state = writer.state_of("SHARDED", model, optimizer)
    dcp.save(state, checkpoint_id=directory)
    return writer.state(model)


def load_distributed(
    rank: int, world_size: int, reader: Engine, setting: Setting, directory: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    names = reader.api
    model, optimizer = reader.start(setting, 1)
    with reader.of_type("SHARDED", model):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=directory)
        model.load_state_dict(state["model"])
        found = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"], optimizer_key="optim", storage_reader=dcp.FileSystemReader(directory)
        )
        loadable = names.FSDP.optim_state_dict_to_load(model, optimizer, found["optim"])
        optimizer.load_state_dict(loadable)
    full = names.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    return reader.state(model), {name: state["momentum_buffer"] for name, state in full["state"].items()}


@pytest.mark.parametrize(
    ("writer", "reader", "sizes"),
    [
        (STOCK, OURS, (2, 3)),
        (OURS, STOCK, (3, 2)),
        (OURS, OURS, (2, 4)),
    ],
    ids=str,
)
def test_distributed_checkpoints_on_another_world_size(
    writer: Engine, reader: Engine, sizes: tuple[int, int], tmp_path
):
    setting = Setting(optimizer="momentum")
    saved = run_ranks(sizes[0], save_distributed, writer, setting, tmp_path)[0]
    loaded, momentum = run_ranks(sizes[1], load_distributed, reader, setting, tmp_path)[0]
    assert_same_tensors(saved, loaded, rtol=0, atol=0)
    again, reference = run_ranks(sizes[0], load_distributed, STOCK, setting, tmp_path)[0]
    assert_same_tensors(saved, again, rtol=0, atol=0)
    assert set(reference) == set(momentum)
    for name, value in reference.items():
        torch.testing.assert_close(momentum[name], value, rtol=0, atol=0)


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
    assert list(theirs) == list(ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, **TOLERANCE)
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


def save(rank: int, world_size: int, engine: Engine, path: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = engine.start(Setting(optimizer="adam"), 0, device_mesh=mesh)
    train(model, optimizer, rank, range(2))
    names = engine.api
    names.FSDP.set_state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT)
    weights, states = get_state_dict(model, optimizer)
    assert isinstance(weights["inp.weight"], DTensor)
    assert isinstance(states["state"]["inp.weight"]["exp_avg_sq"], DTensor)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
    return {**engine.state(model), "losses": train(model, optimizer, rank, range(2, 4))}


def load(rank: int, world_size: int, engine: Engine, path: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = engine.start(Setting(optimizer="adam"), 1, device_mesh=mesh)
    names = engine.api
    names.FSDP.set_state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    whole = get_model_state_dict(model, options=WHOLE)
    return {**whole, "losses": train(model, optimizer, rank, range(2, 4)) if world_size == 2 else None}


@pytest.mark.parametrize(("writer", "reader", "world_size"), [(STOCK, OURS, 2), (OURS, STOCK, 2), (OURS, OURS, 3)])
def test_sharded_state_dicts_go_both_ways(writer: Engine, reader: Engine, world_size: int, tmp_path):
    expected = run_ranks(2, save, writer, tmp_path)[0]
    found = run_ranks(world_size, load, reader, tmp_path)[0]
    losses, expected_losses = found.pop("losses"), expected.pop("losses")
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]
    if losses is not None:
        assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(losses, expected_losses, strict=True))
