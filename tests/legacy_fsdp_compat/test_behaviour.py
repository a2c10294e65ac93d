"""Each row of docs/reference/legacy_fsdp.md, same or not as FSDP1, runs on stock and on ours."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock

from tests.legacy_fsdp_compat.behaviour import (
    ARGUMENTS,
    CASES,
    DOCUMENT,
    METHODS,
    Engine,
    arguments_of,
    generated,
    methods,
)
from tests.legacy_fsdp_compat.both import OURS, STOCK
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def seen(name: str, rank: int, number: int) -> Any:
    """The result of a case with one engine. If it raises: the type of the error, and the message."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CASES[number].run(Engine(name, rank)), ""
    except Exception as error:  # noqa: BLE001 - whichever it is, it is the result
        return type(error).__name__, str(error)


def equal(one: Any, other: Any) -> bool:
    """Whether two results are the same in every part, numbers to rounding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor | float):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.dtype == other.dtype and one.shape == other.shape and torch.allclose(one, other, 1e-4, 1e-5)
    return bool(one == other)


def run_case(rank: int, world_size: int, number: int) -> list[str]:
    """Compares stock and ours, and returns the problems with the case's verdict."""
    case = CASES[number]
    (theirs, _), (mine, message) = seen(STOCK, rank, number), seen(OURS, rank, number)
    kind, _, text = case.verdict.partition(": ")
    same = equal(theirs, mine)
    assert kind in ("same", "differs", "refused"), case.verdict
    assert bool(text) == (kind != "same"), case.verdict
    if kind == "refused" and not re.search(re.escape(case.error), message):
        return [f"{case.id}: ours gives {mine!r} {message[:300]!r}, expected an error with {case.error!r}"]
    if same != (kind == "same"):
        return [f"{case.id}: {case.verdict!r}, but stock gives {theirs!r} and ours {mine!r} {message[:300]!r}"[:1500]]
    return []


@pytest.mark.parametrize("number", range(len(CASES)), ids=[one.id for one in CASES])
def test_case(number: int):
    problems = run_ranks(2, run_case, number)
    assert not any(problems), problems


def test_the_document_has_these_rows():
    text = DOCUMENT.read_text()
    assert generated(text) == text, "run python -m tests.legacy_fsdp_compat.behaviour"


def test_every_argument_and_method_has_a_row():
    by_table = {table: {one.name for one in CASES if one.table == table} for table in (ARGUMENTS, METHODS)}
    assert by_table[ARGUMENTS] == set(arguments_of(stock.FullyShardedDataParallel.__init__)[1:])
    assert by_table[METHODS] == {*methods(), "params", "state_dict", "_flat_param", "_handle"}
