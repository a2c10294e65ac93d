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

from shardkit.tools.profiling.recorder import Recorder
from shardkit.tools.profiling.replay import record_of
from shardkit.tools.report.files import RankRecord, write_record, write_report
from shardkit.tools.report.merge import merge
from shardkit.tools.report.schema import Report

TARGET = "SHARDKIT_PROFILE"
WARMUP = "SHARDKIT_PROFILE_WARMUP"
STEPS = "SHARDKIT_PROFILE_STEPS"
ACTIVATIONS = "SHARDKIT_PROFILE_ACTIVATIONS"


class Profile:
    """What `profile` returns; a context manager, to be entered once.

    Attributes:
        report: the report, on rank 0, once the block has ended; None before, on other ranks, and after an exception in
            the block.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], path: Path | None, recorder: Recorder
    ) -> None:
        self.report: Report | None = None
        self._model = model
        self._optimizers = optimizers
        self._path = path
        self._recorder = recorder

    def __enter__(self) -> Profile:
        self._recorder.start(self._model, self._optimizers)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._recorder.stop()
        self._recorder.leave()
        if error is not None:  # the other ranks may be anywhere: nothing collective
            return
        records = _records_on_rank_0(self._recorder)
        if records:
            self.report = merge(records)
            if self._path is not None:
                write_report(self.report, self._path)


def profile(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    *,
    path: str | Path | None = None,
    warmup: int = 0,
    steps: int | None = 50,
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
    recorder = Recorder(_device_of(model), warmup, steps, activations=activations)
    return Profile(model, optimizers, Path(path) if path is not None else None, recorder)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model computes: the device of its mesh, or of its parameters."""
    first = next(model.parameters(), None)
    if isinstance(first, DTensor) and first.device_mesh.device_type != "cpu":
        kind = first.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu") if first is None or isinstance(first, DTensor) else first.device


def _records_on_rank_0(recorder: Recorder) -> list[RankRecord]:
    """The records of all ranks on rank 0, nothing on the others; raises on all of them if one has no record."""
    own, failed = None, None
    try:
        own = record_of(recorder)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear it; raised on every rank, below
        failed = error
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    failures = [None if failed is None else repr(failed)] * world_size
    if world_size > 1:
        dist.all_gather_object(failures, failures[0])
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"the log of rank {rank} cannot be read: {failure}") from failed
    assert own is not None
    if world_size == 1:
        return [own]
    # A log has megabytes, so only one rank gets those of all.
    found: list[RankRecord | None] | None = [None] * world_size if dist.get_rank() == 0 else None
    dist.gather_object(own, found, dst=0)
    return [one for one in found or [] if one is not None]


def start() -> None:
    """Begins to record this process as the environment says.

    Raises:
        ValueError: for a setting that is no number, or out of range.
    """
    directory, process = Path(os.environ[TARGET]), os.getpid()

    def end() -> None:
        """Closes the log and writes the record, once; does nothing in a process that was forked."""
        if os.getpid() != process or not recorder.stop():
            return
        try:
            write_record(record_of(recorder), directory)
        except OSError as error:
            warnings.warn(f"the profile cannot be written to {directory}: {error.strerror}", stacklevel=2)
        except Exception as error:  # noqa: BLE001 - a run that trains well must not end because its log cannot be read
            where = "".join(traceback.format_exception(error))
            warnings.warn(f"this rank has no profile, because its log could not be read:\n{where}", stacklevel=2)

    device = torch.device("cpu")
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    activations = os.environ.get(ACTIVATIONS, "1") != "0"
    recorder = Recorder(device, _number(WARMUP, 1), _number(STEPS, 10), end, activations=activations)
    recorder.start()
    atexit.register(end)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is '{text}'; expected a whole number of steps") from None
