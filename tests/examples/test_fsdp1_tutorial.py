"""The FSDP1 script of examples/fsdp1_tutorial: the same losses on stock and, with its imports rewritten, on ours."""

import multiprocessing
import os
import re
import runpy
import sys
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch.distributed as dist

from shardkit.legacy_fsdp_compat.migrate.script import rewrite
from tests.support.pool import start_server
from tests.support.rank_process import end_with_the_server

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp1_tutorial" / "train.py"
LINE = re.compile(r"step (\d+): loss ([\d.]+), gradient norm ([\d.]+)")


def run(script: Path, directory: Path, *arguments: str) -> list[tuple[float, float]]:
    """Losses and gradient norms of a run on two ranks, which find each other as under torchrun.

    They are forked from the server of the rank pools: nearly all of the time under torchrun itself went into three
    processes that import torch. So torchrun itself is not covered.
    """
    start_server()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    outputs = [directory / f"{script.stem}-{rank}.txt" for rank in range(2)]
    for output in outputs:
        output.touch()  # a rank may die before it opens its own
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=run_rank, args=(rank, store.port, script, arguments, outputs[rank], sys.path))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    wait([rank.sentinel for rank in ranks], timeout=240)
    for rank in ranks:
        rank.join(timeout=60)
        rank.kill()
        rank.join()
    said = "".join(output.read_text() for output in outputs)
    assert [rank.exitcode for rank in ranks] == [0, 0], said
    return [(float(loss), float(norm)) for _, loss, norm in LINE.findall(said)]


def run_rank(rank: int, port: int, script: Path, arguments: tuple[str, ...], output: Path, path: list[str]) -> None:
    """Runs the script as one rank; its output goes to a file."""
    end_with_the_server()
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.chdir(output.parent)
    sys.path[:] = path
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [("--use-orig-params",), ("--strategy", "SHARD_GRAD_OP", "--bfloat16")],
    ids=" ".join,
)
def test_the_losses_are_those_of_stock(arguments: tuple[str, ...], tmp_path: Path):
    ours = tmp_path / "train_on_shardkit.py"
    result = rewrite(SCRIPT.read_text())
    assert result.findings == []
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
