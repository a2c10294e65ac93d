"""Starts recordings: by `profile`, a context manager, or by the environment (`SHARDKIT_PROFILE`), for any script.

Core calls `start` in each process at its first `fully_shard`, through the entry point group `shardkit.observers`. When
the requested steps are over, or the process ends earlier, the rank writes its record into the directory.

    SHARDKIT_PROFILE_WARMUP    steps to skip first (default 1)
    SHARDKIT_PROFILE_STEPS     steps to record after that (default 10)
    SHARDKIT_PROFILE_ACTIVATIONS    0: do not count tensors that autograd saves, which costs less
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
    """The result of `profile`; a context manager that can be entered once.

    Attributes:
        report: the report, on rank 0, after the block; None before, on other ranks, and after an exception in the
            block.
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
        if error is not None:  # other ranks may be anywhere, so nothing collective may run
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
    """A context manager around a training loop that records the work and waits of its steps.

    Every rank must enter and leave it. Leaving is collective over the default process group, unless an exception ends
    the block. Rank 0 receives the records of all ranks.

    Args:
        model: the sharded model, the root of its iterations.
        optimizer: the optimizer or optimizers of the model; if omitted, they are found at their first step.
        path: rank 0 writes the report to this file as JSON.
        warmup: steps to skip first. The first iteration of a model is slower: it plans, and learns the order.
        steps: number of steps to record after that; None for all up to the end of the block.
        activations: whether to count tensors that autograd saves for backward.

    Raises:
        ValueError: for a negative `warmup` or `steps` below 1.
        RuntimeError: on leaving, on every rank, if the log of any rank cannot be read. Later errors (merging the
            records, writing `path`) are raised only on rank 0, while the others continue.
    """
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    recorder = Recorder(_device_of(model), warmup, steps, activations=activations)
    return Profile(model, optimizers, Path(path) if path is not None else None, recorder)


def _device_of(model: nn.Module) -> torch.device:
    """The device on which the model computes: that of its mesh, or of its parameters."""
    first = next(model.parameters(), None)
    if isinstance(first, DTensor) and first.device_mesh.device_type != "cpu":
        kind = first.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu") if first is None or isinstance(first, DTensor) else first.device


def _records_on_rank_0(recorder: Recorder) -> list[RankRecord]:
    """The records of all ranks on rank 0, none on the others; raises on all ranks if one has no record."""
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
    # A log takes megabytes, so only one rank receives all of them.
    found: list[RankRecord | None] | None = [None] * world_size if dist.get_rank() == 0 else None
    dist.gather_object(own, found, dst=0)
    return [one for one in found or [] if one is not None]


def start() -> None:
    """Starts recording this process according to the environment.

    Raises:
        ValueError: if a setting is not a number, or out of range.
    """
    directory, process = Path(os.environ[TARGET]), os.getpid()

    def end() -> None:
        """Closes the log and writes the record, once; does nothing in a forked process."""
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
