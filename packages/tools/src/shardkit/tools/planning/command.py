"""`shardkit plan`: ways to shard a model that fit a memory limit, fastest first, as code to paste."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardkit.tools.estimating.command import add_job_arguments, bytes_of, costs_for, job_of, machine_named
from shardkit.tools.estimating.job import EstimateError, status_of
from shardkit.tools.estimating.tables import size, time
from shardkit.tools.planning.code import code_of
from shardkit.tools.planning.search import Proposal, below, propose
from shardkit.tools.report.files import check_targets, write_text

_DESCRIPTION = """\
Tries meshes (sharding over all ranks, or over hosts with replicas; tensor parallelism where there is a plan for it),
wrappings, reshard policies, recomputation, micro-batches and prefetching by number of groups and by bytes; estimates
each; and proposes those that stay below the limit, fastest per sample first.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or 1 after an error or if nothing fits."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shardkit plan", description=_DESCRIPTION)
    add_job_arguments(parser)
    parser.add_argument("--memory", help="limit for each rank, such as 80GiB (default: the machine's memory)")
    parser.add_argument("--micro-batch", type=int, help="samples of the smallest micro-batch (default: the job's own)")
    parser.add_argument("--most-micro-batch", type=int, help="and of the largest (default: eight times the smallest)")
    parser.add_argument(
        "--margin",
        type=float,
        default=6,
        help="per cent of the limit to keep free, for what estimates miss (default 6)",
    )
    parser.add_argument("--count", type=int, default=5, help="how many proposals (default 5)")
    parser.add_argument("--write", type=Path, help="writes the best proposal's code to this file")
    parser.add_argument("--json", type=Path, help="writes all proposals to this file")
    return parser


def _run(options: argparse.Namespace) -> int:
    if not options.world_size.isdigit():
        raise EstimateError(f"a plan chooses the mesh; expected --world-size as a number, got '{options.world_size}'")
    for name in ("count", "micro_batch", "most_micro_batch"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise EstimateError(f"--{name.replace('_', '-')} is {getattr(options, name)}; expected a number from 1 on")
    if chosen := [name for name in ("reshard", "prefetch_budget") if getattr(options, name) is not None]:
        raise EstimateError(f"a plan chooses --{chosen[0].replace('_', '-')} itself; leave it out")
    if not 0 <= options.margin < 100:
        raise EstimateError(f"--margin is {options.margin}; expected per cent, from 0 to less than 100")
    check_targets(options.write, options.json)
    machine = machine_named(options.machine)
    console, progress = Console(), Console(stderr=True)
    limit = bytes_of(options.memory) if options.memory else machine.memory
    with costs_for(options.machine, machine) as costs:
        found = propose(
            job_of(options),
            int(options.world_size),
            machine,
            limit,
            micro_batch=options.micro_batch,
            most_micro_batch=options.most_micro_batch,
            count=options.count,
            margin=options.margin / 100,
            costs=costs,
            progress=lambda text: progress.print(text, markup=False, highlight=False),
        )
    _print(found, below(limit, options.margin / 100), console)
    if options.write is not None:
        write_text(options.write, code_of(found[0]))
    else:
        sys.stdout.write(f"\n{code_of(found[0])}")
    if options.json is not None:
        write_text(options.json, json.dumps([_to_json(proposal) for proposal in found], indent=2) + "\n")
    return 0


def _print(proposals: Sequence[Proposal], limit: str, console: Console) -> None:
    table = Table(title=f"below {limit} a rank, fastest per sample first", box=None, pad_edge=False)
    for name in ("proposal", "memory", "step", "samples/s", "exposed"):
        table.add_column(name, justify="left" if name == "proposal" else "right")
    for proposal in proposals:
        line = proposal.estimate.timeline
        table.add_row(
            proposal.candidate.describe(),
            size(proposal.estimate.reserved_bytes),
            time(line.step),
            f"{1 / proposal.sample_seconds:.4g}",
            time(line.exposed),
        )
    console.print(table)
    for reason in proposals[0].reasons:
        console.print(f"the first {reason}", markup=False, highlight=False)
    for note in proposals[0].estimate.notes:
        console.print(f"note: {note}", markup=False, highlight=False)


def _to_json(proposal: Proposal) -> dict[str, object]:
    return {
        "choices": proposal.candidate.describe(),
        "micro_batch": proposal.candidate.micro_batch,
        "blocks": list(proposal.blocks),
        "sample_seconds": proposal.sample_seconds,
        "reasons": list(proposal.reasons),
        "code": code_of(proposal),
        "estimate": proposal.estimate.to_json(),
    }
