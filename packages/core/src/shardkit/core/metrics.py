"""`StepMetrics`: the numbers of each training step that people plot."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core import events


class StepMetrics:
    """Measures each step of this rank, and returns a plain dict that any logger takes.

    ::

        metrics = StepMetrics(model, peak_flops=989e12, to=SummaryWriter() if rank == 0 else None)
        for tokens in loader:
            ...
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            metrics.step(tokens.numel(), grad_norm=norm)

    Nothing is collective. While it is open, it listens to shardkit's events; without it a step pays nothing.

    Args:
        model: the model, sharded or not.
        flops_per_token: floating-point operations of forward and backward for one token. Default: 6 for each parameter
            (Kaplan et al., 2020, arXiv:2001.08361), which leaves out attention over long sequences and counts all
            experts of a mixture.
        peak_flops: operations that this rank's device can make in a second, in the dtype of computation. Without it
            there is no `mfu`.
        to: where each step's dict is sent as well: a `SummaryWriter` of TensorBoard, the module `wandb` or a run of it,
            the module `mlflow`, a logger of Lightning, or a meter of OpenTelemetry.

    Raises:
        TypeError: if `to` is none of these.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        to: object | None = None,
    ) -> None:
        default = 6.0 * sum(one.numel() for one in model.parameters())
        self._flops = default if flops_per_token is None else flops_per_token
        self._peak_flops = peak_flops
        self._send = None if to is None else _sender(to)
        first = next(model.parameters(), torch.empty(0))
        # Offloaded parameters lie on the CPU.
        self._device_type = first.device_mesh.device_type if isinstance(first, DTensor) else first.device.type
        self._blocked = 0.0
        self._spans: list[events.DeviceSpan] = []
        self._steps = 0
        self._subscription = events.subscribe(self._hear)
        self._began = time.perf_counter()

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.WaitFinished):
            self._blocked += event.blocked
            if event.span is not None:
                self._spans.append(event.span)

    def step(self, tokens: int, **values: Any) -> dict[str, float]:
        """Ends a step in which this rank has processed so many `tokens`; call it after `optimizer.step()`.

        Returns:
            `step` (from 1 on), `seconds` since the last call, `tokens_per_second` of this rank, `mfu` (a share of
            `peak_flops`), `exposed_communication_seconds` (in which this rank's computation waited for other ranks; on
            a device the waits that it has reached by now), `peak_memory_bytes` (torch's count of the device;
            not on a CPU), and all `values`, as floats. Reading a tensor waits for the device.
        """
        now = time.perf_counter()
        seconds, self._steps = now - self._began, self._steps + 1
        spans, self._spans = self._spans, []
        for span in spans:
            if span.done:
                self._blocked += span.seconds()
            else:
                self._spans.append(span)
        found = {"step": float(self._steps), "seconds": seconds, "tokens_per_second": tokens / seconds}
        if self._peak_flops is not None:
            found["mfu"] = self._flops * tokens / seconds / self._peak_flops
        found["exposed_communication_seconds"] = self._blocked
        if self._device_type != "cpu":
            found["peak_memory_bytes"] = float(torch.accelerator.max_memory_allocated())
        found.update({name: float(value) for name, value in values.items()})
        if self._send is not None:
            self._send(found, self._steps)
        self._blocked, self._began = 0.0, time.perf_counter()
        return found

    def close(self) -> None:
        """Stops listening."""
        self._subscription.close()


def _sender(to: Any) -> Any:
    """A function of (values, step) that sends them to a logger, known by its methods."""
    if hasattr(to, "add_scalar"):  # TensorBoard
        return lambda values, step: [to.add_scalar(name, value, step) for name, value in values.items()]
    if hasattr(to, "log_metrics"):  # MLflow, and Lightning's loggers
        return lambda values, step: to.log_metrics(values, step=step)
    if hasattr(to, "create_gauge"):  # OpenTelemetry
        gauges: dict[str, Any] = {}

        def set_gauges(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                if name not in gauges:
                    gauges[name] = to.create_gauge(f"shardkit.{name}")
                gauges[name].set(value)

        return set_gauges
    if hasattr(to, "log"):  # Weights & Biases
        return lambda values, step: to.log(values, step=step)
    raise TypeError(
        f"StepMetrics cannot send to a {type(to).__name__}; pass a SummaryWriter, wandb, mlflow, a Lightning logger or "
        "an OpenTelemetry meter, or send the dict that step() returns"
    )
