"""The FSDP1 script of examples/fsdp1_tutorial: the same losses on stock and, with its imports rewritten, on ours."""

import re
import sys
from pathlib import Path

import pytest

from shardkit.legacy_fsdp_compat.migrate.script import rewrite
from tests.trainers.launch import succeeded

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp1_tutorial" / "train.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)")


def run(script: Path, directory: Path, *arguments: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of a run on two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*torchrun, "--nproc-per-node=2", str(script), *arguments]
    printed = succeeded(command, directory).stdout
    return [(float(loss), float(norm)) for _, loss, norm in LINE.findall(printed)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("--use-orig-params",), ("--strategy", "SHARD_GRAD_OP", "--bfloat16")], ids=" ".join
)
def test_the_losses_are_those_of_stock(arguments: tuple[str, ...], tmp_path):
    ours = tmp_path / "train_on_shardkit.py"
    result = rewrite(SCRIPT.read_text())
    (finding,) = result.findings  # a word about no_sync(), whose gradients the script never drops
    assert "optimizer.zero_grad() keeps" in finding.text
    changed = [
        (before, after)
        for before, after in zip(SCRIPT.read_text().splitlines(), result.source.splitlines(), strict=True)
        if before != after
    ]
    assert all(before.startswith("from torch.distributed.fsdp") for before, _ in changed)
    assert all(after.startswith("from shardkit.legacy_fsdp_compat") for _, after in changed)
    ours.write_text(result.source)
    expected, seen = run(SCRIPT, tmp_path, *arguments), run(ours, tmp_path, *arguments)
    assert len(expected) == 10
    assert expected[-1][0] < expected[0][0]
    tolerance = 2e-2 if "--bfloat16" in arguments else 2e-5
    for step, (theirs, mine) in enumerate(zip(expected, seen, strict=True)):
        assert mine == pytest.approx(theirs, rel=tolerance), f"step {step}"
