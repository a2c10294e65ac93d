"""Faults that one process can try out: files that are spoilt, before a restore or in the midst of it, and bad disks.

The checkpoints of two ranks are copied, and one file of the newest is spoilt. A restore then refuses it by name, or
restores the same bits as without the fault; with `fallback=True` it restores the checkpoint before to the last bit.
"""

import contextlib
import io
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError
from shardkit.core.checkpoint.command import main as checkpoint_command
from tests.core.checkpoint.trainee import ElasticLoader, Trainee
from tests.faults.job import STEPS, digest
from tests.faults.privileges import permissions_hold

FILE_KINDS = ("truncated", "flipped", "missing", "swapped")
DISK_KINDS = ("read-only", "full")

_READING = ("open", "fstat", "preadv", "lstat", "scandir")
_WRITING = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
_OLDER, _NEWER = f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"


@dataclass(frozen=True)
class Seen:
    """The outcome of one fault: the instant at which it struck, and the problem, None if there is none."""

    struck: str | None
    wrong: str | None


class Instants:
    """Calls into the system, counted while `of` runs; before number `at` of them `action` is called."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.seen = 0
        self.struck: str | None = None

    @contextlib.contextmanager
    def counted(self, at: int, action: Callable[[], object]) -> Iterator[None]:
        originals = {name: getattr(os, name) for name in self.names}
        self.seen, self.struck = 0, None
        busy = threading.local()

        def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if not getattr(busy, "busy", False):  # calls of the action itself do not count as instants
                    self.seen += 1
                    if self.seen == at:
                        busy.busy = True
                        self.struck = name
                        action()
                        busy.busy = False
                return original(*args, **kwargs)

            return wrapper

        for name, original in originals.items():
            setattr(os, name, wrapped(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(os, name, original)


def trainee() -> Trainee:
    """A trainee that can restore the checkpoints of any number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Trainee((1,), loader_kind=ElasticLoader)


def restored_digest(path: Path, fallback: bool = False) -> tuple[int | None, str, tuple[str, ...]]:
    """Restores into a fresh trainee. Returns the step, a digest of its state, and the checkpoints passed over."""
    fresh = trainee()
    restored = CheckpointManager(path).restore(fresh.state, fallback=fallback)
    assert restored is not None
    return restored.step, digest([fresh.full(), fresh.loader.position]), restored.damaged


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pristine:
    """A directory with two checkpoints, the digest that each restores to, and the number of instants of a restore."""

    path: Path
    older: str
    newer: str
    instants: int

    @classmethod
    def of(cls, path: Path, full: str) -> "Pristine":
        """`full` is the digest of the ranks' state when they saved the newer one."""
        instants = Instants(_READING)
        fresh = trainee()
        with instants.counted(0, lambda: None):
            CheckpointManager(path).restore(fresh.state)
        assert digest(fresh.full()) == full, "one rank restores another state than the two ranks saved"
        newer = digest([fresh.full(), fresh.loader.position])
        CheckpointManager(path).restore(fresh.state, step=STEPS - 1)
        return cls(path, digest([fresh.full(), fresh.loader.position]), newer, instants.seen)


def spoil_file(kind: str, victim: Path, generator: random.Random) -> None:
    """Truncates a file, flips a bit of it, removes it, or puts another file's bytes in its place."""
    data = victim.read_bytes()
    if kind == "truncated":
        os.truncate(victim, generator.randrange(len(data)))
    elif kind == "flipped":
        at = generator.randrange(len(data))
        with victim.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << generator.randrange(8))]))
    elif kind == "missing":
        victim.unlink()
    else:
        others = [victim.parent.with_name(_OLDER) / victim.name, *sorted(victim.parent.iterdir())]
        victim.write_bytes(generator.choice([other for one in others if (other := one.read_bytes()) != data]))


def try_file(kind: str, generator: random.Random, pristine: Pristine, scratch: Path) -> Seen:
    """One spoilt file: half of them before the restore, half at a random instant of it."""
    shutil.copytree(pristine.path, scratch)
    victim = generator.choice(sorted((scratch / _NEWER).iterdir()))
    at = generator.randint(1, pristine.instants) if generator.random() < 0.5 else 0
    struck = f"before, {victim.name}"
    if at == 0:
        spoil_file(kind, victim, generator)
    instants = Instants(_READING)
    fresh = trainee()
    try:
        with instants.counted(at, lambda: spoil_file(kind, victim, generator)):
            CheckpointManager(scratch).restore(fresh.state)
    except DamagedCheckpointError as refused:
        if str(victim) not in str(refused):
            return Seen(struck, f"refused without the name of {victim}: {refused}")
    else:
        if digest([fresh.full(), fresh.loader.position]) != pristine.newer:
            return Seen(struck, f"{victim} was {kind} and restored otherwise")
    if at and instants.struck is None:
        return Seen(None, None)
    struck = f"{instants.struck}, {victim.name}" if at else struck
    return Seen(struck, _after_damage(victim, scratch, pristine))


