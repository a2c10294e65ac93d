"""`StepMetrics`: what its numbers count, and that it hears nothing before and after."""

import pytest
import torch
from torch import nn

from shardkit.core import StepMetrics, clip_grad_norm_, events, fully_shard
from tests.support import on_ranks


class Scalars:
    """Has the method of a `SummaryWriter`, whose real one tests/trainers runs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.append((name, value, step))


@on_ranks(2)
def test_numbers_of_a_step(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(5, 7)), nn.Linear(7, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    writer = Scalars()
    metrics = StepMetrics(model, peak_flops=1e6, to=writer)
    found, heard, blocked = [], [], []
    subscription = events.subscribe(heard.append)
    for _ in range(3):
        model(torch.randn(2, 5)).sum().backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(metrics.step(10, grad_norm=norm))
        assert found[-1]["grad_norm"] == norm.item()
        blocked.append(sum(event.blocked for event in heard if isinstance(event, events.WaitFinished)))
        heard.clear()
    subscription.close()
    assert any(blocked)
    for number, values in enumerate(found, 1):
        assert values.keys() == {
            *("step", "seconds", "tokens_per_second", "mfu", "exposed_communication_seconds", "grad_norm")
        }
        assert values["step"] == number
        assert values["tokens_per_second"] == pytest.approx(10 / values["seconds"])
        assert values["mfu"] == pytest.approx(6 * (5 * 7 + 7 + 7 * 3 + 3) * values["tokens_per_second"] / 1e6)
        assert values["exposed_communication_seconds"] == pytest.approx(blocked[number - 1])
    assert writer.seen == [(name, value, int(one["step"])) for one in found for name, value in one.items()]
    metrics.close()
    assert not events.hub.active


def test_an_unknown_logger_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot send to a list; pass a SummaryWriter"):
        StepMetrics(nn.Linear(2, 2), to=[])
