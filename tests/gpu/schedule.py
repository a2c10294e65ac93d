"""Runs jobs in processes of their own, each with limits, and keeps what they report. Uses the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

ROOT = Path(__file__).parents[2]
_PATH = [ROOT, *sorted(ROOT.glob("packages/*/src")), ROOT / "benchmarks"]
_START_LIMIT = 100.0  # until the first check begins: a first import of torch, and CUDA's
_GRACE = 6.0  # for the other ranks, once one has ended
_END = 8.0  # to end everything and print the table
_OUTPUT = 2 * 2**20  # bytes of a process's output that the log keeps


@dataclass(frozen=True)
class Check:
    """`function` is "module:name" below tests.gpu; it gets a Place and `args`, and may take `limit` seconds."""

    name: str
    function: str
    args: tuple[Any, ...] = ()
    limit: float = 40.0


@dataclass(frozen=True)
class Job:
    """Checks of one part that share ranks.

    Attributes:
        limit: seconds for all of it, where the script has eight minutes.
        kind: of `tests.gpu.worlds.enter`.
        quiet: nothing else may run beside it, because it measures time.
        env: for each rank; `{rank}` in a value is replaced by its number.
        command: what runs python, such as a checker.
        then: the jobs that follow, told whether all checks of this one held.
        trial: a check that does not hold is recorded as skipped, because another job follows instead.
        restarts: how often the checks after one that ended its ranks get new ones.
    """

    part: str
    name: str
    checks: tuple[Check, ...]
    limit: float
    kind: str = "nccl"
    ranks: int = 1
    quiet: bool = False
    env: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    then: Callable[[bool], Sequence[Job]] | None = None
    trial: bool = False
    restarts: int = 4


@dataclass
class Row:
    """The result of a check. `state`: ok, failed, hung, skipped, or "not run"."""

    part: str
    job: str
    check: str
    state: str
    note: str = ""
    figures: Any = None
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.state in ("failed", "hung")


def environment() -> dict[str, str]:
    """The environment of ranks: this checkout's packages come before any that are installed."""
    path = [*map(str, _PATH), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "LOCAL_RANK": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


class Running:
    """The processes of a job, from check number `at` on. `base`: where their files lie."""

    def __init__(self, job: Job, at: int, restarts: int, deadline: float, base: Path, out: Path) -> None:
        self.job, self.at, self.restarts, self.deadline = job, at, restarts, deadline
        self._out, self._begun = out, time.monotonic()
        self._ended_at: float | None = None
        checks = [{"number": number, **asdict(check)} for number, check in enumerate(job.checks) if number >= at]
        told = {"kind": job.kind, "ranks": job.ranks, "checks": checks, "directory": str(out)}
        base.with_suffix(".json").write_text(json.dumps(told))
        self._bases = [base.with_suffix(f".{rank}") for rank in range(1 if job.kind == "mirror" else job.ranks)]
        self._reports: list[dict[int, dict[str, Any]]] = [{} for _ in self._bases]
        self._processes = [self._start(base, rank) for rank in range(len(self._bases))]

    def _start(self, base: Path, rank: int) -> Popen[bytes]:
        command = [*self.job.command, sys.executable, "-m", "tests.gpu.rank", f"{base}.json", str(rank)]
        env = environment() | {name: value.format(rank=rank) for name, value in self.job.env.items()}
        options: dict[str, Any] = {"cwd": ROOT, "env": env, "stdin": DEVNULL, "start_new_session": True}
        with Path(f"{self._bases[rank]}.output").open("wb") as output:
            return Popen(command, stdout=output, stderr=output, **options)

    @property
    def started(self) -> bool:
        """Whether a check has begun."""
        return any(self._reports)

    def poll(self) -> tuple[list[Row], bool]:
        """New rows, and whether the processes have ended."""
        codes, now = [process.poll() for process in self._processes], time.monotonic()
        self._read()
        rows = []
        while self.at < len(self.job.checks) and all("state" in one.get(self.at, {}) for one in self._reports):
            rows.append(self._row([one[self.at] for one in self._reports]))
            self.at += 1
        if self._ended_at is None and any(code is not None for code in codes):
            self._ended_at = now
        stuck = self._stuck(now) if None in codes else None
        if None in codes and stuck is None:
            return rows, False
        self._stop()
        rows += self._last(codes, stuck)
        with (self._out / "log.txt").open("a") as log:
            for rank in range(len(self._bases)):
                log.write(f"== {self.job.part}, {self.job.name}, rank {rank}\n{self._output(rank, _OUTPUT)}\n")
        return rows, True

    def _read(self) -> None:
        for base, found in zip(self._bases, self._reports, strict=True):
            path = Path(f"{base}.lines")
            for text in path.read_text().splitlines() if path.exists() else ():
                with contextlib.suppress(ValueError):  # half of a line so far
                    line = json.loads(text)
                    found.setdefault(line["check"], {"begun": time.monotonic()}).update(line)

    def _stuck(self, now: float) -> str | None:
        begun = [one[self.at]["begun"] for one in self._reports if self.at in one]
        if now > self.deadline:
            return "the time of its part is over"
        if self._ended_at is not None and now - self._ended_at > _GRACE:
            return "another rank has ended"
        if not self.started and now - self._begun > _START_LIMIT:
            return f"no check began within {_START_LIMIT:.0f} s"
        if begun and now - min(begun) > (limit := self.job.checks[self.at].limit):
            return f"it took more than {limit:.0f} s"
        return None

    def _row(self, reports: Sequence[dict[str, Any]]) -> Row:
        failed = {rank: one["note"] for rank, one in enumerate(reports) if one["state"] == "failed"}
        notes = [f"rank {rank}: {note}" if len(reports) > 1 else note for rank, note in failed.items()]
        state, note = ("failed", "; ".join(notes)) if failed else (reports[0]["state"], reports[0]["note"])
        return self._made(state, note, reports[0]["figures"], max(one["seconds"] for one in reports))

    def _last(self, codes: Sequence[int | None], stuck: str | None) -> list[Row]:
        """The row of the check that was under way when the processes ended, or of an end that was not clean."""
        bad = next((rank for rank, code in enumerate(codes) if code), None)
        ended = stuck if bad is None else f"rank {bad} ended with {codes[bad]}: {self._output(bad, 1500)}"
        if self.at == len(self.job.checks):
            clean = ended is None or any(one[self.at - 1]["ends"] for one in self._reports)
            return [] if clean else [self._made("failed", ended or "")]
        told = [one[self.at] for one in self._reports if self.at in one]
        failed = next((one for one in told if one.get("state") == "failed"), None)
        if self.started and not told:  # the ranks ended after a check that has its row
            return []
        if failed is not None:
            row = self._made("failed", failed["note"], None, failed["seconds"])
        elif told and bad is None:
            row = self._made("hung", ended or "it ended", None, time.monotonic() - min(one["begun"] for one in told))
        else:
            row = self._made("failed", ended or f"it ended before a check began: {self._output(0, 1500)}")
        self.at += 1
        return [row]

    def _made(self, state: str, note: str, figures: Any = None, seconds: float = 0.0) -> Row:
        checks = self.job.checks
        name = checks[self.at].name if self.at < len(checks) else "a clean end"
        return Row(self.job.part, self.job.name, name, state, note, figures, round(seconds, 1))

    def _output(self, rank: int, count: int) -> str:
        return Path(f"{self._bases[rank]}.output").read_bytes()[-count:].decode(errors="replace").strip()

    def _stop(self) -> None:
        """Lets every rank that is left write its stacks, then ends it."""
        left = [process for process in self._processes if process.poll() is None]
        for number in (signal.SIGUSR1, signal.SIGKILL) if left else ():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            time.sleep(0.7 if number == signal.SIGUSR1 else 0)
        for process in left:
            with contextlib.suppress(TimeoutExpired):  # one that the driver holds cannot end
                process.wait(5)


class Schedule:
    """Runs jobs in their order, several beside each other unless they are quiet, until the time is over."""

    def __init__(self, minutes: float, began: float, out: Path, work: Path, record: Callable[[Row], None]) -> None:
        self._scale, self._end, self._loud_end = minutes / 8, began + 60 * minutes - _END, began + 30 * minutes
        self._out, self._work, self._record = out, work, record
        self._most = max(2, min(4, (os.cpu_count() or 2) // 4))
        self._running: list[Running] = []
        self._bad: set[str] = set()  # names of jobs
        self._count = 0

    def run(self, jobs: Sequence[Job]) -> None:
        self._pending = deque(jobs)
        try:
            while (self._pending or self._running) and time.monotonic() < self._end:
                while self._pending and self._has_room(self._pending[0]):
                    job = self._pending.popleft()
                    end = self._end if job.quiet else self._loud_end
                    self._begin(job, 0, job.restarts, min(end, time.monotonic() + job.limit * self._scale))
                for running in [*self._running]:
                    self._poll(running)
                time.sleep(0.1)
        finally:
            for running in [*self._running]:
                running.deadline = 0
                self._poll(running)
            for job in self._pending:
                self._not_run(job, 0, "no time was left")

    def _has_room(self, job: Job) -> bool:
        alone = job.quiet or any(running.job.quiet for running in self._running)
        return len(self._running) < (1 if alone else self._most)

    def _begin(self, job: Job, at: int, restarts: int, deadline: float) -> None:
        if deadline - time.monotonic() < 5 * self._scale:
            self._not_run(job, at, "no time was left")
            return
        self._count += 1
        self._running.append(Running(job, at, restarts, deadline, self._work / f"job{self._count}", self._out))

    def _poll(self, running: Running) -> None:
        rows, ended = running.poll()
        job = running.job
        for row in rows:
            if row.bad:
                self._bad.add(job.name)
            tried = row.bad and job.trial
            self._record(replace(row, state="skipped", note=f"does not work here: {row.note}") if tried else row)
        if not ended:
            return
        self._running.remove(running)
        if running.at < len(job.checks):
            if running.restarts and running.started:
                self._begin(job, running.at, running.restarts - 1, running.deadline)
                return
            self._not_run(job, running.at, "see above" if running.started else "its ranks did not start")
        if job.then is not None:
            self._pending.extendleft(reversed(job.then(job.name not in self._bad)))

    def _not_run(self, job: Job, at: int, why: str) -> None:
        for check in job.checks[at:]:
            self._record(Row(job.part, job.name, check.name, "not run", why))
