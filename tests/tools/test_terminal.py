"""Output of commands into a pipe: every row of a table, and every sentence, is on one line at its full width."""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit.tools import TrainingJob
from shardkit.tools.report.files import write_report
from shardkit.tools.report.merge import merge
from tests.tools.synthetic import STEPS, operation, rank, record

LONG = "a_module_with_a_name_like_those_of_models_that_wrap_models_which_others_have_wrapped_before_them"


class Wrapped(nn.Module):
    """A layer with a long name, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({LONG: nn.Linear(8, 8), "other": nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["other"](self.layers[LONG](x))


JOB = TrainingJob(Wrapped, partial(torch.ones, 2, 8))
_JOB = f"{__name__}:JOB"
_ESTIMATE = f"estimate {_JOB} --wrap Linear --json estimate.json"
_PLAN = f"plan {_JOB} --wrap Linear --world-size 16"

# By command, parts of one row or sentence in their order.
ROWS = {
    _ESTIMATE: [
        ["all-gather", f"layers.{LONG}", "backward", "1", " B"],
        ["note: operators are those that torch runs on a CPU;", "may save other tensors"],
    ],
    _PLAN: [["dp_replicate 2 x dp_shard 8, micro-batch 16, prefetch 1, keep, recompute  2.0 GiB", "ms", "us"]],
    "report report.json": [
        [LONG, "all-gather, forward", "10.0 ms", "GB/s"],
        ["profiler_overhead", "the time that recording took, as a share of the recorded time"],
        ["memory at the peak: rank 0, in forward of", LONG],
    ],
    "report report.json --estimate estimate.json": [["at the peak: sharded_parameters", " B", "MiB", "%"]],
    "report report.json report.json": [["profiler_overhead", "+0.0%"]],
    "doctor report.json": [
        ["1. communication of 1 groups is not hidden by computation, most of", LONG],
        ["   change: halve the bytes", "MixedPrecisionPolicy", "(that takes memory"],
    ],
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each command writes into a pipe."""
    directory = tmp_path_factory.mktemp("piped")
    waits = [operation(fqn=LONG, step=step, number=step, start=step / 10) for step in range(STEPS)]
    waits = [replace(one, end=one.start + one.exposed) for one in waits]
    ranks = [rank(number, waits, capacity=1 << 40) for number in (0, 1)]
    ranks = [replace(one, memory=replace(one.memory, peak_module=LONG)) for one in ranks]
    write_report(merge([record(one) for one in ranks]), directory / "report.json")
    commands = [command.split() for command in ROWS]
    code = f"""if True:
        import os, sys
        sys.path.insert(0, {str(Path.cwd())!r})
        from shardkit.tools.command import main
        os.chdir({str(directory)!r})
        for words in {commands}:
            assert main(words) == 0
            print(chr(0))
    """
    out = subprocess.run([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, check=True).stdout
    return dict(zip(ROWS, (part.splitlines() for part in out.split("\0")), strict=False))


@pytest.mark.parametrize(("command", "parts"), [(command, parts) for command in ROWS for parts in ROWS[command]])
def test_each_row_is_one_line_over_a_pipe(printed: dict[str, list[str]], command: str, parts: list[str]) -> None:
    def holds(line: str) -> bool:
        place = 0
        for part in parts:
            place = line.find(part, place)
            if place < 0:
                return False
            place += len(part)
        return True

    assert any(holds(line) for line in printed[command]), "\n".join(printed[command])
