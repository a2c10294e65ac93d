"""Files that are spoilt, before a restore or in the midst of it.

The checkpoints of two ranks are copied, and one file of the newest is spoilt. A restore then refuses it by name, or
restores the same bits as without the fault; with `fallback=True` it restores the checkpoint before to the last bit.
"""

import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardkit.core.checkpoint import CheckpointManager, DamagedCheckpointError
from shardkit.core.checkpoint.command import main as checkpoint_command
from tests.core.checkpoint.trainee import ElasticLoader, Trainee
from tests.faults.job import STEPS
from tests.support.twins import differences

FILE_KINDS = ("truncated", "flipped", "missing", "swapped")

_OLDER, _NEWER = f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"


@dataclass(frozen=True)
class Seen:
    """The outcome of one fault: whether it struck, and the problem, None if there is none."""

    struck: bool
    wrong: str | None


class Instants:
    """How many calls into the system that read files a restore has made."""

    seen = 0

    @contextlib.contextmanager
    def counted(self, at: int, action: Callable[[], None]) -> Iterator[None]:
        """Counts those of the block; before number `at` of them `action` is called."""

        def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                self.seen += 1
                if self.seen == at:
                    action()
                return original(*args, **kwargs)

            return wrapper

        with contextlib.ExitStack() as patches:
            for name in ("open", "fstat", "preadv", "lstat", "scandir"):
                patches.enter_context(mock.patch.object(os, name, wrapped(getattr(os, name))))
            yield


def trainee() -> Trainee:
    """A trainee that can restore the checkpoints of any number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Trainee((1,), loader_kind=ElasticLoader)


def state_of(restored: Trainee) -> Any:
    return restored.full(), restored.loader.position


@dataclass(frozen=True)
class Pristine:
    """A directory with two checkpoints, the state that each restores to, and the number of instants of a restore."""

    path: Path
    older: Any
    newer: Any
    instants: int

    @classmethod
    def of(cls, path: Path, full: Any) -> "Pristine":
        """`full` is the ranks' state when they saved the newer one."""
        instants, fresh = Instants(), trainee()
        with instants.counted(0, lambda: None):
            CheckpointManager(path).restore(fresh.state)
        assert differences(fresh.full(), full) == [], "one rank restores another state than the two ranks saved"
        newer = state_of(fresh)
        CheckpointManager(path).restore(fresh.state, step=STEPS - 1)
        return cls(path, state_of(fresh), newer, instants.seen)


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
    if at == 0:
        spoil_file(kind, victim, generator)
    instants, fresh = Instants(), trainee()
    try:
        with instants.counted(at, lambda: spoil_file(kind, victim, generator)):
            CheckpointManager(scratch).restore(fresh.state)
    except DamagedCheckpointError as refused:
        if str(victim) not in str(refused):
            return Seen(True, f"refused without the name of {victim}: {refused}")
    else:
        if differences(state_of(fresh), pristine.newer):
            return Seen(True, f"{victim} was {kind} and restored otherwise")
    if instants.seen < at:
        return Seen(False, None)
    return Seen(True, _after_damage(victim, scratch, pristine))


def _after_damage(victim: Path, scratch: Path, pristine: Pristine) -> str | None:
    """The damage is permanent: verifying finds it, and `fallback` leads to the checkpoint before."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        if checkpoint_command(["verify", str(victim.parent)]) == 0:
            return f"{victim} is damaged, and verify has not found it"
    fresh = trainee()
    restored = CheckpointManager(scratch).restore(fresh.state, fallback=True)
    assert restored is not None
    step, seen = restored.step, state_of(fresh)
    if victim.name == ".metadata" and step == STEPS:
        same = not differences(seen, pristine.newer)  # stock's, and not read
        return None if same else f"{victim} was spoilt and restored otherwise"
    if step != STEPS - 1 or differences(seen, pristine.older):
        return f"{victim} was spoilt, and fallback restored step {step} otherwise than it was"
    if str(victim) not in restored.damaged[0] or not victim.parent.with_name(f"{_NEWER}.damaged").is_dir():
        return f"{victim} was spoilt and passed over as {restored.damaged}"
    return None
