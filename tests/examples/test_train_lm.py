"""The main job at a small size: its ranks, its launcher, and what they leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardkit.core.checkpoint.index import MANIFEST, seal, unseal
from tests.support import run_ranks
from tests.support.ports import free_ports

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm"
MODULES = ("checkpointing", "data", "errors", "model", "processes", "report", "settings", "train")

# A batch of three does not divide over two ranks: their parts of the loss have to be weighted.
SMALL = [
    *("--device=cpu", "--layers=2", "--width=32", "--heads=2", "--context=32"),
    *("--batch=3", "--steps=6", "--warmup=2", "--lr=0.01", "--val-every=3", "--save-every=3", "--sample=8"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    return path


def run_job(*flags: str | Path, script: Path = EXAMPLE, **env: str) -> str:
    """Runs the job, which has to succeed, and returns its output."""
    command = [sys.executable, str(script), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _train(rank: int, world_size: int, port: int, flags: list[str]) -> str:
    """Returns the output of a rank, which has imported torch already."""
    dist.destroy_process_group()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    sys.path.insert(0, str(EXAMPLE))
    import train

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train.main(flags)
    return printed.getvalue()


def train_on_two(*flags: str | Path) -> str:
    """Runs the loop on two ranks without the launcher, and returns the output of the first."""
    return run_ranks(2, _train, *free_ports(1), [*SMALL, *map(str, flags)], isolated=True)[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text: Path) -> Path:
    """The directory of a run of six steps on two processes that nothing interrupted."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    train_on_two("--data", text, "--out", out)
    return out


@pytest.fixture
def broken_off(finished: Path, tmp_path) -> Path:
    """A copy of the run as if it had been killed while it wrote its last checkpoint."""
    out = tmp_path / "broken_off"
    shutil.copytree(finished, out)
    for name in ("losses.png", "sample.txt"):
        (out / name).unlink()
    (out / "checkpoints" / "step-000006").rename(out / "checkpoints" / ".step-000006.incomplete")
    return out


@pytest.fixture
def launcher(monkeypatch) -> Iterator[Callable[[list[str]], int]]:
    """The `main` of `python examples/train_lm`, in this process: its checks start no other."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield runpy.run_path(str(EXAMPLE / "__main__.py"))["main"]
    for name in MODULES:
        sys.modules.pop(name, None)


def losses(out: Path) -> list[tuple[int, str, float]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], name, r[name]) for r in records for name in ("train_loss", "val_loss") if name in r]


def assert_close(seen: Path, expected: Path, tolerance: float) -> None:
    """Two runs have the same losses but for that relative error."""
    for one, other in zip(losses(seen), losses(expected), strict=True):
        assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], rel=tolerance)


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run's last checkpoint, whole."""
    checkpoint = run / "checkpoints" / "step-000006"
    about = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {name: one for name, one in about.items() if isinstance(one, TensorStorageMetadata)}
    whole = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in tensors.items()}
    dcp.load(whole, checkpoint_id=checkpoint, no_dist=True)
    return whole


def assert_same_weights(seen: Path, expected: Path) -> None:
    """Two runs have the same values in their last checkpoints."""
    mine, theirs = weights(seen), weights(expected)
    assert mine.keys() == theirs.keys()
    assert any("exp_avg_sq" in name for name in theirs) and any("mlp_in" in name for name in theirs)
    assert [name for name in theirs if not torch.equal(theirs[name], mine[name])] == []


