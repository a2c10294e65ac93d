"""The engine on streams: no race and no use of memory that is another's, and every wait and reference is needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.simulation.configurations import CONFIGURATIONS
from tests.simulation.faults import undisturbed, unneeded_references, unneeded_waits
from tests.simulation.races import Checker
from tests.simulation.training import Scenario, started


def findings(name: str) -> list[str]:
    return undisturbed(name).findings


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_findings(name: str, on_device: Callable[..., Any]) -> None:
    found = on_device(findings, name)
    assert not found, "\n".join(found)


def reused_inputs(engine: str) -> list[str]:
    """The caller writes the next batch to the same pinned buffer when forward has returned."""
    checker = Checker()
    with started(Scenario("inputs on the host"), engine, checker) as run:
        buffer = torch.zeros(4, pin_memory=True)
        for step in range(2):
            loss = run.forwards(lambda: run.model(buffer).sum())
            buffer.fill_(step)
            run.backwards(loss.backward)
    return list(checker.findings)


@pytest.mark.parametrize("engine", ["ours", "stock"])
def test_inputs_on_the_host_are_copied_when_forward_returns(engine: str, on_device: Callable[..., Any]) -> None:
    found = on_device(reused_inputs, engine)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("unneeded", [unneeded_waits, unneeded_references])
def test_every_wait_and_reference_is_needed(unneeded: Callable[..., Any], on_device: Callable[..., Any]) -> None:
    """Each is left out in turn, and the checker finds it in some configuration: a race, or memory used too early."""
    count, missed_by_none = on_device(unneeded)
    assert count >= 5
    assert missed_by_none == set()
