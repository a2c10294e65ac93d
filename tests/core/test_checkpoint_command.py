"""`python -m shardkit.core checkpoint`: offline, streamed, against the libraries that read the results."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.checkpoint.command import main
from shardkit.core.checkpoint.opening import open_index
from tests.core.checkpoint_cases import ElasticLoader, Trainee, differences
from tests.support import run_ranks


def save_two_steps(rank: int, world_size: int, path: Path) -> Any:
    trainee = Trainee((2, 2), seed=1, loader_kind=ElasticLoader)
    with CheckpointManager(path) as manager:
        for step in (1, 2):
            trainee.train(1)
            manager.save(step, trainee.state, info={"note": "x"})
    return trainee.full()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of two steps from four ranks, and the state after the second."""
    path = tmp_path_factory.mktemp("saved")
    return path, run_ranks(4, save_two_steps, path)[0]


def weights(full: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): value for name, value in full.items() if name.startswith("model.")}


def restore(rank: int, world_size: int, path: Path) -> Any:
    trainee = Trainee((world_size,), seed=2, loader_kind=ElasticLoader)
    CheckpointManager(path.with_name("none")).restore(trainee.state, source=path)
    return trainee.full()


def test_reshard_and_diff(tmp_path: Path, saved: tuple[Path, Any], capsys: pytest.CaptureFixture[str]):
    path, expected = saved
    for ranks in (1, 3):
        target = tmp_path / f"resharded-{ranks}"
        assert main(["reshard", str(path), str(target), "--ranks", str(ranks)]) == 0
        assert sorted(one.name for one in target.glob("*.distcp")) == [f"__{rank}_0.distcp" for rank in range(ranks)]
        assert main(["diff", str(path / "step-000002"), str(target)]) == 0
        assert main(["verify", str(target)]) == 0
        for seen in run_ranks(2, restore, target):
            assert differences(seen, expected) == []
    assert open_index(target).world_size == 4
    capsys.readouterr()
    assert main(["diff", str(path / "step-000001"), str(path / "step-000002")]) == 1
    printed = capsys.readouterr().out
    assert "model.embed.weight: 77 of 77 elements differ, by at most" in printed
    assert "optimizer.param_groups.0.lr: " in printed and "optimizer.param_groups.0.eps" not in printed


def test_stock_reads_what_was_resharded(tmp_path: Path, saved: tuple[Path, Any]):
    path, expected = saved
    assert main(["reshard", str(path), str(tmp_path / "resharded"), "--ranks", "3"]) == 0
    dcp_to_torch_save(tmp_path / "resharded", tmp_path / "whole.pt")
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert differences(read["model"], weights(expected)) == []


@pytest.mark.parametrize("file_mb", [1, 5000])
def test_safetensors_there_and_back(
    tmp_path: Path, saved: tuple[Path, Any], file_mb: int, monkeypatch: pytest.MonkeyPatch
):
    safetensors = pytest.importorskip("safetensors.torch")
    import shardkit.core.checkpoint.exporting as exporting

    path, expected = saved
    if file_mb == 1:  # values of this model are a few hundred bytes
        original = exporting.export_safetensors
        monkeypatch.setattr(
            "shardkit.core.checkpoint.command.export_safetensors",
            lambda target, tensors, file_bytes: original(target, tensors, 200),
        )
    target = tmp_path / "hf"
    assert main(["export", str(path), str(target), "--file-mb", str(file_mb)]) == 0
    files = sorted(target.glob("*.safetensors"))
    read = {name: value for file in files for name, value in safetensors.load_file(file).items()}
    assert differences(read, weights(expected)) == []
    if file_mb == 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert len(files) > 2 and set(index["weight_map"]) == set(read)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in read.values())
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    assert main(["import", str(target), str(tmp_path / "back"), "--ranks", "2"]) == 0
    state = {"model": {name: torch.zeros_like(value) for name, value in read.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "back", no_dist=True)
    assert differences(state["model"], weights(expected)) == []


def test_torch_files_there_and_back(tmp_path: Path, saved: tuple[Path, Any]):
    path, expected = saved
    assert main(["export", str(path), str(tmp_path / "weights.pt"), "--to", "torch"]) == 0
    read = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert differences(dict(sorted(read.items())), dict(sorted(weights(expected).items()))) == []
    assert main(["export", str(path), str(tmp_path / "all.pt"), "--to", "torch", "--all"]) == 0
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert differences(everything["model"], read) == []
    assert everything["scheduler"] == expected["scheduler"]
    assert everything["loader"]["3"]["workers"][0] == {"at": 2.0} and everything["loader"]["3"]["workers"]["none"] == {}
    assert torch.equal(
        everything["optimizer"]["state"]["embed.weight"]["exp_avg"], expected["optimizer.embed.weight.exp_avg"]
    )
    assert main(["import", str(tmp_path / "weights.pt"), str(tmp_path / "back")]) == 0
    model = Lone(read)
    CheckpointManager(tmp_path / "none").restore(TrainingState(model, rng=False), source=tmp_path / "back")
    assert differences(dict(model.state_dict()), {name: read[name] for name in model.state_dict()}) == []


class Lone(torch.nn.Module):
    """Buffers of these names and shapes, zero."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            place: torch.nn.Module = self
            *parents, last = name.split(".")
            for parent in parents:
                if not hasattr(place, parent):
                    place.add_module(parent, torch.nn.Module())
                place = getattr(place, parent)
            place.register_buffer(last, torch.zeros_like(value))


def test_inspect_and_verify(tmp_path: Path, saved: tuple[Path, Any], capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run"
    shutil.copytree(saved[0], path)
    assert main(["inspect", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "step-000002: step 2, written by 4 rank(s)\n  note = 'x'\n" in printed
    assert "model.embed.weight\tfloat32\t[11, 7]\t2 chunk(s)\n" in printed
    assert main(["verify", str(path)]) == 0
    file = path / "step-000002" / "__3_0.distcp"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(path)]) == 2
    assert f"error: {file} is damaged" in capsys.readouterr().err
    assert main(["verify", str(path), "--fallback"]) == 0
    printed = capsys.readouterr().out
    assert f"damaged: {file}" in printed and f"{path / 'step-000001'}: 5 files are what was written" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}"], "is no checkpoint, and there is none in it"),
        (["export", "{saved}", "{tmp}"], "exists; it would be overwritten"),
        (["export", "{saved}", "{tmp}/x", "--prefix", "nothing."], "no tensor whose name begins with 'nothing.'"),
        (["export", "{saved}", "{tmp}/x", "--all"], "add --to torch"),
        (["import", "{tmp}", "{tmp}/x"], "has no model.safetensors.index.json and 0 safetensors files"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path,
    saved: tuple[Path, Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    assert main([one.format(tmp=tmp_path, saved=saved[0]) for one in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert list(tmp_path.iterdir()) == []


def test_as_a_module(saved: tuple[Path, Any]):
    command = [sys.executable, "-m", "shardkit.core", "checkpoint", "verify", str(saved[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 files are what was written" in done.stdout
