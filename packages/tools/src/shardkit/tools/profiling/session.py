"""`profile`: records the steps of a `with` block on every rank, and merges the ranks at its end."""

from __future__ import annotations

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
from shardkit.tools.report.files import write_report
from shardkit.tools.report.merge import merge
from shardkit.tools.report.record import RankRecord
from shardkit.tools.report.schema import Report

__all__ = ["Profile", "device_of", "profile"]

_DEFAULT_STEPS = 50


class Profile:
    """What `profile` returns; a context manager, to be entered once.

    Attributes:
        report: the report, on every rank, once the block has ended; None before, and after an exception in the block.
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
        self.report = merge(_everyone(self._record()))
        if self._path is not None and self._recorder.world.rank == 0:
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

    Args:
        model: the sharded model, the root of its iterations.
        optimizer: what steps it, one or several; found by themselves at their first step where left out.
        path: rank 0 writes the report there as JSON.
        warmup: steps to leave out first. The first iteration of a model is slower: it plans, and learns the order.
        steps: how many to record after that; None for all up to the end of the block.
        activations: whether to count what autograd saves for backward.

    Raises:
        ValueError: for a negative `warmup` or `steps` below 1.
        RuntimeError: on leaving, on every rank, if the log of one cannot be read.
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


def _everyone(own: RankRecord | Exception) -> list[RankRecord]:
    found: list[RankRecord | Exception | None] = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own if isinstance(own, RankRecord) else RuntimeError(repr(own)))
    for rank, one in enumerate(found):
        if isinstance(one, Exception):
            raise RuntimeError(f"the log of rank {rank} cannot be read: {one}") from (
                own if isinstance(own, Exception) else None
            )
    return [one for one in found if isinstance(one, RankRecord)]
