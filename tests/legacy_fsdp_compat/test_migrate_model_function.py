"""`migrate --model MODULE:FUNCTION` with functions that go wrong: one line says what was seen, expected and to be done.

The source is a checkpoint of stock FSDP1.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.legacy_fsdp_compat.migrate.command import main
from tests.legacy_fsdp_compat.both import CPU, OURS, STOCK
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = OURS.api


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner, self.outer = nn.Sequential(nn.Linear(4, width)), nn.Linear(width, 2)
        self.register_buffer("scale", torch.ones(3))


def write(rank: int, world_size: int, directory: Path) -> None:
    names = STOCK.api
    model = names.FSDP(Net(), auto_wrap_policy=names.ModuleWrapPolicy({nn.Sequential}), device_id=CPU)
    with STOCK.of_type("LOCAL", model):
        torch.save({"model": model.state_dict()}, directory / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def local_files(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("local")
    run_ranks(2, write, directory)
    return directory


def converted(source: Path, target: Path, model: str, to: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and the last line that was printed."""
    ranks = [] if to == "dcp" else ["--ranks", "2"]
    status = main([str(source), str(target), "--to", to, *ranks, "--no-progress", "--model", model])
    assert target.exists() == (status == 0)
    assert not target.with_name(target.name + ".partial").exists()
    shown = capsys.readouterr()
    return status, (shown.err if status else shown.out).splitlines()[-1]


def fails() -> nn.Module:
    raise OSError("no such file:\n  'vocabulary.txt'")


def wrapped_already() -> nn.Module:
    model = Net()
    model.outer._modules["_fsdp_wrapped_module"] = nn.Linear(6, 2)
    return model


class WithExtraState(Net):
    def get_extra_state(self) -> object:
        raise RuntimeError("no state\nyet")


def with_more() -> nn.Module:
    model = Net()
    model.more = nn.Linear(2, 2)
    return model


CALLED: Any = Net()  # what --model names: each case sets it
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "raises": (
        fails,
        r"raised OSError in line \d+ of .*_model_function.py: no such file: 'vocabulary.txt'; it is called",
    ),
    "needs arguments": (
        lambda config: config,
        "raised TypeError: .*missing 1 required positional argument: 'config'; it is called",
    ),
    "needs values": (
        lambda: nn.Linear(int(torch.ones(3).sum().item()), 2),
        "cannot be called on meta tensors; it is called without arguments on the meta device",
    ),
    "returns nothing": (lambda: None, "returned something of type NoneType, expected a torch.nn.Module, or a pair"),
    "a number": (5, "is something of type int, expected a function"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        r"\['0.weight', '0.bias'\] of the model have no shapes before its first forward",
    ),
    "wrapped already": (wrapped_already, "'outer' of the model is an FSDP module: build the model without FSDP"),
    "extra state": (
        WithExtraState,
        r"state_dict of the model raised RuntimeError in line \d+ of .*_function.py: no state yet;",
    ),
    "more parameters": (with_more, r"'model._flat_param' has 14 elements in .* make 20"),
}


@pytest.mark.parametrize("case", [*FUNCTIONS, "no such name"])
def test_functions(case: str, local_files: Path, tmp_path, capsys, monkeypatch):
    called, message = FUNCTIONS.get(case, (Net, "has no 'Net.__init__', expected a function"))
    monkeypatch.setattr(f"{__name__}.CALLED", called)
    name = "CALLED" if case in FUNCTIONS else "Net.__init__"
    status, said = converted(local_files, tmp_path / "out", f"{__name__}:{name}", "dcp", capsys)
    assert status == 2
    assert re.search(f"^error: .*{message}", said), said


def per_module(**arguments: Any) -> Any:
    return NAMES.CustomPolicy(lambda module: arguments if isinstance(module, nn.Sequential) else False)


def raising(module: nn.Module) -> bool:
    raise KeyError(type(module).__name__)


