"""`shardkit plan`: ways to shard a model that fit a memory limit, fastest first, as code or as a configuration."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from shardkit.tools.estimating.command import job_of, machine_of
from shardkit.tools.estimating.job import tokens_of
from shardkit.tools.files import check_targets, json_text, write_text
from shardkit.tools.planning.code import code_of
from shardkit.tools.planning.configurations import accelerate_of, torchtitan_of
from shardkit.tools.planning.search import NothingFits, Proposal, below, propose
from shardkit.tools.quantities import show
from shardkit.tools.terminal import grid, print_error, progress, terminal

ERROR = 0.02  # the median error of predicted times (docs/how-to/estimate.md), rounded up
_FORMATS = {"code": code_of, "accelerate": accelerate_of, "torchtitan": torchtitan_of}


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit plan`; the exit status is 1 if nothing fits. Raises `InputError`, and as `propose`."""
    check_targets(options.write, options.json)
    machine, job = machine_of(options), job_of(options)
    limit, margin = options.memory or machine.memory, options.margin / 100
    told: list[str] = []
    names = "micro_batch", "most_micro_batch", "count", "global_batch"
    named: dict[str, Any] = {name: getattr(options, name) for name in names}
    try:
        with progress("estimating ways to shard") as done:
            named |= {"margin": margin, "error": ERROR, "tell": told.append, "progress": done}
            found = propose(job, options.world_size, machine, limit, **named)
    except NothingFits as error:
        print_error(str(error))
        return 1
    for text in told:
        terminal(stderr=True).print(text)
    _print(found, below(limit, margin), "tokens" if tokens_of(job) else "samples", terminal())
    code = _FORMATS[options.format](found[0])
    if options.write is not None:
        write_text(options.write, code)
    else:
        terminal().print(f"\n{code}", soft_wrap=True)
    if options.json is not None:
        write_text(options.json, json_text([_to_json(proposal) for proposal in found], indent=2))
    return 0


def _print(proposals: Sequence[Proposal], limit: str, what: str, console: Console) -> None:
    title = f"below {limit} a rank, fastest per sample first; each differs by more than {ERROR:.0%}"
    table = grid("proposal", "memory", "step", f"{what}/s/GPU", "MFU", "exposed", title=title)
    for proposal in proposals:
        memory, step = show(proposal.nbytes, "bytes"), show(proposal.step_seconds, "seconds")
        mfu = "-" if proposal.mfu is None else show(proposal.mfu, "share")
        exposed = show(proposal.estimate.timeline.exposed, "seconds")
        table.add_row(proposal.candidate.describe(), memory, step, f"{proposal.rate:.4g}", mfu, exposed)
    console.print(table)
    for reason in proposals[0].reasons:
        console.print(f"the first: {reason}")
    for note in proposals[0].estimate.notes:
        console.print(f"note: {note}")


def _to_json(proposal: Proposal) -> dict[str, object]:
    return {
        "choices": proposal.candidate.describe(),
        "micro_batch": proposal.candidate.micro_batch,
        "blocks": list(proposal.blocks),
        "accumulate": proposal.accumulate,
        "step_seconds": proposal.step_seconds,
        "sample_seconds": proposal.sample_seconds,
        "mfu": proposal.mfu,
        "reasons": list(proposal.reasons),
        "code": code_of(proposal),
        "estimate": proposal.estimate.to_json(),
    }
