"""Random training programs on ranks have the gradients of a single process, or raise an error that names a module."""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.core.random_programs.program import Act, Block, Call, Micro, Policy, Program, Side, Step, Wrap
from tests.core.random_programs.ranks import run_programs
from tests.core.random_programs.strategies import programs

PROGRAMS = int(os.environ.get("RANDOM_PROGRAMS", "300"))


@pytest.mark.slow
@settings(
    max_examples=PROGRAMS,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(programs())
def test_random_programs_are_right_or_refused(program: Program) -> None:
    (outcome,) = run_programs([program])
    assert outcome.good, f"{outcome.kind}: {outcome.message}\n{program!r}"


FOUND = {
    "side output of a block, backward of it alone": Program(
        Block(ops=("linear", Call("alpha")), blocks=(Block("alpha", ops=("linear", Side(), "tanh")),)),
        Policy(wraps=(Wrap(("alpha",)), Wrap(("",))), late=1),
        (Step((Micro(sides="only"),)),),
    ),
    "view that the caller changes in place": Program(
        Block(ops=("linear", Call("alpha"), "add_"), blocks=(Block("alpha", ops=("linear", "view")),)),
        Policy(wraps=(Wrap(("alpha",)), Wrap(("",))), late=1),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found_before(name: str) -> None:
    (outcome,) = run_programs([FOUND[name]])
    assert outcome.kind == "equal", f"{outcome.kind}: {outcome.message}"


__all__ = ["Act"]
