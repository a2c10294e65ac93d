"""Which checkpoint a run goes on from, and whether it fits; `shardkit.core.checkpoint` does the rest.

    <out>/checkpoints/step-000100/    complete, whatever interrupted the run

With several machines, `--out` has to lie on storage that all of them share.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from errors import UserError
from model import GPT, ModelConfig
from settings import Settings
from shardkit.core.checkpoint import CheckpointError, CheckpointManager, StoredCheckpoint, TrainingState

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, as it describes itself."""

    path: Path
    step: int
    training: Mapping[str, Any]


def restarted() -> bool:
    """Whether torchrun has started this run again after a process had died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def to_go_on_from(settings: Settings) -> Checkpoint | None:
    """The newest complete checkpoint if there is to be one, None to begin at step 0.

    Raises `UserError` if `--resume` finds none, or one that is damaged or of another model.
    """
    if not settings.resume and not restarted():
        return None
    complete = StoredCheckpoint.all_in(settings.out / "checkpoints")
    if not complete and settings.resume and not restarted():
        raise UserError(f"--resume: no complete checkpoint in {settings.out / 'checkpoints'}; start without --resume")
    for older, stored in zip([*complete[-2::-1], None], complete[::-1], strict=False):
        try:
            index = stored.read()
        except CheckpointError as error:
            if settings.fallback and older is not None:
                continue
            raise UserError(
                f"checkpoint {stored.path} is damaged ({error}); --fallback takes the one before"
            ) from error
        shapes = {name: entry.shape for name, entry in index.tensors.items() if name.startswith("model.")}
        check_fits(stored.path, index.info["model"], shapes, settings.model)
        theirs = index.info["training"].get("optimizer", "adamw")
        if theirs != settings.optimizer:
            raise UserError(
                f"checkpoint {stored.path} has --optimizer {theirs}, this run --optimizer {settings.optimizer}: the "
                f"state of one is of no use to the other; resume with --optimizer {theirs}, or choose another --out"
            )
        return Checkpoint(stored.path, stored.step, index.info["training"])
    return None


def how_to_go_on(settings: Settings) -> str:
    """The message for a user who has stopped a run."""
    complete = StoredCheckpoint.all_in(settings.out / "checkpoints")
    if not complete:
        return f"stopped before the first checkpoint, which --save-every {settings.save_every} had asked for"
    return f"stopped; --resume goes on from {complete[-1].path}"


def check_fits(
    path: Path, model: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> None:
    """Raise `UserError` naming the first hyper-parameter, else the first tensor, in which a checkpoint differs."""
    for name, mine in asdict(config).items():
        theirs = model.get(name)
        if theirs != mine:
            raise UserError(
                f"checkpoint {path} is of another model: it has --{name} {theirs}, this run --{name} {mine}; "
                f"resume with --{name} {theirs}, or choose another --out"
            )
    with torch.device("meta"):
        expected = {f"model.{name}": tuple(entry.shape) for name, entry in GPT(config).state_dict().items()}
    for name in [*expected, *stored]:
        if expected.get(name) != stored.get(name):
            raise UserError(
                f"checkpoint {path} is of another model: {name.removeprefix('model.')} has shape "
                f"{stored.get(name, 'none (no such entry)')} there and {expected.get(name, 'none')} in this code"
            )


def make_way(out: Path) -> None:
    """Create `out`, after moving a run that lies there to `out.1`, `out.2`, ...: nobody's checkpoints are deleted.

    Rank 0 alone does it. Raises `UserError` there if the file system refuses.
    """
    if dist.get_rank() != 0:
        return
    try:
        if (out / "metrics.jsonl").exists() or (out / "checkpoints").exists():
            numbered = (out.with_name(f"{out.name}.{number}") for number in itertools.count(1))
            aside = next(path for path in numbered if not path.exists())
            out.rename(aside)
            print(f"the run that was in {out} is in {aside} now (--resume would have gone on with it)", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").touch()
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {(error.strerror or str(error)).lower()}") from error


def load(manager: CheckpointManager, found: Checkpoint, state: TrainingState, settings: Settings) -> int:
    """Fill the state on any number of ranks; returns the step to go on from. Collective.

    Raises `UserError` on every rank if the checkpoint cannot be read.
    """
    try:
        restored = manager.restore(state, step=found.step, fallback=settings.fallback)
    except CheckpointError as error:
        raise UserError(f"checkpoint {found.path} is damaged ({error}); --fallback takes the one before") from error
    assert restored is not None and restored.step is not None
    return restored.step