def describe_otherwise(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Seal a checkpoint anew with another description."""
    manifest = unseal((checkpoint / MANIFEST).read_bytes(), MANIFEST)
    change(manifest["info"])
    (checkpoint / MANIFEST).write_bytes(seal(manifest))


def test_learns_and_leaves_everything_behind(finished: Path) -> None:
    curve = losses(finished)
    assert [step for step, name, _ in curve if name == "train_loss"] == [1, 2, 3, 4, 5, 6]
    held_out = [value for _, name, value in curve if name == "val_loss"]
    # The head starts at zero, so the first predictions are uniform.
    assert held_out[0] == pytest.approx(np.log(256), abs=1e-6)
    assert held_out[-1] < held_out[0] - 0.5
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == ["step-000003", "step-000006"]
    assert (finished / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert len((finished / "sample.txt").read_bytes()) >= 64 + 8


def test_resuming_is_exact(finished: Path, broken_off: Path, text: Path) -> None:
    printed = train_on_two("--data", text, "--out", broken_off, "--resume")
    assert "step-000003" in printed
    assert "note:" not in printed
    assert losses(broken_off) == losses(finished)
    assert_same_weights(broken_off, finished)
    assert (broken_off / "sample.txt").read_bytes() == (finished / "sample.txt").read_bytes()


def test_ctrl_c_says_how_to_go_on_and_a_new_run_moves_the_old_one_aside(text: Path, tmp_path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").touch()
    flags = [*SMALL, "--steps=100000", "--nproc", "2", "--data", text, "--out", out]
    job = subprocess.Popen(
        [sys.executable, str(EXAMPLE), *map(str, flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the terminal sends the signal to all processes of the job
    )
    give_up = time.monotonic() + 120
    while not list(out.glob("checkpoints/step-*")) and job.poll() is None and time.monotonic() < give_up:
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGINT)
    printed, complaints = job.communicate(timeout=60)
    assert list(out.glob("checkpoints/step-*")), f"no checkpoint within 120 s: {complaints}"
    newest = max(out.glob("checkpoints/step-*"))
    assert job.returncode == 130, complaints
    assert complaints.splitlines()[-1] == f"train_lm: stopped; --resume goes on from {newest}"
    # Python itself prints a KeyboardInterrupt that comes while a finalizer runs, and drops it; the others end the job.
    assert "Traceback" not in re.sub(r"(?m)^Exception ignored in: .*\n(Traceback.*\n( .*\n)+)?", "", complaints)
    assert f"is in {tmp_path / 'run.1'} now" in printed and (tmp_path / "run.1" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_resuming_on_one_process_instead_of_two(finished: Path, broken_off: Path, text: Path) -> None:
    # The loop by itself, as another launcher than ours would start it.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    describe_otherwise(broken_off / "checkpoints" / "step-000003", lambda info: info["training"].update(lr=0.5))
    flags = [*SMALL, "--data", text, "--out", broken_off, "--resume"]
    printed = run_job(*flags, script=EXAMPLE / "train.py", **alone)
    assert "note: --lr is 0.01, was 0.5; the losses will not be those of a run that never stopped" in printed
    assert_close(broken_off, finished, 1e-5)


@pytest.mark.slow
def test_muon_learns_and_resumes_on_any_number_of_processes(
    finished: Path, text: Path, tmp_path, launcher: Callable[[list[str]], int], capsys
) -> None:
    """Matrices whole on one process each: other losses than AdamW's, the same on any number of processes."""
    out, moved = tmp_path / "muon", tmp_path / "moved"
    flags = [*SMALL, "--optimizer=muon", "--data", text]
    run_job(*flags, "--nproc=2", "--out", out)
    curve = losses(out)
    adamw = losses(finished)
    assert curve[:3] == adamw[:3]  # the head starts at zero: the first step changes nothing but the head
    assert curve[3] != adamw[3]
    held_out = [value for _, name, value in curve if name == "val_loss"]
    assert held_out[-1] < held_out[0] - 0.5

    shutil.copytree(out, moved)
    shutil.rmtree(moved / "checkpoints" / "step-000006")
    assert "note:" not in run_job(*flags, "--nproc=3", "--out", moved, "--resume")
    assert_close(moved, out, 1e-3)  # Newton-Schulz rounds to bfloat16

    assert launcher([*SMALL, "--data", str(text), "--out", str(moved), "--resume"]) == 2
    assert "has --optimizer muon, this run --optimizer adamw" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "files", "activations"])
def test_offload_changes_nothing(finished: Path, broken_off: Path, text: Path, what: str) -> None:
    """A run without offload goes on with it: the same bits."""
    run_job(*SMALL, "--offload", what, "--nproc", "2", "--data", text, "--out", broken_off, "--resume")
    assert (broken_off / "offload").is_dir() is (what != "step")
    assert losses(broken_off) == losses(finished)
    assert_same_weights(broken_off, finished)


