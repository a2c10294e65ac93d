"""Measures the times of operators: runs each one by itself, as busy as a rank of this machine would be."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from shardkit.tools.estimating.timeline import Roofline
from shardkit.tools.estimating.trace import Operator, TensorSpec
from shardkit.tools.machine import Machine, threads_of_each

_LEAST_RUNS = 5
_LEAST_SECONDS = 0.003
_MOST_BYTES = 2**31


# The program of the other ranks of the host: it keeps cores, caches and memory busy until this process ends.
_COMPANY = """
import os, sys, threading, torch
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
torch.set_num_threads(int(sys.argv[1]))
a, b, c = torch.rand(512, 512), torch.rand(512, 512), torch.rand(2**20)
print("ready", flush=True)
while True:
    a @ b
    torch.nn.functional.gelu(c)
"""


class MeasuredCosts:
    """Runs every operator a few times and takes the median; operators that cannot run alone get roofline times.

    As a context it uses as many threads as a rank would, and keeps the machine as busy as the other ranks of a host
    would: two hardware threads may share one core. The machine's launch time for each operator is subtracted, because
    the measured time contains it.

    Attributes:
        estimated: the operators that could not be run alone.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._roofline = Roofline(machine)
        self._known: dict[Any, float] = {}
        self.estimated: list[str] = []
        self._company: list[subprocess.Popen[bytes]] = []
        self._threads_before = torch.get_num_threads()

    def __enter__(self) -> MeasuredCosts:
        self._threads_before = torch.get_num_threads()
        threads = threads_of_each(self._machine.ranks_per_host)
        try:
            for _ in range(self._machine.ranks_per_host - 1):
                command = [sys.executable, "-c", _COMPANY, str(threads)]
                self._company.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for process in self._company:
                assert process.stdout is not None
                process.stdout.readline()
        except BaseException:
            self.__exit__()
            raise
        torch.set_num_threads(threads)
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.set_num_threads(self._threads_before)
        for process in self._company:
            process.kill()
            process.communicate()
        self._company = []

    def seconds(self, operator: Operator) -> float:
        key = (operator.function, operator.args, tuple(operator.kwargs.items()))
        if key not in self._known:
            self._known[key] = self._measure(operator)
        return self._known[key]

    def _measure(self, operator: Operator) -> float:
        if not operator.bytes or operator.bytes > _MOST_BYTES:
            return self._roofline.seconds(operator) if operator.bytes else 0.0
        bound = _rows(operator)
        try:
            args = _real(operator.args, bound)
            kwargs = {name: _real(value, bound) for name, value in operator.kwargs.items()}
            with torch.no_grad():
                return max(0.0, _median_seconds(operator.function, args, kwargs) - self._machine.operator_seconds)
        except (RuntimeError, TypeError, ValueError, IndexError):
            self.estimated.append(str(operator.function))
            return self._roofline.seconds(operator)


def _median_seconds(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    function(*args, **kwargs)
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or sum(seconds) < _LEAST_SECONDS:
        started = time.perf_counter()
        function(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _rows(operator: Operator) -> int:
    """The bound for an index: the fewest rows of a tensor of numbers."""
    pictures = [one for one in (*operator.args, *operator.kwargs.values()) if isinstance(one, TensorSpec)]
    rows = [min(shape) for shape, _, dtype in pictures if dtype.is_floating_point and shape and min(shape) > 0]
    return max(1, min(rows, default=1))


def _real(value: Any, bound: int) -> Any:
    if isinstance(value, TensorSpec):
        shape, strides, dtype = value
        # Expanded tensors are filled before they are expanded: several of their elements are one in memory.
        dense = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
        tensor = torch.empty_strided(dense, strides, dtype=dtype)
        if dtype.is_floating_point:
            tensor.uniform_(0.1, 1.0)
        elif dtype == torch.int64:
            tensor.random_(0, bound)
        else:
            tensor.zero_()
        return tensor.expand(shape)
    if isinstance(value, tuple):
        return [_real(one, bound) for one in value]
    return None if isinstance(value, str) and value == "generator" else value
