"""Output of commands into a pipe: every row of a table, and every sentence, is on one line at its full width."""

from collections import OrderedDict
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from shardkit.tools import TrainingJob
from shardkit.tools.command import main
from shardkit.tools.report.files import write_report
from shardkit.tools.report.merge import merge
from tests.tools.synthetic import STEPS, operation, rank, record

LONG = "a_module_with_a_name_like_those_of_models_that_wrap_models_which_others_have_wrapped_before_them"


def wrapped() -> nn.Module:
    """A layer with a long name, and another one."""
    layers = OrderedDict({LONG: nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    return nn.Sequential(OrderedDict(layers=nn.Sequential(layers)))


JOB = TrainingJob(wrapped, partial(torch.ones, 2, 8))
_JOB = f"{__name__}:JOB"
_ESTIMATE = f"estimate {_JOB} --wrap Linear --json estimate.json"
_PLAN = f"plan {_JOB} --wrap Linear --world-size 16 --most-micro-batch 2"

# By command, parts of one row or sentence in their order.
ROWS = {
    _ESTIMATE: [
        ["all-gather", f"layers.{LONG}", "backward", "1", " B"],
        ["note: operators are those that torch runs on a CPU;", "may save other tensors"],
    ],
    _PLAN: [["dp_replicate 2 x dp_shard 8, micro-batch 2, prefetch 1, keep, recompute  2.0 GiB", "us"]],
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


def holds(line: str, parts: list[str]) -> bool:
    """Whether the parts stand in a line, in their order."""
    place = 0
    for part in parts:
        place = line.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_each_row_is_one_line_where_there_is_no_terminal(tmp_path, monkeypatch, capsys) -> None:
    waits = [operation(fqn=LONG, step=step, number=step, start=step / 10) for step in range(STEPS)]
    waits = [replace(one, end=one.start + one.exposed) for one in waits]
    ranks = [rank(number, waits, capacity=1 << 40) for number in (0, 1)]
    ranks = [replace(one, memory=replace(one.memory, peak_module=LONG)) for one in ranks]
    write_report(merge([record(one) for one in ranks]), tmp_path / "report.json")
    monkeypatch.chdir(tmp_path)
    for command, rows in ROWS.items():
        assert main(command.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        for parts in rows:
            assert any(holds(line, parts) for line in lines), (command, parts, lines)
