"""Other ways of a checkpoint of `Owned` and `Blocks`: stock's engine, FSDP1, other optimizers and ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as stock
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardkit.core import load_full_state_dict
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.checkpoint.command import main
from tests.core.checkpoint.placed import Net, adamw, build, contents, same, train, whole
from tests.support import on_ranks, rank_mesh, run_ranks

LAYOUTS = ["owned", "rows", "elements"]


def stock_model(world_size: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    for layer in model.layers:
        stock.fully_shard(layer, mesh=rank_mesh((world_size,)))
    return stock.fully_shard(model, mesh=rank_mesh((world_size,)))


def _save(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = stock_model(world_size, 1) if layout == "stock" else build(layout, world_size, 1)
    optimizer = adamw(model)
    train(model, optimizer, 3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return contents(model, optimizer)


def _load(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = stock_model(world_size, 2) if layout == "stock" else build(layout, world_size, 2)
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = contents(model, optimizer)
    train(model, optimizer, 1)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_into_stocks_engine_and_from_it(layout: str, tmp_path: Path) -> None:
    expected = run_ranks(4, _save, layout, tmp_path / "ours")[0]
    same(run_ranks(3, _load, "stock", tmp_path / "ours")[0], expected)
    expected = run_ranks(3, _save, "stock", tmp_path / "stock")[0]
    same(run_ranks(4, _load, layout, tmp_path / "stock")[0], expected)


def _manager_save(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = build(layout, world_size, 1)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    with CheckpointManager(path) as manager:
        manager.save(2, TrainingState(model, optimizer))
    return contents(model, optimizer)


def _read(rank: int, world_size: int, layout: str, path: Path) -> dict[str, torch.Tensor]:
    model = build(layout, world_size, 2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    return {name: whole(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_for_others_and_from_others(layout: str, tmp_path: Path) -> None:
    expected = run_ranks(3, _manager_save, layout, tmp_path / "run")[0]
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    seen = load_file(file)
    assert seen.keys() == {name for name in expected if not name.endswith((".exp_avg", ".exp_avg_sq"))}
    same(seen, {name: expected[name] for name in seen})
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "five"), "--ranks", "5"]) == 0
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "five")]) == 0
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    for source in ("five", "back"):
        same(run_ranks(2, _read, layout, tmp_path / source)[0], {name: expected[name] for name in seen})


def _whole_optimizer_state(rank: int, world_size: int, layout: str, broadcast: bool, make: Any) -> None:
    model = build(layout, world_size, 1)
    optimizer = make(model)
    train(model, optimizer, 3)
    expected = contents(model, optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full: list[Any] = [copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))]
    if not broadcast:
        dist.broadcast_object_list(full, src=0)
    for other in (layout, "shard"):
        resumed_model = build(other, world_size, 1)
        train(resumed_model, make(resumed_model), 3)
        resumed = make(resumed_model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_optimizer_state_dict(resumed_model, resumed, copy.deepcopy(full[0]), options=options)
        same(contents(resumed_model, resumed), expected)
        if other == layout:
            train(resumed_model, resumed, 1)
            train(model, optimizer, 1)
            same(contents(resumed_model, resumed), contents(model, optimizer))


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_optimizer_state_goes_into_any_placements(world_size: int, layout: str, broadcast: bool) -> None:
    run_ranks(world_size, _whole_optimizer_state, layout, broadcast, adamw)


@on_ranks(2)
def test_torch_does_not_gather_what_owners_alone_have(rank: int, world_size: int) -> None:
    model = build("owned", world_size, 1)
    optimizer = torch.optim.Adafactor(model.parameters())
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match=r"some ranks have no state of Adafactor.*CheckpointManager"):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert get_optimizer_state_dict(model, optimizer)["state"]


def _fsdp1(rank: int, world_size: int, path: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import StateDictType

    torch.manual_seed(1)
    model = Fsdp(Net(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = adamw(model)
    train(model, optimizer, 2)
    with Fsdp.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path / "sharded")
    with Fsdp.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full = model.state_dict()
    if rank == 0:
        torch.save(full, path / "full.pt")
    dist.barrier()
    return {name: value.clone() for name, value in full.items()}


def _from_fsdp1(rank: int, world_size: int, layout: str, path: Path) -> list[dict[str, torch.Tensor]]:
    model = build(layout, world_size, 2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path / "sharded")
    model.load_state_dict(state["model"])
    found = [{name: whole(value) for name, value in model.state_dict().items()}]
    model = build(layout, world_size, 3)
    load_full_state_dict(model, torch.load(path / "full.pt") if rank == 0 else None)
    return [*found, {name: whole(value) for name, value in model.state_dict().items()}]


@pytest.mark.filterwarnings("ignore")
def test_weights_of_stock_fsdp1(tmp_path: Path) -> None:
    expected = run_ranks(2, _fsdp1, tmp_path)[0]
    for layout in LAYOUTS:
        for seen in run_ranks(3, _from_fsdp1, layout, tmp_path)[0]:
            same(seen, expected)


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01),
    ]


def _everything(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    found = {name: whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if key in optimizer.state.get(parameter, {}):
                    found[f"{name}.{key}"] = whole(optimizer.state[parameter][key])
    return found


def _part(rank: int, world_size: int, part: int, path: Path) -> tuple[Any, Any]:
    """One part of a run: AdamW on Shard, Muon on Owned, Muon on Owned on other ranks, AdamW on Shard."""
    layout = ("shard", "owned", "owned", "shard")[part]
    model = build(layout, world_size, 10 + part)
    optimizers = _muon(model) if layout == "owned" else [adamw(model)]
    loaded = None
    if part:
        resumes = part == 2  # with the optimizers; those of the other parts are others
        state = TrainingState(model, optimizers) if resumes else TrainingState(model)
        assert CheckpointManager(path / str(part - 1)).restore(state) is not None
        loaded = _everything(model, optimizers)
    for optimizer in optimizers:
        train(model, optimizer, 2)
    with CheckpointManager(path / str(part)) as manager:
        manager.save(part, TrainingState(model, optimizers))
    return loaded, _everything(model, optimizers)


@pytest.mark.parametrize("worlds", [(4, 4, 3, 4), (4, 3, 2, 1), (1, 4, 3, 2)])
def test_a_run_moves_between_optimizers_placements_and_ranks(worlds: tuple[int, ...], tmp_path: Path) -> None:
    saved: dict[str, torch.Tensor] = {}
    for part, world_size in enumerate(worlds):
        loaded, now = run_ranks(world_size, _part, part, tmp_path)[0]
        if part == 2:
            same(loaded, saved)
            assert any(name.endswith(".momentum_buffer") for name in loaded)
        elif part:
            same(loaded, {name: saved[name] for name in loaded})
        saved = now


def _with_state_of_the_rest(rank: int, world_size: int, path: Path) -> None:
    """Parameters that stay with AdamW keep their state when the matrices move to Muon."""
    model = build("shard", world_size, 1)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.AdamW(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
    for optimizer in optimizers:
        train(model, optimizer, 2)
    dcp.save({"model": model.state_dict(), "rest": get_optimizer_state_dict(model, optimizers[1])}, checkpoint_id=path)
    expected = _everything(model, optimizers[1:])
    moved = build("owned", world_size, 2)
    _, again = _muon(moved)
    train(moved, again, 1)
    state = {"model": moved.state_dict(), "rest": get_optimizer_state_dict(moved, again)}
    dcp.load(state, checkpoint_id=path)
    moved.load_state_dict(state["model"])
    set_optimizer_state_dict(moved, again, state["rest"])
    same(_everything(moved, [again]), expected)


def test_the_rest_keeps_its_state(tmp_path: Path) -> None:
    run_ranks(3, _with_state_of_the_rest, tmp_path)
