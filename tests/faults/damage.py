"""Files that are spoilt, before a restore or in the midst of it.

The checkpoints of two ranks are copied, and one file of the newest is spoilt. A restore then refuses it by name, or
restores the same bits as without the fault; with `fallback=True` it restores the checkpoint before to the last bit.
"""

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from shardkit.core.checkpoint import CheckpointManager, DamagedCheckpointError
from shardkit.core.checkpoint.command import main as checkpoint_command
from tests.core.checkpoint.trainee import ElasticLoader, Trainee
from tests.faults.job import STEPS
from tests.support.twins import assert_equal

FILE_KINDS = ("truncated", "flipped", "missing", "swapped")

_OLDER, _NEWER = f"step-{STEPS - 1:06d}", f"step-{STEPS:06d}"


@contextlib.contextmanager
def calls_counted(at: int, action: Callable[[], None]) -> Iterator[list[str]]:
    """Lists the calls into the system that read files; before number `at` of them `action` is called."""
    seen: list[str] = []

    def wrapped(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == at:
                action()
            return original(*args, **kwargs)

        return wrapper

    names = ("open", "fstat", "preadv", "lstat", "scandir")
    with mock.patch.multiple(os, **{name: wrapped(name) for name in names}):
        yield seen


def trainee() -> Trainee:
    """A trainee that can restore the checkpoints of any number of ranks."""
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


def look(rank: int, world_size: int, path: Path, full: Any) -> Pristine:
    """Restores both checkpoints; `full` is the ranks' state when they saved the newer one."""
    fresh = trainee()
    with calls_counted(0, lambda: None) as instants:
        CheckpointManager(path).restore(fresh.state)
    assert_equal(fresh.full(), full, "one rank restores another state than the two ranks saved")
    newer = state_of(fresh)
    CheckpointManager(path).restore(fresh.state, step=STEPS - 1)
    return Pristine(path, state_of(fresh), newer, len(instants))


def spoil_file(kind: str, victim: Path, generator: random.Random) -> None:
    """Truncates a file, flips a bit of it, removes it, or puts another file's bytes in its place."""
    data = bytearray(victim.read_bytes())
    if kind == "truncated":
        os.truncate(victim, generator.randrange(len(data)))
    elif kind == "flipped":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        victim.write_bytes(data)
    elif kind == "missing":
        victim.unlink()
    else:
        others = [victim.parent.with_name(_OLDER) / victim.name, *sorted(victim.parent.iterdir())]
        victim.write_bytes(generator.choice([other for one in others if (other := one.read_bytes()) != data]))


def try_file(
    rank: int, world_size: int, kind: str, generator: random.Random, pristine: Pristine, scratch: Path
) -> bool:
    """One spoilt file: half of them before the restore, half at a random instant of it. Tells whether it came to it."""
    shutil.copytree(pristine.path, scratch)
    victim = generator.choice(sorted((scratch / _NEWER).iterdir()))
    at = generator.randint(1, pristine.instants) if generator.random() < 0.5 else 0
    if at == 0:
        spoil_file(kind, victim, generator)
    fresh = trainee()
    try:
        with calls_counted(at, lambda: spoil_file(kind, victim, generator)) as instants:
            CheckpointManager(scratch).restore(fresh.state)
    except DamagedCheckpointError as refused:
        if str(victim) not in str(refused):
            raise AssertionError(f"refused without the name of {victim}") from refused
    else:
        assert_equal(state_of(fresh), pristine.newer, f"{victim} was {kind} and restored otherwise")
    if len(instants) < at:
        return False
    # The damage is permanent: verifying finds it, and `fallback` leads to the checkpoint before.
    assert checkpoint_command(["verify", str(victim.parent)]) != 0, f"{victim} is {kind}, and verify has not found it"
    fresh = trainee()
    restored = CheckpointManager(scratch).restore(fresh.state, fallback=True)
    assert restored is not None
    if victim.name == ".metadata" and restored.step == STEPS:  # stock's, and not read
        assert_equal(state_of(fresh), pristine.newer, f"{victim} was {kind} and restored otherwise")
        return True
    assert restored.step == STEPS - 1
    assert_equal(state_of(fresh), pristine.older, f"{victim} was {kind}, and fallback restored otherwise")
    aside = victim.parent.with_name(f"{_NEWER}.damaged")
    assert str(victim) in restored.damaged[0] and aside.is_dir(), f"{victim} was passed over as {restored.damaged}"
    return True
