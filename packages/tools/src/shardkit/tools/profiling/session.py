"""Who records: `profile`, a context manager; or the environment (`SHARDKIT_PROFILE`), whatever the script does.

Core calls `start` in each process at its first `fully_shard`, through the entry point group `shardkit.observers`. When
the wanted steps are over, or the process ends before, the rank writes its record into the directory.

    SHARDKIT_PROFILE_WARMUP    steps to leave out first (default 1)
    SHARDKIT_PROFILE_STEPS     steps to record after that (default 10)
    SHARDKIT_PROFILE_ACTIVATIONS    0: what autograd saves is not counted, which costs less
"""

from __future__ import annotations

import atexit
import os
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.tools.profiling.recorder import Extent, Recorder
from shardkit.tools.profiling.replay import record_of
from shardkit.tools.report.files import RankRecord, write_record, write_report
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Report

_DEFAULT_STEPS = 50


class Profile:
    """What `profile` returns; a context manager, to be entered once.

    Attributes:
        report: the report, on rank 0, once the block has ended; None before, on other ranks, and after an exception in
            the block.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], extent: Extent, path: Path | None, activations: bool
    ) -> None:
        self.report: Report | None = None
        self._model = model
        self._optimizers = optimizers
        self._path = path
        self._activations = activations
        self._recorder = Recorder(device_of(model), extent, self._stop, activations=activations)

    def __enter__(self) -> Profile:
        self._recorder.start(self._model, self._optimizers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._recorder.stop()
        self._recorder.leave()
        if error is not None:  # the other ranks may be anywhere: nothing collective
            return
        records = _on_rank_0(self._record())
        if records:
            self.report = merge(records)
            if self._path is not None:
                write_report(self.report, self._path)

    def _record(self) -> RankRecord | Exception:
        """This rank's record, or why there is none: the other ranks wait to hear it."""
        try:
            return record_of(self._recorder, activations=self._activations)
        except Exception as error:  # noqa: BLE001 - raised on every rank, below
            return error

    def _stop(self) -> None:
        self._recorder.stop()


def profile(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    path: str | Path | None = None,
    warmup: int = 0,
    steps: int | None = _DEFAULT_STEPS,
    activations: bool = True,
) -> Profile:
    """A context manager around a training loop that records what its steps did and waited for.

    Every rank enters and leaves it; leaving is collective over the default process group, unless by an exception.
    Rank 0 gets what all ranks have recorded.

    Args:
        model: the sharded model, the root of its iterations.
        optimizer: what steps it, one or several; found by themselves at their first step where left out.
        path: rank 0 writes the report there as JSON.
        warmup: steps to leave out first. The first iteration of a model is slower: it plans, and learns the order.
        steps: how many to record after that; None for all up to the end of the block.
        activations: whether to count what autograd saves for backward.

    Raises:
        ValueError: for a negative `warmup` or `steps` below 1.
        RuntimeError: on leaving, on every rank, if the log of one cannot be read. What fails after that (merging the
            records, writing `path`) is raised on rank 0 alone, while the others go on.
    """
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    where = Path(path) if path is not None else None
    return Profile(model, optimizers, Extent(warmup, steps), where, activations)


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: the device of its mesh, or of its parameters."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            kind = parameter.device_mesh.device_type
            if kind == "cpu":
                return torch.device("cpu")
            return torch.device(kind, torch.get_device_module(kind).current_device())
        return parameter.device
    return torch.device("cpu")


def _on_rank_0(own: RankRecord | Exception) -> list[RankRecord]:
    """The records of all ranks on rank 0, nothing on the others; raises on all of them if one has no record."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    failures = [repr(own) if isinstance(own, Exception) else None]
    if world_size > 1:
        failures *= world_size
        dist.all_gather_object(failures, failures[0])
    for rank, failure in enumerate(failures):
        if failure is not None:
            cause = own if isinstance(own, Exception) else None
            raise RuntimeError(f"the log of rank {rank} cannot be read: {failure}") from cause
    assert isinstance(own, RankRecord)
    if world_size == 1:
        return [own]
    # A log has megabytes, so only one rank gets those of all.
    found: list[RankRecord | None] | None = [None] * world_size if dist.get_rank() == 0 else None
    dist.gather_object(own, found, dst=0)
    return [one for one in found or [] if one is not None]


TARGET = "SHARDKIT_PROFILE"
WARMUP = "SHARDKIT_PROFILE_WARMUP"
STEPS = "SHARDKIT_PROFILE_STEPS"
ACTIVATIONS = "SHARDKIT_PROFILE_ACTIVATIONS"
DEFAULT_WARMUP = 1
DEFAULT_STEPS = 10


def start() -> None:
    """Begins to record this process as the environment says.

    Raises:
        ValueError: for a setting that is no number, or out of range.
    """
    directory = Path(os.environ[TARGET])
    extent = Extent(_number(WARMUP, DEFAULT_WARMUP), _number(STEPS, DEFAULT_STEPS))
    recording = _Recording(directory, extent, activations=os.environ.get(ACTIVATIONS, "1") != "0")
    atexit.register(recording.end)


class _Recording:
    """A recording that ends by itself, once."""

    def __init__(self, directory: Path, extent: Extent, *, activations: bool) -> None:
        self._directory = directory
        self._ended = False
        self._process = os.getpid()
        self._activations = activations
        self._recorder = Recorder(_device(), extent, self.end, activations=activations)
        self._recorder.start(None, ())

    def end(self) -> None:
        """Closes the log and writes the record; does nothing the second time, or in a process that was forked."""
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        self._recorder.stop()
        try:
            write_record(record_of(self._recorder, activations=self._activations), self._directory)
        except OSError as error:
            warnings.warn(f"the profile cannot be written to {self._directory}: {error.strerror}", stacklevel=2)
        except Exception as error:  # noqa: BLE001 - a run that trains well must not end because its log cannot be read
            where = "".join(traceback.format_exception(error))
            warnings.warn(f"this rank has no profile, because its log could not be read:\n{where}", stacklevel=2)


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is '{text}'; expected a whole number of steps") from None
