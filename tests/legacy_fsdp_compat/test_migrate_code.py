"""`migrate --model MODULE:FUNCTION` with functions that go wrong, and `migrate script`, which rewrites scripts."""

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.legacy_fsdp_compat.migrate.command import main
from shardkit.legacy_fsdp_compat.migrate.script import rewrite
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


def assert_refused(source: Path, target: Path, model: str, to: str, message: str, capsys: Any) -> None:
    """In one line, and nothing is written."""
    ranks = [] if to == "dcp" else ["--ranks", "2"]
    assert main([str(source), str(target), "--to", to, *ranks, "--no-progress", "--model", model]) == 2
    assert not target.exists() and not target.with_name(target.name + ".partial").exists()
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"^error: .*{message}", said), said


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
        r"raised OSError in line \d+ of .*_migrate_code.py: no such file: 'vocabulary.txt'; it is called",
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
        r"state_dict of the model raised RuntimeError in line \d+ of .*_code.py: no state yet;",
    ),
    "more parameters": (with_more, r"'model._flat_param' has 14 elements in .* make 20"),
}


@pytest.mark.parametrize("case", [*FUNCTIONS, "no such name"])
def test_functions(case: str, local_files: Path, tmp_path, capsys, monkeypatch):
    called, message = FUNCTIONS.get(case, (Net, "has no 'Net.__init__', expected a function"))
    monkeypatch.setattr(f"{__name__}.CALLED", called)
    name = "CALLED" if case in FUNCTIONS else "Net.__init__"
    assert_refused(local_files, tmp_path / "out", f"{__name__}:{name}", "dcp", message, capsys)


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
    assert_refused(tmp_path / "full.pt", tmp_path / "out", f"{__name__}:CALLED", "local", message, capsys)


def of(text: str) -> str:
    """A script, in which T stands for stock's package and S for ours."""
    return re.sub(r"\bT\b", "torch.distributed.fsdp", re.sub(r"\bS\b", "shardkit.legacy_fsdp_compat", text))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from T import StateDictType as Kind, CPUOffload\n", "from S import StateDictType as Kind, CPUOffload\n"),
        ("from T import (  # why\n    CPUOffload,\n)\n", "from S import (  # why\n    CPUOffload,\n)\n"),
        ("from T.wrap import ModuleWrapPolicy\n", "from S.wrap import ModuleWrapPolicy\n"),
        (
            "from T import StateDictType, fully_shard\n",
            "from S import StateDictType; from shardkit.core import fully_shard\n",
        ),
        ("from T import fully_shard\n", "from shardkit.core import fully_shard\n"),
        ("import T as fsdp\nfsdp.StateDictType\n", "import S as fsdp\nfsdp.StateDictType\n"),
        (
            "from torch.distributed import fsdp, rpc\n",
            "from torch.distributed import rpc; from shardkit import legacy_fsdp_compat as fsdp\n",
        ),
        ("import torch\nm = T.CPUOffload(m)\n", "import torch\nimport S\nm = S.CPUOffload(m)\n"),
        ("import torch.distributed as dist\ndist.barrier()\n", "import torch.distributed as dist\ndist.barrier()\n"),
        ("import T\ntorch.manual_seed(0)\n", "import torch, S\ntorch.manual_seed(0)\n"),
        ("import torch\nimport T\ntorch.manual_seed(0)\n", "import torch\nimport S\ntorch.manual_seed(0)\n"),
        (
            "import torch.distributed as dist\nm = dist.fsdp.CPUOffload(m)\n",
            "import torch.distributed as dist\nimport S\nm = S.CPUOffload(m)\n",
        ),
        (
            "import T as F\nF.fully_shard(m)\nF.wrap.wrap(m)\n",
            "import S as F\nimport shardkit.core\nshardkit.core.fully_shard(m)\nF.wrap.wrap(m)\n",
        ),
        ("import torch\nT.wrap.wrap(m)\n", "import torch\nimport S.wrap\nS.wrap.wrap(m)\n"),
        (
            "from T import *\nfully_shard(m)\n",
            "from S import *; from shardkit.core import fully_shard\nfully_shard(m)\n",
        ),
        (
            "from T.fully_sharded_data_parallel import StateDictType\n",
            "from S.fully_sharded_data_parallel import StateDictType\n",
        ),
    ],
)
def test_what_changes(before: str, after: str):
    written = of(after)
    ast.parse(written)
    for source in (of(before), written):
        assert rewrite(source).source == written


def test_what_a_person_must_decide():
    source = textwrap.dedent(
        """\
        from torch.distributed.fsdp import FlatParameter
        from torch.distributed.fsdp._runtime_utils import _lazy_init
        print(model._flat_param)
        torch.save(optimizer.state_dict(), "optim.pt")
        torch.save(model.state_dict(), "model.pt")
        with model.no_sync():
            model(x).sum().backward()
        """
    )
    found = rewrite(source).findings
    assert [one.line for one in found] == [1, 2, 3, 4, 6]
    words = ["FlatParameter", "private", "summon_full_params", "optim_state_dict", "optimizer.zero_grad() keeps"]
    for finding, word in zip(found, words, strict=True):
        assert word in finding.text


def test_writes_to_data_are_reported():
    source = textwrap.dedent(
        """\
        for p, q in zip(model.parameters(), ema.parameters()):
            p.data = q.data
            p.grad.data, done = clipped, True
            p.data.copy_(q)
            p.data += 1
            backup = p.data
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        class Data:
            def __init__(self, data):
                self.data = data
        """
    )
    result = rewrite(source)
    assert [one.line for one in result.findings] == [2, 3, 7]
    assert all("write in place" in one.text for one in result.findings)
    assert result.source == source


def test_names_that_ours_has_not_stay_and_are_reported():
    source = textwrap.dedent(
        """\
        import torch.distributed.fsdp as fsdp
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy, _or_policy
        fsdp.nonsense(model)
        torch.distributed.fsdp._runtime_utils.f(model)
        """
    )
    result = rewrite(source)
    assert [one.line for one in result.findings] == [2, 3, 4]
    for finding, name in zip(result.findings, ["_or_policy", "nonsense", "_runtime_utils"], strict=True):
        assert name in finding.text
    assert result.source.splitlines()[1:] == [
        (
            "from shardkit.legacy_fsdp_compat.wrap import ModuleWrapPolicy; "
            "from torch.distributed.fsdp.wrap import _or_policy"
        ),
        "fsdp.nonsense(model)",
        "torch.distributed.fsdp._runtime_utils.f(model)",
    ]


def test_the_command_for_scripts(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("from torch.distributed.fsdp import StateDictType\nx = model._handle\n")
    assert main(["script", str(script)]) == 0
    shown = capsys.readouterr()
    assert "-from torch.distributed.fsdp import StateDictType\n+from shardkit.legacy_fsdp_compat" in shown.out
    assert "train.py:2: ._handle: " in shown.err
    assert "torch" in script.read_text()
    assert main(["script", str(script), "--write"]) == 0
    assert script.read_text().startswith("from shardkit.legacy_fsdp_compat import StateDictType\n")
    script.write_text("def broken(:\n")
    assert main(["script", str(script)]) == 2
    assert "error:" in capsys.readouterr().err
