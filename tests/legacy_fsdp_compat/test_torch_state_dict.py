"""torch.distributed.checkpoint.state_dict on our FSDP modules returns and accepts the same as with stock's."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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

from tests.legacy_fsdp_compat.both import (
    OPTIMIZERS,
    OURS,
    STOCK,
    TOLERANCE,
    Setting,
    api,
    build,
    train,
    whole_state,
    wrap,
)
from tests.support import on_ranks, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE = StateDictOptions(full_state_dict=True)


def start(engine: str, setting: Setting, seed: int, **arguments: Any) -> tuple[Any, Any]:
    model = wrap(engine, setting, build(seed), **arguments)
    return model, OPTIMIZERS[setting.optimizer](model.parameters())


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_whole_state_dicts(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Whole tensors: the same names as stock's, the same weights; ours go on from them as stock goes on."""
    setting = Setting(use_orig_params=use_orig_params, optimizer="momentum")
    found, expected = {}, {}
    for engine in (STOCK, OURS):
        model, optimizer = start(engine, setting, 0)
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
            model, optimizer = start(OURS, setting, 1)
            mine = rank == 0 or not options.broadcast_from_rank0
            set_model_state_dict(model, dict(weights) if mine else {}, options=options)
            set_optimizer_state_dict(model, optimizer, dict(states) if mine else {}, options=options)
            torch.testing.assert_close(train(model, optimizer, rank, range(2, 4)), expected[OURS], **TOLERANCE)


def save(rank: int, world_size: int, engine: str, path: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = start(engine, Setting(optimizer="adam"), 0, device_mesh=mesh)
    train(model, optimizer, rank, range(2))
    names = api(engine)
    names.FSDP.set_state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT)
    weights, states = get_state_dict(model, optimizer)
    assert isinstance(weights["inp.weight"], DTensor)
    assert isinstance(states["state"]["inp.weight"]["exp_avg_sq"], DTensor)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=path)
    return {**whole_state(engine, model), "losses": train(model, optimizer, rank, range(2, 4))}


def load(rank: int, world_size: int, engine: str, path: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = start(engine, Setting(optimizer="adam"), 1, device_mesh=mesh)
    names = api(engine)
    names.FSDP.set_state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": states}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    whole = get_model_state_dict(model, options=WHOLE)
    return {**whole, "losses": train(model, optimizer, rank, range(2, 4)) if world_size == 2 else None}


@pytest.mark.parametrize(("writer", "reader", "world_size"), [(STOCK, OURS, 2), (OURS, STOCK, 2), (OURS, OURS, 3)])
def test_sharded_state_dicts_go_both_ways(writer: str, reader: str, world_size: int, tmp_path: Path):
    expected = run_ranks(2, save, writer, tmp_path)[0]
    found = run_ranks(world_size, load, reader, tmp_path)[0]
    losses, expected_losses = found.pop("losses"), expected.pop("losses")
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]
    if losses is not None:
        assert all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(losses, expected_losses, strict=True))
