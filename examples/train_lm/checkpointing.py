"""Sharded checkpoints: written by all ranks into a temporary directory, which a rename makes a checkpoint.

    <out>/checkpoints/step-000100/
        run.json        step, hyper-parameters of the model, settings of the training, fingerprint of the text
        .metadata       written last by torch.distributed.checkpoint; names every entry, its shape and its file
        __0_0.distcp    one file or more from each rank

A directory under its final name is complete, whatever interrupted the run. With several machines, `--out` has to lie on
storage that all of them share.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from errors import UserError
from model import GPT, ModelConfig

KEPT = 2
NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, as its `run.json` describes it."""

    path: Path
    step: int
    model: Mapping[str, Any]
    training: Mapping[str, Any]


def checkpoints(out: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = (path for path in out.glob("checkpoints/step-*") if NAME.fullmatch(path.name))
    return sorted((path for path in found if (path / ".metadata").is_file()), key=lambda path: int(path.name[5:]))


def newest(out: Path, config: ModelConfig) -> Checkpoint:
    """The newest complete checkpoint of a run. Raises `UserError` if there is none or it does not fit `config`."""
    complete = checkpoints(out)
    if not complete:
        raise UserError(f"--resume: no complete checkpoint in {out / 'checkpoints'}; start without --resume")
    path = complete[-1]
    try:
        run = json.loads((path / "run.json").read_text())
        found = Checkpoint(path, run["step"], run["model"], run["training"])
        entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged file can fail in any way: json, pickle, a missing key
        raise UserError(
            f"checkpoint {path} is damaged ({error!r}); delete it to resume from the one before, if there is one"
        ) from error
    check_fits(found, entries, config)
    return found


def check_fits(found: Checkpoint, entries: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise `UserError` naming the first hyper-parameter, else the first entry, in which a checkpoint differs."""
    for name, mine in asdict(config).items():
        theirs = found.model.get(name)
        if theirs != mine:
            raise UserError(
                f"checkpoint {found.path} is of another model: it has --{name} {theirs}, this run --{name} {mine}; "
                f"resume with --{name} {theirs}, or choose another --out"
            )
    with torch.device("meta"):
        expected = {f"model.{name}": tuple(entry.shape) for name, entry in GPT(config).state_dict().items()}
    stored = {name: tuple(getattr(entry, "size", ())) for name, entry in entries.items() if name.startswith("model.")}
    for name in [*expected, *stored]:
        if expected.get(name) != stored.get(name):
            raise UserError(
                f"checkpoint {found.path} is of another model: {name.removeprefix('model.')} has shape "
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
            out.rename(next(path for path in numbered if not path.exists()))
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").touch()
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {(error.strerror or str(error)).lower()}") from error


def save(out: Path, step: int, model: GPT, optimizer: torch.optim.Optimizer, training: Mapping[str, Any]) -> None:
    """Write `<out>/checkpoints/step-...` and drop all but the newest `KEPT`. Collective."""
    final = out / "checkpoints" / f"step-{step:06d}"
    temporary = final.with_name(f".{final.name}.incomplete")
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        run = {"step": step, "model": asdict(model.config), "training": dict(training)}
        (temporary / "run.json").write_text(json.dumps(run, indent=2) + "\n")
    dist.barrier()
    dcp.save(state_of(model, optimizer) | {"rng": {str(dist.get_rank()): rng_state()}}, checkpoint_id=temporary)
    if first:
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in checkpoints(out)[:-KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load(found: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill model, optimizer and random generators, on any number of ranks. Collective.

    A rank that the saving run did not have keeps its generators as they are. Raises `UserError` on every rank if the
    checkpoint cannot be read.
    """
    state = state_of(model, optimizer)
    entries = dcp.FileSystemReader(found.path).read_metadata().state_dict_metadata
    mine = str(dist.get_rank())
    rng = {name: value for name, value in rng_state().items() if f"rng.{mine}.{name}" in entries}
    if rng:
        state["rng"] = {mine: rng}
    try:
        dcp.load(state, checkpoint_id=found.path)
    except dcp.api.CheckpointException as error:
        reasons = {repr(reason[0]) for reason in error.failures.values()}
        why = "; ".join(sorted(reasons))
        raise UserError(
            f"checkpoint {found.path} is damaged ({why}); delete it to resume from the one before, if there is one"
        ) from error
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer under names that do not depend on the number of ranks; tensors are the live ones."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def rng_state() -> dict[str, torch.Tensor]:
    """This rank's generators. Nothing in this job draws from them yet; with dropout added, resuming stays exact."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
