"""A short campaign: every kind of fault, at instants that a seed chooses: `pytest tests/faults/short_campaign.py`.

It is not collected with the suite until it has run through.
"""

from pathlib import Path

import pytest

from tests.faults.campaign import KINDS, Undisturbed, faults, undisturbed, verdict
from tests.faults.injection import Fault


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("faults") / "undisturbed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_survives(tmp_path: Path, expected: Undisturbed, kind: str):
    times = 2 if kind in ("kill", "system") else 1
    for number, fault in enumerate(faults(17, times, expected.instants, (kind,))):
        assert verdict(tmp_path / str(number), fault, expected) is None


def test_a_run_that_goes_on_wrongly_is_noticed(tmp_path: Path, expected: Undisturbed):
    """The comparison can fail: what was undisturbed is said to end with other parameters."""
    other = Undisturbed([("", "")] * 2, expected.instants)
    wrong = verdict(tmp_path, Fault("slow", 0, 3), other)
    assert wrong is not None and "ended otherwise than the undisturbed run: rank 0: state, rank 0: own" in wrong
