"""`shardkit profile`: a script that knows nothing of it is recorded, under torchrun, and reported."""

import sys
from pathlib import Path

import pytest

from shardkit.tools.command import main
from shardkit.tools.report.files import read_report
from tests.tools.installed import environment

JOB = str(Path(__file__).with_name("small_job.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch) -> None:
    for name, value in environment(tmp_path / "metadata").items():
        monkeypatch.setenv(name, value)


def test_a_script_is_recorded_without_touching_it(tmp_path, capsys) -> None:
    outputs = {flag: tmp_path / f"run{flag[1:]}" for flag in ("--out", "--html", "--trace")}
    flags = [text for flag, path in outputs.items() for text in (flag, str(path))]
    command = [*TORCHRUN, "--nproc-per-node=2", JOB]
    assert main(["profile", *flags, "--warmup", "2", "--steps", "3", "--", *command]) == 0
    report = read_report(outputs["--out"])
    assert report.run.command == command
    assert (report.run.world_size, report.run.recorded_steps, report.run.missing_ranks) == (2, 3, [])
    assert {one.fqn for one in report.collectives} == {"blocks.0", "blocks.1", "blocks.2"}
    assert all(one.count == 3 for one in report.collectives)
    assert all(max(rank.memory.categories["activations"].values) > 0 for rank in report.ranks)
    assert len({rank.place.pid for rank in report.ranks}) == 2
    assert all(path.stat().st_size > 1000 for path in outputs.values())
    assert "peak_memory" in capsys.readouterr().out


def test_run_profile_and_watch_combine(tmp_path, monkeypatch, capfd) -> None:
    """Of a script for torch's own FSDP."""
    job = tmp_path / "job.py"
    job.write_text(Path(JOB).read_text().replace("from shardkit.core import", "from torch.distributed.fsdp import"))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--profile", "--watch", "--strict", *TORCHRUN, "--nproc-per-node=2", str(job)]) == 0
    assert read_report(tmp_path / "report.json").run.world_size == 2
    assert "shardkit watch: " not in capfd.readouterr().err
    assert main(["watch", "--strict", "true"]) == 1
    assert "shardkit watch: error: no model ran on shardkit's engine" in capfd.readouterr().err


def test_what_was_recorded_before_a_failure_is_reported(tmp_path, capsys) -> None:
    out = tmp_path / "report.json"
    command = [*TORCHRUN, "--nproc-per-node=2", JOB, "branch"]
    status = main(["profile", "--out", str(out), "--warmup", "0", "--steps", "2", "--no-activations", *command])
    assert status == 1
    assert "the command ended with status 1; reporting what was recorded" in capsys.readouterr().err
    report = read_report(out)
    assert report.run.recorded_steps == 2
    assert not report.run.activations
    assert all(rank.memory.peak_categories["activations"] == 0 for rank in report.ranks)


def test_a_command_that_records_nothing_is_told(tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path / "report.json")]
    assert main(["profile", *out, "true"]) == 2
    assert "nothing was recorded" in capsys.readouterr().err
    assert main(["profile", *out, "no-such-command-anywhere"]) == 127
