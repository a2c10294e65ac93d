"""Rewriting of FSDP1 scripts: changed lines, unchanged lines and reports."""

import ast
import re
import textwrap

import pytest

from shardkit.legacy_fsdp_compat.migrate.command import main
from shardkit.legacy_fsdp_compat.migrate.script import rewrite


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


def test_the_command(tmp_path, capsys):
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