@pytest.mark.slow
def test_tensor_parallelism_changes_nothing(finished: Path, broken_off: Path, text: Path) -> None:
    """A run of two processes goes on as one of 2x2: the same losses, and a checkpoint of the same values."""
    printed = run_job(*SMALL, "--tp", "2", "--data", text, "--out", broken_off, "--resume")
    assert "on 4 processes" in printed
    assert "step-000003" in printed and "note:" not in printed
    assert_close(broken_off, finished, 1e-4)
    seen, expected = weights(broken_off), weights(finished)
    assert {name for name in seen if "rng." not in name} == {name for name in expected if "rng." not in name}
    for name in expected:
        if name.startswith("model."):
            torch.testing.assert_close(seen[name], expected[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "/no/such/text"], "--data /no/such/text: no such file or directory"),
        (["--data", "{tmp}"], "no .py, .txt, .md or .rst files below it"),
        (["--data", "{tmp}/empty.py"], "too little text in {tmp}/empty.py: 0 bytes to train on"),
        (["--resume", "--out", "{tmp}/none"], "--resume: no complete checkpoint in {tmp}/none/checkpoints"),
        (["--steps", "0"], "argument --steps: must be at least 1, got 0"),
        (["--lr", "nan"], "argument --lr: must be above 0, got nan"),
        (["--lr", "fast"], "argument --lr: invalid number value: 'fast'"),
        (["--width", "100"], "--width 100 must be a multiple of twice --heads 6"),
        (["--nproc", "9"], "--nproc 9 with --batch"),
        (["--tp", "4", "--nproc", "4"], "--tp 4 must divide --heads 6"),
        (["--tp", "2", "--nproc", "3"], "--tp 2 must divide --nproc 3"),
        (["--tp", "2", "--optimizer", "muon"], "--optimizer muon needs whole matrices"),
        (["--offload", "step", "--optimizer", "muon"], "--offload step needs an optimizer that updates each element"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--stpes", "3"], "unrecognized arguments: --stpes 3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    launcher: Callable[[list[str]], int], capsys, tmp_path, flags: list[str], message: str
) -> None:
    if "empty" in flags[-1]:
        (tmp_path / "empty.py").touch()
    assert launcher(["--device", "cpu", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("train_lm: error: ") and error.count("\n") == 1
    assert message.format(tmp=tmp_path) in error


def test_a_checkpoint_of_another_model(
    launcher: Callable[[list[str]], int], capsys, broken_off: Path, text: Path
) -> None:
    flags = [*SMALL, "--data", str(text), "--out", str(broken_off), "--resume"]
    assert launcher([*flags, "--width", "64"]) == 2
    assert "is of another model: it has --width 32, this run --width 64" in capsys.readouterr().err

    checkpoint = broken_off / "checkpoints" / "step-000003"
    describe_otherwise(checkpoint, lambda info: info["model"].update(width=64))
    assert launcher([*flags, "--width", "64"]) == 2
    assert "embedding.weight has shape (256, 32) there and (256, 64) in this code" in capsys.readouterr().err

    (checkpoint / MANIFEST).write_text("{")
    assert launcher(flags) == 2
    assert "step-000003 is damaged" in capsys.readouterr().err


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_validation_counts_each_held_out_sample_once(text: Path, world: int, size: int) -> None:
    import data

    corpus = data.load_corpus([text], context=16)
    alone = [row for tokens, _ in data.held_out_batches(corpus, 0, 1, 4, 16) for row in tokens.tolist()]
    counted, batches = [], []
    for rank in range(world):
        parts = list(data.held_out_batches(corpus, rank, world, size, 16))
        batches.append(len(parts))
        for tokens, targets in parts:
            counts = (targets != data.IGNORED).all(dim=1)
            counted += tokens[counts].tolist()
            assert (targets[~counts] == data.IGNORED).all()
            assert tokens.min() >= 0  # left-out samples still go through the model
    assert sorted(counted) == sorted(alone) and len(alone) == data.HELD_OUT_SAMPLES
    assert len(set(batches)) == 1
