"""Parameters that are tied across FSDP modules: stock trains a copy in each, which its LOCAL files hold one by one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardkit.legacy_fsdp_compat.migrate import (
    CheckpointError,
    LocalRanks,
    convert,
    open_checkpoint,
    shapes_of_model,
    wrapping_of_model,
)
from shardkit.legacy_fsdp_compat.migrate.command import main
from tests.legacy_fsdp_compat.both import CPU, OURS, STOCK, api, load_state, records, state_of, whole_state
from tests.support import run_ranks
from tests.support.models import Composed

pytestmark = pytest.mark.filterwarnings("ignore")


def net() -> nn.Module:
    """One weight of three modules, two of which are in one unit."""
    emb, head, other = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.Linear(4, 7, bias=False)
    head.weight = other.weight = emb.weight
    run = lambda m, x: m.head(m.mid(m.emb(x))) + 2 * m.other(m.mid(m.emb(x)))  # noqa: E731
    return Composed(run, emb=emb, mid=nn.Linear(4, 4), head=head, other=other)


def build(engine: str = OURS) -> tuple[nn.Module, dict[str, Any]]:
    """For --model, and with stock's policy."""
    torch.manual_seed(0)
    return net(), {"auto_wrap_policy": api(engine).ModuleWrapPolicy({nn.Embedding})}


def with_original_parameters() -> tuple[nn.Module, dict[str, Any]]:
    model, arguments = build()
    return model, {**arguments, "use_orig_params": True}


def wrapped(use_orig_params: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Stock's."""
    model, arguments = build(STOCK)
    model = api(STOCK).FSDP(model, use_orig_params=use_orig_params, device_id=CPU, **arguments)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.tensor([rank, step, 2])), torch.tensor([1, 2, 3]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def write(rank: int, world_size: int, directory: Path) -> Any:
    """Stock's LOCAL file after two steps; returns the losses of two more, and the whole weights before."""
    model, optimizer = wrapped()
    train(model, optimizer, rank, range(2))
    torch.save(state_of(STOCK, "LOCAL", model, optimizer), directory / f"rank{rank}.pt")
    weights = whole_state(STOCK, model)
    return train(model, optimizer, rank, range(2, 4)), weights


def load(rank: int, world_size: int, directories: list[Path]) -> Any:
    """Losses of stock after each directory's file, and the whole weights before; the optimizer is loaded if there."""
    results = []
    for directory in directories:
        model, optimizer = wrapped()
        state = torch.load(directory / f"rank{rank}.pt", weights_only=False)
        load_state(STOCK, "LOCAL", model, optimizer, state)
        weights = whole_state(STOCK, model)
        results.append((train(model, optimizer, rank, range(2, 4)), weights))
    return results


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_files_of_stock_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The files have the model's ties. Stock goes on from them with the losses it would have had."""
    (tmp_path / "stock").mkdir()
    losses, weights = run_ranks(2, write, tmp_path / "stock")[0]
    assert not torch.equal(weights["emb.weight"], weights["head.weight"])
    by_model = ["--no-progress", "--model", f"{__name__}:build"]
    assert main([str(tmp_path / "stock"), str(tmp_path / "full"), "--to", "full", *by_model]) == 0
    assert "note: 'head.weight' is tied to 'emb.weight' of another FSDP module" in capsys.readouterr().err
    full = torch.load(tmp_path / "full" / "checkpoint.pt", weights_only=True)
    same(full["model"], weights)
    assert set(full["optim"]["state"]) == {"emb.weight", "mid.weight", "mid.bias", "head.weight"}
    local = ["--to", "local", "--ranks", "2", "--no-progress"]
    by_config = ["--config", str(tmp_path / "full" / "migration.json")]
    assert main([str(tmp_path / "full" / "checkpoint.pt"), str(tmp_path / "a"), *local, *by_config]) == 0
    assert main([str(tmp_path / "full" / "checkpoint.pt"), str(tmp_path / "b"), *local, *by_model]) == 0
    for rank in range(2):
        stock, first, second = (records(tmp_path / name / f"rank{rank}.pt") for name in ("stock", "a", "b"))
        assert first == second
        assert [stock["0"], stock["1"]] == [first["0"], first["1"]]
    # A model whose ties hold: each unit has a copy of the shared value. Weights alone, without the optimizer.
    torch.save({"model": build()[0].state_dict()}, tmp_path / "tied.pt")
    assert main([str(tmp_path / "tied.pt"), str(tmp_path / "c"), *local, *by_model]) == 0
    (seen, held), (_, tied) = run_ranks(2, load, [tmp_path / "a", tmp_path / "c"])[0]
    same(held, weights)
    assert seen == pytest.approx(losses, rel=1e-6)
    same(tied, build()[0].state_dict())


def no_forward(rank: int, world_size: int) -> str:
    model, optimizer = wrapped(use_orig_params=True)
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        train(model, optimizer, rank, range(1))
    dist.barrier()
    return str(caught.value)


def test_what_stock_cannot_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_ranks(2, no_forward)
    torch.save(build()[0].state_dict(), tmp_path / "full.pt")
    local = [str(tmp_path / "full.pt"), str(tmp_path / "out"), "--to", "local", "--ranks", "2", "--model"]
    assert main([*local, f"{__name__}:with_original_parameters"]) == 2
    assert "with use_orig_params=True FSDP1's forward fails then" in capsys.readouterr().err


def into(source: Path, target: Path, use_orig_params: bool, policy: Any) -> None:
    model, _ = build()
    wrapping = wrapping_of_model(model, {"auto_wrap_policy": policy, "use_orig_params": use_orig_params})
    convert(open_checkpoint(source), target, "local", ranks=LocalRanks(2, wrapping))


def test_values_that_no_file_could_keep(tmp_path: Path):
    """Another value under a tied name, in a unit and in the files of one; state that FSDP1 would need twice."""
    policy = api(OURS).ModuleWrapPolicy({nn.Embedding})
    state = build()[0].state_dict()
    torch.save({**state, "other.weight": -state["head.weight"]}, tmp_path / "untied.pt")
    with pytest.raises(CheckpointError, match=r"'other.weight' is tied to 'head.weight' .* other values"):
        into(tmp_path / "untied.pt", tmp_path / "no", False, policy)
    moments = {"emb.weight": {"exp_avg": torch.ones(7, 4)}}
    torch.save({"model": state, "optim": {"state": moments}}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"'optim.state.emb.weight' alone; .*\(--without optim\)"):
        into(tmp_path / "state.pt", tmp_path / "no", False, policy)
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    separate = net()
    separate.head.weight, separate.other.weight = (nn.Parameter(n * separate.emb.weight.detach()) for n in (2, 3))
    torch.save(separate.state_dict(), tmp_path / "separate.pt")
    wrapping = wrapping_of_model(separate, {"use_orig_params": True})
    convert(open_checkpoint(tmp_path / "separate.pt"), tmp_path / "out", "local", ranks=LocalRanks(2, wrapping))
    assert open_checkpoint(tmp_path / "out", shapes).tensors
    with pytest.raises(CheckpointError, match=r"the shapes tie 'head.weight' to 'emb.weight', but .*rank0.pt"):
        open_checkpoint(tmp_path / "out", shapes_of_model(build()[0]))
    assert not (tmp_path / "no").exists()
