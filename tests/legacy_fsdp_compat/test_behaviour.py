"""Names, arguments and behaviour of FSDP1: each row of docs/reference/legacy_fsdp.md runs on stock and ours."""

import importlib
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
import torch.distributed.fsdp._fully_shard as stock_fsdp2
import torch.distributed.fsdp.api as stock_api
import torch.distributed.fsdp.sharded_grad_scaler as stock_scaler
import torch.distributed.fsdp.wrap as stock_wrap

import shardkit.legacy_fsdp_compat as ours
import shardkit.legacy_fsdp_compat.wrap as our_wrap
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
from tests.support import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


def seen(engine: Engine, number: int) -> Any:
    """The result of a case with one engine. If it raises: the type of the error, and the message."""
    try:
        return CASES[number].run(engine), ""
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


@pytest.mark.parametrize("number", range(len(CASES)), ids=[one.id for one in CASES])
@on_ranks(2)
def test_case(rank: int, world_size: int, number: int) -> None:
    case = CASES[number]
    (theirs, _), (mine, message) = (seen(Engine(name, rank), number) for name in ("stock", "ours"))
    kind, same = case.verdict.partition(": ")[0], equal(theirs, mine)
    assert kind != "refused" or case.error in message, f"ours gives {mine!r} {message[:300]!r}"
    assert same == (kind == "same"), f"stock gives {theirs!r} and ours {mine!r} {message[:300]!r}"[:1500]


def test_the_document_has_these_rows():
    text = DOCUMENT.read_text()
    assert generated(text) == text, "run python -m tests.legacy_fsdp_compat.behaviour"


def test_every_argument_and_method_has_a_row():
    by_table = {table: {one.name for one in CASES if one.table == table} for table in (ARGUMENTS, METHODS)}
    assert by_table[ARGUMENTS] == set(arguments_of(stock.FullyShardedDataParallel.__init__)[1:])
    assert by_table[METHODS] == {*methods(), "params", "state_dict", "_flat_param", "_handle"}


SUBMODULES = {"api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap"}


def table(heading: str) -> dict[str, str]:
    """First and second column of the table below a heading."""
    section = DOCUMENT.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))


def test_defaults():
    theirs = inspect.signature(stock.FullyShardedDataParallel.__init__).parameters
    for name, parameter in inspect.signature(ours.FullyShardedDataParallel.__init__).parameters.items():
        assert str(getattr(parameter.default, "name", parameter.default)) == str(
            getattr(theirs[name].default, "name", theirs[name].default)
        ), name


@pytest.mark.parametrize(
    "name", sorted({*methods(), "__init__"} - {"module", "named_buffers", "named_parameters", "forward"})
)
def test_method_arguments(name: str):
    expected = arguments_of(getattr(stock.FullyShardedDataParallel, name))
    assert arguments_of(getattr(ours.FullyShardedDataParallel, name)) == expected


def test_public_names():
    exported = {name for name in dir(stock) if not name.startswith("_")} - {*dir(stock_fsdp2)} - SUBMODULES
    expected = exported | set(stock_wrap.__all__ if hasattr(stock_wrap, "__all__") else ()) | {"ShardedGradScaler"}
    listed = table("Public names")
    assert set(listed) >= expected
    for name, status in listed.items():
        module = our_wrap if hasattr(our_wrap, name) else ours
        if status == "refused":
            with pytest.raises(ImportError, match="there is no"):
                getattr(module, name)
        else:
            assert hasattr(module, name), name


def test_modules():
    """A script that imports from a module of stock finds the same public names in ours."""
    for path in sorted(SUBMODULES):
        theirs = importlib.import_module(f"torch.distributed.fsdp.{path}")
        mine = importlib.import_module(f"shardkit.legacy_fsdp_compat.{path}")
        public = set(getattr(theirs, "__all__", ())) | {name for name in vars(stock_api) if name in stock_api.__all__}
        lacking = {name for name in public if hasattr(theirs, name) and not hasattr(mine, name)}
        assert not lacking, path


@pytest.mark.parametrize("name", ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"])
def test_enums(name: str):
    assert {one.name: one.value for one in getattr(ours, name)} == {one.name: one.value for one in getattr(stock, name)}


@pytest.mark.parametrize(
    "name", [name for name in table("Public names") if name.endswith("Config")] + ["MixedPrecision", "CPUOffload"]
)
def test_configurations(name: str):
    mine, theirs = getattr(ours, name)(), getattr(stock, name)()
    for field in vars(theirs):
        if field != "_module_classes_to_ignore":
            assert getattr(mine, field) == getattr(theirs, field)
    assert set(vars(mine)) == set(vars(theirs))


def test_scaler_arguments():
    theirs = inspect.signature(stock_scaler.ShardedGradScaler.__init__).parameters
    assert list(inspect.signature(ours.ShardedGradScaler.__init__).parameters) == list(theirs)