def frozen(model: Net) -> dict[str, Any]:
    model.outer.bias.requires_grad_(False)
    return {}


def repeated(model: Net) -> dict[str, Any]:
    model.again = model.inner
    return {"auto_wrap_policy": NAMES.ModuleWrapPolicy({nn.Sequential})}


ARGUMENTS: dict[str, tuple[Callable[[Net], dict[str, Any]], str]] = {
    "unknown": (lambda m: {"auto_wrap_polcy": None}, r"\['auto_wrap_polcy'\] of the model are not arguments of Fully"),
    "policy": (lambda m: {"auto_wrap_policy": {nn.Linear}}, "auto_wrap_policy of the model is {<class .*}, expected"),
    "policy raises": (
        lambda m: {"auto_wrap_policy": NAMES.CustomPolicy(raising)},
        r"auto_wrap_policy of the model raised KeyError in line \d+ of .*: 'Net'; expected a policy",
    ),
    "precision": (lambda m: {"mixed_precision": torch.bfloat16}, "must be a MixedPrecision, got torch.bfloat16"),
    "dtype": (
        lambda m: {"mixed_precision": NAMES.MixedPrecision(param_dtype="bf16")},
        "param_dtype of the model is 'bf16', expected a torch.dtype",
    ),
    "flag": (lambda m: {"use_orig_params": "yes"}, "use_orig_params of the model is 'yes', expected True or False"),
    "ignored names": (
        lambda m: {"ignored_modules": ["inner"]},
        "ignored_modules must hold modules, got a str; expected",
    ),
    "ignored twice": (
        lambda m: {"ignored_modules": [], "ignored_states": []},
        "pass ignored_modules or ignored_states",
    ),
    "all ignored": (lambda m: {"ignored_modules": [m.inner, m.outer]}, "no FSDP module has parameters: all 5 names"),
    "not sharded": (
        lambda m: {"sharding_strategy": NAMES.ShardingStrategy.NO_SHARD},
        "sharding_strategy of the model is NO_SHARD, whose state dicts are whole in FSDP1: convert to 'full'",
    ),
    "a module's flag": (
        lambda m: {"auto_wrap_policy": per_module(use_orig_params=True)},
        r"\['use_orig_params'\] of the FSDP module 'inner' are not arguments of .* that can be given here",
    ),
    "a module's precision": (
        lambda m: {"auto_wrap_policy": per_module(mixed_precision="fp16")},
        "mixed_precision of the FSDP module 'inner' raised TypeError",
    ),
    "partly frozen": (frozen, r"of the FSDP module '' \['outer.bias'\] are frozen and the others train"),
    "repeated": (repeated, r"several places in the model, \['inner', 'again'\]; such LOCAL files are not"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str, tmp_path, capsys, monkeypatch):
    """Nothing is written, instead of files with a wrapping that nobody meant."""
    made, message = ARGUMENTS[case]
    model = Net()
    arguments = made(model)
    torch.save(model.state_dict(), tmp_path / "full.pt")
    monkeypatch.setattr(f"{__name__}.CALLED", lambda: (model, arguments))
    status, said = converted(tmp_path / "full.pt", tmp_path / "out", f"{__name__}:CALLED", "local", capsys)
    assert status == 2
    assert re.search(f"^error: .*{message}", said), said


def good() -> tuple[nn.Module, dict[str, Any]]:
    """With arguments that do not matter here, and stock's classes."""
    names = STOCK.api
    return Net(), {
        "auto_wrap_policy": names.ModuleWrapPolicy({nn.Sequential}),
        "sharding_strategy": names.ShardingStrategy.SHARD_GRAD_OP,
        "device_id": 0,
    }


def test_what_fits_is_converted(local_files: Path, tmp_path, capsys):
    status, said = converted(local_files, tmp_path / "out", f"{__name__}:good", "local", capsys)
    assert (status, said[:26]) == (0, "wrote and verified 5 tenso")