def _after_damage(victim: Path, scratch: Path, pristine: Pristine) -> str | None:
    """The damage is permanent: verifying finds it, and `fallback` leads to the checkpoint before."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        if checkpoint_command(["verify", str(victim.parent)]) == 0:
            return f"{victim} is damaged, and verify has not found it"
    step, seen, damaged = restored_digest(scratch, fallback=True)
    if victim.name == ".metadata" and step == STEPS:
        return None if seen == pristine.newer else f"{victim} was spoilt and restored otherwise"  # stock's: not read
    if (step, seen) != (STEPS - 1, pristine.older):
        return f"{victim} was spoilt, and fallback restored step {step} otherwise than it was"
    if str(victim) not in damaged[0] or not victim.parent.with_name(f"{_NEWER}.damaged").is_dir():
        return f"{victim} was spoilt and passed over as {damaged}"
    return None


# -- disks ------------------------------------------------------------------------------------------------------------


class Disk:
    """A directory that a fault makes full or read-only, and that can be mended."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """For full disks a file system of 1 MiB, for read-only ones a process without root's privileges."""
        self.path.mkdir()
        if self.kind == "read-only":
            with permissions_hold():
                yield
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(self.path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", str(self.path)], check=True)

    def strike(self, room: int) -> None:
        """Leaves this many bytes free, or takes the permission to write."""
        if self.kind == "read-only":
            for one in (self.path / "run", *(self.path / "run").iterdir()):
                one.chmod(0o555)
            return
        usage = os.statvfs(self.path)
        size = max(0, usage.f_bavail * usage.f_frsize - room)
        with (self.path / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size))

    def mend(self) -> None:
        if self.kind == "full":
            (self.path / "filler").unlink(missing_ok=True)
            return
        for one in (self.path / "run", *(self.path / "run").iterdir()):
            one.chmod(0o755)


def try_disk(kind: str, generator: random.Random, scratch: Path) -> Seen:
    """A save during which the disk fails at a random instant, with a good save before it and one after the repair."""
    disk = Disk(kind, scratch)
    with disk.mounted():
        instants, run = Instants(_WRITING), scratch / "run"
        training = trainee()
        manager = CheckpointManager(run)
        expected = {}
        for step in (1, 2):
            training.train(1)
            expected[step] = digest([training.full(), training.loader.position])
            if step == 1:
                with instants.counted(0, lambda: None):
                    manager.save(step, training.state, blocking=True)
        at, room = generator.randint(1, instants.seen), generator.choice((0, generator.randrange(80_000)))
        error: CheckpointError | None = None
        with instants.counted(at, lambda: disk.strike(room)):
            try:
                manager.save(2, training.state, blocking=True)
            except CheckpointError as refused:
                error = refused
        left = _hidden(run)
        step, seen, _ = restored_digest(run)
        disk.mend()
        wrong: str | None = None
        text = "No space left" if kind == "full" else "Permission denied"
        if error is None and step != 2:
            wrong = f"saving step 2 raised nothing, and step {step} came back"
        elif error is not None and text not in str(error):
            wrong = f"saving raised {error}, expected '{text}'"
        elif step is None or seen != expected[step]:
            wrong = f"step {step} came back otherwise"
        elif kind == "full" and left:  # from a directory that nobody may write to the next run removes it
            wrong = f"left behind: {left}"
        else:
            wrong = _next_run(run, training, expected[2])
        return Seen(instants.struck, wrong)


def _next_run(run: Path, training: Trainee, expected: str) -> str | None:
    manager = CheckpointManager(run)
    if left := _hidden(run):
        return f"left behind after the next run has begun: {left}"
    manager.save(3, training.state, blocking=True)
    step, seen, _ = restored_digest(run)
    return None if (step, seen) == (3, expected) else f"when mended, step {step} came back otherwise"


def _hidden(run: Path) -> list[str]:
    return sorted(one.name for one in run.iterdir() if not one.name.startswith("step-"))


def can_mount() -> bool:
    """Whether this process may make small file systems."""
    return os.geteuid() == 0 and shutil.which("mount") is not None
