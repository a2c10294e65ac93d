"""Rewriting of FSDP1 scripts: changed lines, unchanged lines and reports."""

import ast
import textwrap
from pathlib import Path

import pytest

from shardkit.legacy_fsdp_compat.migrate.command import main
from shardkit.legacy_fsdp_compat.migrate.script import rewrite


def changed(source: str) -> str:
    result = rewrite(textwrap.dedent(source))
    ast.parse(result.source)
    return result.source


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType\n",
            "from shardkit.legacy_fsdp_compat import FullyShardedDataParallel as FSDP, StateDictType\n",
        ),
        (
            "from torch.distributed.fsdp import (  # what we need\n    CPUOffload,\n    MixedPrecision,\n)\n",
            "from shardkit.legacy_fsdp_compat import (  # what we need\n    CPUOffload,\n    MixedPrecision,\n)\n",
        ),
        (
            "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n",
            "from shardkit.legacy_fsdp_compat.wrap import ModuleWrapPolicy\n",
        ),
        (
            "from torch.distributed.fsdp import StateDictType, fully_shard\n",
            "from shardkit.legacy_fsdp_compat import StateDictType; from shardkit.core import fully_shard\n",
        ),
        ("from torch.distributed.fsdp import fully_shard\n", "from shardkit.core import fully_shard\n"),
        (
            "import torch.distributed.fsdp as fsdp\nfsdp.StateDictType\n",
            "import shardkit.legacy_fsdp_compat as fsdp\nfsdp.StateDictType\n",
        ),
        (
            "from torch.distributed import fsdp, rpc\n",
            "from torch.distributed import rpc; from shardkit import legacy_fsdp_compat as fsdp\n",
        ),
        (
            "import torch\nmodel = torch.distributed.fsdp.FullyShardedDataParallel(model)\n",
            (
                "import torch\nimport shardkit.legacy_fsdp_compat\n"
                "model = shardkit.legacy_fsdp_compat.FullyShardedDataParallel(model)\n"
            ),
        ),
        ("import torch.distributed as dist\ndist.barrier()\n", "import torch.distributed as dist\ndist.barrier()\n"),
        (
            "import torch.distributed.fsdp\ntorch.manual_seed(0)\n",
            "import torch, shardkit.legacy_fsdp_compat\ntorch.manual_seed(0)\n",
        ),
        (
            "import torch\nimport torch.distributed.fsdp\ntorch.manual_seed(0)\n",
            "import torch\nimport shardkit.legacy_fsdp_compat\ntorch.manual_seed(0)\n",
        ),
        (
            "import torch.distributed as dist\nmodel = dist.fsdp.FullyShardedDataParallel(model)\n",
            (
                "import torch.distributed as dist\nimport shardkit.legacy_fsdp_compat\n"
                "model = shardkit.legacy_fsdp_compat.FullyShardedDataParallel(model)\n"
            ),
        ),
        (
            "import torch.distributed.fsdp as F2\nF2.fully_shard(m)\nF2.wrap.wrap(m)\n",
            (
                "import shardkit.legacy_fsdp_compat as F2\nimport shardkit.core\n"
                "shardkit.core.fully_shard(m)\nF2.wrap.wrap(m)\n"
            ),
        ),
        (
            "import torch\ntorch.distributed.fsdp.wrap.wrap(m)\n",
            "import torch\nimport shardkit.legacy_fsdp_compat.wrap\nshardkit.legacy_fsdp_compat.wrap.wrap(m)\n",
        ),
        (
            "from torch.distributed.fsdp import *\nfully_shard(m)\n",
            "from shardkit.legacy_fsdp_compat import *; from shardkit.core import fully_shard\nfully_shard(m)\n",
        ),
        (
            "from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType\n",
            "from shardkit.legacy_fsdp_compat.fully_sharded_data_parallel import StateDictType\n",
        ),
    ],
)
def test_what_changes(before: str, after: str):
    assert changed(before) == after
    assert changed(after) == after


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


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
