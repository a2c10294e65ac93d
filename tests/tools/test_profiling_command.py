"""`shardkit profile`: a script that knows nothing of it is recorded and reported; the replay of logs made by hand."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shardkit.core.events import (
    BackwardEnded,
    GatherFinished,
    GatherStarted,
    Launched,
    ModuleBegan,
    ModuleEnded,
    WaitFinished,
    WaitStarted,
)
from shardkit.tools.command import main
from shardkit.tools.profiling.log import Entry, Held, OptimizerBegan, OptimizerEnded, Whereabouts, last_complete
from shardkit.tools.profiling.replay import Replay
from shardkit.tools.report.files import read_report
from shardkit.tools.report.schema import Group
from tests.support.ports import free_ports

JOB = str(Path(__file__).with_name("small_job.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
# Two ranks without a launcher, which would import torch once more.
TWO = 'RANK=1 "$@" & RANK=0 "$@"; status=$?; wait; exit $status'


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch) -> None:
    two = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*free_ports(1)), "WORLD_SIZE": "2"}
    for name, value in (two | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)


def test_a_script_is_recorded_without_touching_it(tmp_path, capsys) -> None:
    outputs = {flag: tmp_path / f"run{flag[1:]}" for flag in ("--out", "--html", "--trace")}
    flags = [text for flag, path in outputs.items() for text in (flag, str(path))]
    command = ["bash", "-c", TWO, "two", sys.executable, JOB]
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
    command = ["bash", "-c", TWO, "two", sys.executable, JOB, "branch"]
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


ROOT = (ModuleBegan("Net", "forward", True), ModuleEnded("Net", "forward", True))
OPTIMIZER = (OptimizerBegan(), OptimizerEnded())
PROCESS_GROUP = cast(dist.ProcessGroup, object())


def walk(entries: list[Entry], trains: bool = True) -> list[tuple[int, str, str]]:
    where = Whereabouts(trains)
    places = []
    for entry in entries:
        where.follow(entry)
        places.append((where.step, where.phase, where.module))
    return places


def test_phases_and_modules_are_followed_inwards_and_out() -> None:
    entries: list[Entry] = [
        ROOT[0],
        ModuleBegan("a", "forward", False),
        ModuleEnded("a", "forward", False),
        ROOT[1],
        ModuleBegan("Net", "backward", True),
        ModuleBegan("a", "backward", False),
        ModuleBegan("a", "recompute", False),
        ModuleEnded("a", "recompute", False),
        ModuleEnded("a", "backward", False),
        ModuleEnded("Net", "backward", True),
        BackwardEnded(True),
        *OPTIMIZER,
    ]
    forward, backward = [(0, "forward", one) for one in ("Net", "a", "Net")], (0, "backward", "Net")
    inside = (0, "backward", "a")
    assert walk(entries) == [
        *forward, (0, "other", "(other)"), backward, inside, inside, inside, backward, (0, "backward", "(backward)"),
        (0, "other", "(other)"), (0, "optimizer", "(optimizer)"), (0, "other", "(other)"),
    ]  # fmt: skip


def test_a_module_that_ends_with_its_last_part_is_around_it_in_backward() -> None:
    outside_in = [("a", False), ("a.b", False)], [("a.b", False), ("a", False)], [("a.b", False), ("Net", True)]
    for order in outside_in:
        entries: list[Entry] = [ModuleBegan(fqn, "backward", root) for fqn, root in order]
        assert walk(entries)[-1] == (0, "backward", "a.b")


def test_what_follows_the_last_optimizer_step_is_no_step() -> None:
    assert last_complete([*ROOT, *OPTIMIZER, Held("optimizer", "", 4), Held("resident", "", 5), *ROOT]) == 6
    assert last_complete([*ROOT]) is None


def started(fqn: str, **more: Any) -> GatherStarted:
    return GatherStarted(fqn, (f"{fqn}.weight",), 100, 50, torch.float32, PROCESS_GROUP, **more)


def finished(fqn: str) -> GatherFinished:
    return GatherFinished(fqn, (f"{fqn}.weight",), 100, 50, torch.float32, PROCESS_GROUP, 0.5)


def replay_of(*entries: tuple[float, Entry]) -> Replay:
    return Replay(list(entries), True, {PROCESS_GROUP: Group("0", [0, 1])})


def test_a_wait_belongs_to_the_operation_that_it_is_for() -> None:
    replay = replay_of(
        (1.0, started("a", transport="c10d")),
        (1.1, Launched("a", "all-gather", 0.1)),
        (2.0, started("b", transport="c10d")),
        (2.1, Launched("b", "all-gather", 0.1)),
        (2.5, ModuleBegan("a", "forward", False)),
        (3.0, WaitStarted("a", "all-gather")),
        (3.6, finished("a")),
        (3.7, WaitFinished("a", "all-gather", 0.7, 0.5)),
        (4.0, WaitStarted("b", "release")),
        (4.5, WaitFinished("b", "release", 0.5, 0.5)),
        (5.0, finished("b")),
    )
    a, b = replay.operations
    assert (a.fqn, a.exposed, a.blocked, a.waited_by, a.launch) == ("a", 0.7, 0.5, "a", 0.1)
    assert (a.start, a.end_seen) == (1.0, True)
    assert a.end == pytest.approx(3.5), "the data came when the idle part of the wait was over"
    assert (b.exposed, b.end_seen, b.end, b.number) == (0.0, False, 5.0, 1)
    assert [(wait.operation, wait.fqn, wait.seconds, wait.begin) for wait in replay.waits] == [
        ("release", "b", 0.5, 4.0)
    ]


def test_shared_memory_moves_data_in_the_wait() -> None:
    (one,) = replay_of(
        (1.0, started("a", transport="shared")),
        (3.0, WaitStarted("a", "all-gather")),
        (3.6, finished("a")),
        (3.7, WaitFinished("a", "all-gather", 0.7, 0.5)),
    ).operations
    assert one.moving == pytest.approx(0.2)
    assert (one.end, one.end_seen) == (3.6, True)


def test_what_began_before_the_recording_is_left_out() -> None:
    replay = replay_of((1.0, finished("a")), (2.0, WaitFinished("a", "all-gather", 0.5, 0.5)))
    assert replay.operations == []
