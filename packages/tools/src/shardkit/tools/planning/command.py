"""`shardkit plan`: ways to shard a model that fit a memory limit, fastest first, as code to paste."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from rich.console import Console

from shardkit.tools.estimating.command import costs_for, job_of, machine_of
from shardkit.tools.files import check_targets, json_text, write_text
from shardkit.tools.planning.code import code_of
from shardkit.tools.planning.search import NothingFits, Proposal, below, propose
from shardkit.tools.quantities import show
from shardkit.tools.terminal import grid, print_error, progress, terminal


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit plan`; the exit status is 1 if nothing fits. Raises `InputError`, and as `propose`."""
    check_targets(options.write, options.json)
    machine, job = machine_of(options), job_of(options)
    limit, margin = options.memory or machine.memory, options.margin / 100
    told: list[str] = []
    named = {name: getattr(options, name) for name in ("micro_batch", "most_micro_batch", "count")}
    try:
        with costs_for(options.machine, machine) as costs, progress("estimating ways to shard") as done:
            named |= {"margin": margin, "costs": costs, "tell": told.append, "progress": done}
            found = propose(job, options.world_size, machine, limit, **named)
    except NothingFits as error:
        print_error(str(error))
        return 1
    for text in told:
        terminal(stderr=True).print(text)
    _print(found, below(limit, margin), terminal())
    code = code_of(found[0])
    if options.write is not None:
        write_text(options.write, code)
    else:
        terminal().print(f"\n{code}", soft_wrap=True)
    if options.json is not None:
        write_text(options.json, json_text([_to_json(proposal) for proposal in found], indent=2))
    return 0


def _print(proposals: Sequence[Proposal], limit: str, console: Console) -> None:
    title = f"below {limit} a rank, fastest per sample first"
    table = grid("proposal", "memory", "step", "samples/s", "exposed", title=title)
    for proposal in proposals:
        line, samples = proposal.estimate.timeline, f"{1 / proposal.sample_seconds:.4g}"
        memory, step = show(proposal.estimate.reserved_bytes, "bytes"), show(line.step, "seconds")
        table.add_row(proposal.candidate.describe(), memory, step, samples, show(line.exposed, "seconds"))
    console.print(table)
    for reason in proposals[0].reasons:
        console.print(f"the first {reason}")
    for note in proposals[0].estimate.notes:
        console.print(f"note: {note}")


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
