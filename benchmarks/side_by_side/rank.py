"""One rank process of one system. It answers one request after the other and sleeps in between, blocked on a pipe."""

import multiprocessing
import os
import threading
import time
import warnings
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from side_by_side.link import Side
from side_by_side.meters import MemoryMeter, c10d_calls, socket_bytes
from side_by_side.networks import WORKLOADS
from side_by_side.systems import SYSTEMS, Place, optimizers_for

_BATCHES = 4
_HELD_STEPS = 3
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Assignment:
    """Which rank of which system a process is. The ranks meet at the file `store`; `side` is where this one runs."""

    system: str
    workload: str
    optimizer: str
    rank: int
    world_size: int
    device: str
    store: str
    side: Side | None


@dataclass
class Times:
    """Seconds per step of one turn. `host` is forward and backward without waiting for the device."""

    step: float = 0.0
    cpu: float = 0.0
    forward_cpu: float = 0.0
    backward_cpu: float = 0.0
    optimizer_cpu: float = 0.0
    host: float = 0.0


@dataclass(frozen=True)
class Agreement:
    """Loss of each of the first steps on this rank, and the norm of the gradient at the first."""

    losses: list[float] = field(default_factory=list)
    grad_norm: float = 0.0
    averages: bool = True


class Trainer:
    """The network, its optimizer and the meters of this rank. Public methods are the requests a crew sends."""

    def __init__(self, assignment: Assignment) -> None:
        self.device = _device(assignment)
        self.assignment = assignment
        workload = replace(WORKLOADS[assignment.workload], optimizer=assignment.optimizer)
        self.batches = workload.batches(_BATCHES, assignment.rank, self.device)
        self.steps_done = 0
        torch.manual_seed(0)
        _warm(self.device)
        self.memory = MemoryMeter(self.device)
        with self.device:
            self.system = SYSTEMS[assignment.system](
                workload, Place(assignment.rank, assignment.world_size, self.device)
            )
        self.optimizers = optimizers_for(self.system, workload)

    def first_steps(self, count: int) -> Agreement:
        """Train `count` steps, the ones that are compared between systems."""
        losses: list[float] = []
        norm = 0.0
        for step in range(count):
            loss = self._forward()
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                norm = self._grad_norm()
            self._update()
        return Agreement(losses, norm, self.system.averages)

    def peaks(self) -> dict[str, int]:
        return self.memory.peaks()

    def restart_peaks(self) -> None:
        self.memory.restart()

    def turn(self, steps: int) -> Times:
        """Time `steps` steps. The ranks begin together."""
        self._meet()
        times = Times()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._timed_step(times)
        self._synchronize()
        times.step, times.cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Times(**{name: value / steps for name, value in vars(times).items()})

    def traffic(self) -> dict[str, Any]:
        counts: dict[str, Any] = {}
        self._meet()
        if self.device.type == "cpu":
            counts["wire"] = socket_bytes(self._step)
            self._meet()
            counts["held"] = max(self.memory.held_during(self._step) for _ in range(_HELD_STEPS))
            self._meet()
        counts["calls"] = c10d_calls(self._step)
        return counts

    def _forward(self) -> torch.Tensor:
        tokens, targets = self.batches[self.steps_done % _BATCHES]
        self.steps_done += 1
        with self.system.around_forward():
            return self.system.network(tokens, targets)

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _step(self) -> None:
        self._forward().backward()
        self._update()
        self._synchronize()

    def _timed_step(self, times: Times) -> None:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = self._forward()
        after_forward = time.process_time()
        loss.backward()
        after_backward = time.process_time()
        times.host += time.perf_counter() - begin
        self._update()
        times.forward_cpu += after_forward - begin_cpu
        times.backward_cpu += after_backward - after_forward
        times.optimizer_cpu += time.process_time() - after_backward

    def _grad_norm(self) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for parameter in self.system.network.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                total += local.double().square().sum().cpu()
        if self.system.shards:
            dist.all_reduce(total, group=_host_group())
        return total.sqrt().item()

    def _meet(self) -> None:
        self._synchronize()
        dist.barrier(group=_host_group())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_host_groups: list[dist.ProcessGroup] = []


def _host_group() -> dist.ProcessGroup:
    """A gloo group of the benchmark's own, so that no system's group is used between its turns."""
    if not _host_groups:
        _host_groups.append(dist.new_group(backend="gloo"))
    return _host_groups[0]


def _device(assignment: Assignment) -> torch.device:
    if assignment.device == "cuda":
        device = torch.device("cuda", assignment.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(assignment.device)


def _warm(device: torch.device) -> None:
    """Make torch load its lazy parts (autograd, kernels, a gloo connection) before memory is metered."""
    dist.barrier(group=_host_group())
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.randn(8, 64, device=device)).sum().backward()
    torch.optim.AdamW(layer.parameters(), foreach=True).step()


_trainers: list[Trainer] = []


def begin(assignment: Assignment) -> None:
    """Join the group of the system's ranks and build the network. This process ends with the one that started it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if assignment.side is not None:
        assignment.side.enter()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "nccl" if assignment.device == "cuda" else "gloo",
        store=dist.FileStore(assignment.store, assignment.world_size),
        rank=assignment.rank,
        world_size=assignment.world_size,
        timeout=_TIMEOUT,
    )
    _trainers.append(Trainer(assignment))


def answer(request: str, *args: Any) -> Any:
    return getattr(_trainers[0], request)(*args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
