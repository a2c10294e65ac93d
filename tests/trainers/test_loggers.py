"""`StepMetrics` sends its values to real loggers."""

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core import StepMetrics


def _step(to: Any) -> dict[str, float]:
    metrics = StepMetrics(nn.Linear(3, 2), peak_flops=1e9, to=to)
    values = metrics.step(8, grad_norm=torch.tensor(0.5))
    metrics.close()
    return values


def test_tensorboard(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        values = _step(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    for name, value in values.items():
        (seen,) = events.Scalars(name)
        assert (seen.step, seen.value) == (1, pytest.approx(value))


def test_wandb(tmp_path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path) as run:
        values = _step(run)
        run.log({}, step=2)  # which ends the row of the first step
        assert {name: run.summary[name] for name in values} == values


def test_lightning(tmp_path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path)
    values = _step(logger)
    assert logger.experiment.metrics == [{**values, "step": 1}]


def test_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    values = _step(MeterProvider([reader]).get_meter("training"))
    (resource,) = reader.get_metrics_data().resource_metrics
    found = {one.name: one.data.data_points[0].value for one in resource.scope_metrics[0].metrics}
    assert found == {f"shardkit.{name}": value for name, value in values.items()}
