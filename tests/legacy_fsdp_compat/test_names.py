"""Stock FSDP1's arguments, methods and public names are there; docs/reference/legacy_fsdp.md lists the names."""

import importlib
import inspect
import re

import pytest
import torch.distributed.fsdp as stock
import torch.distributed.fsdp.api as stock_api
import torch.distributed.fsdp.sharded_grad_scaler as stock_scaler
import torch.distributed.fsdp.wrap as stock_wrap

import shardkit.legacy_fsdp_compat as ours
import shardkit.legacy_fsdp_compat.wrap as our_wrap
from tests.legacy_fsdp_compat.behaviour import arguments_of, methods
from tests.packaging.workspace import ROOT

FSDP2 = {
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",  # from torch 2.15 on
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
}
SUBMODULES = {"api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap"}


def table(heading: str) -> dict[str, str]:
    """First and second column of the table below a heading."""
    text = (ROOT / "docs" / "reference" / "legacy_fsdp.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section, re.MULTILINE))


def test_arguments():
    expected = arguments_of(stock.FullyShardedDataParallel.__init__)
    assert arguments_of(ours.FullyShardedDataParallel.__init__) == expected


def test_defaults():
    theirs = inspect.signature(stock.FullyShardedDataParallel.__init__).parameters
    for name, parameter in inspect.signature(ours.FullyShardedDataParallel.__init__).parameters.items():
        assert str(getattr(parameter.default, "name", parameter.default)) == str(
            getattr(theirs[name].default, "name", theirs[name].default)
        ), name


@pytest.mark.parametrize("name", sorted(set(methods()) - {"module", "named_buffers", "named_parameters", "forward"}))
def test_method_arguments(name: str):
    expected = arguments_of(getattr(stock.FullyShardedDataParallel, name))
    assert arguments_of(getattr(ours.FullyShardedDataParallel, name)) == expected


def test_public_names():
    exported = {name for name in dir(stock) if not name.startswith("_")} - FSDP2 - SUBMODULES
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
    "name",
    [name for name in table("Public names") if name.endswith("Config")] + ["MixedPrecision", "CPUOffload"],
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
