"""Profiling from outside: `SHARDKIT_PROFILE=DIRECTORY` makes every rank record itself, whatever its script does.

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
from pathlib import Path

import torch

from shardkit.tools.profiling.recorder import Extent, Recorder
from shardkit.tools.profiling.replay import record_of
from shardkit.tools.report.record import write_record

__all__ = ["ACTIVATIONS", "DEFAULT_STEPS", "DEFAULT_WARMUP", "STEPS", "TARGET", "WARMUP", "start"]

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
