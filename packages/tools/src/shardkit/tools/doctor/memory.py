"""Rules about memory."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.tools.doctor.facts import Facts
from shardkit.tools.doctor.finding import Finding
from shardkit.tools.report.quantities import show

__all__ = ["buffers_that_double", "dominant_category", "padding"]

_LEAST = 0.02
_UNSHARDED = 3

_ADVICE = {
    "activations": "recompute them: torch.utils.checkpoint around blocks; or a smaller micro-batch with accumulation",
    "unsharded_parameters": "make groups smaller (fully_shard on more modules), leave reshard_after_forward at its "
    "default, lower set_prefetch_depth",
    "optimizer": "more ranks, CPUOffloadPolicy, or an optimizer with less state",
    "gradients": "more ranks; reduce at each micro-batch rather than accumulate unsharded gradients",
}


def buffers_that_double(facts: Facts) -> Iterator[Finding]:
    """More communication buffers at once than two reductions need: one under way while the next one is made."""
    sizes = {group: len(ranks.ranks) for group, ranks in enumerate(facts.report.groups)}
    reductions = [one for one in facts.first_rank if one.kind != "all-gather"]
    need = max((one.wire_bytes + one.bytes // sizes[one.group] for one in reductions), default=0)
    rank = facts.report.ranks[0]
    held = max(rank.memory.categories["communication"].values, default=0)
    cost = held - 2 * need
    if not need or held < 2.2 * need or cost < _LEAST * facts.peak:
        return
    yield Finding(
        "buffers",
        "bytes",
        cost,
        cost / facts.peak,
        f"communication buffers reach {show(held, 'bytes')} on rank {rank.rank}; two reductions at once, of the "
        f"largest group, need {show(2 * need, 'bytes')}: more are under way, or buffers of several sizes are kept",
        "make groups alike in size; keep set_reduce_scatter_max_input_buffers at 1; a peer that is late keeps buffers "
        "alive, so see to late ranks first",
    )


def padding(facts: Facts) -> Iterator[Finding]:
    """Memory and bytes for padding."""
    wasted: dict[str, int] = {}
    for one in facts.report.collectives:
        if one.kind == "all-gather":
            wasted[one.fqn] = max(wasted.get(one.fqn, 0), one.padding_bytes)
    # At most so many groups are unsharded at once, unless more is asked for: two blocks, and the root.
    cost = sum(sorted(wasted.values())[-_UNSHARDED:])
    if cost < _LEAST * facts.peak:
        return
    worst = max(wasted, key=lambda name: wasted[name])
    yield Finding(
        "padding",
        "bytes",
        cost,
        cost / facts.peak,
        f"the largest groups carry {show(cost, 'bytes')} of padding while they are unsharded, most in "
        f"'{worst}', as their first dim does not divide by the ranks",
        "shard another dim (shard_placement_fn), or round the size of the layer up",
    )


def dominant_category(facts: Facts) -> Iterator[Finding]:
    """One category makes up most of the peak, and something can be done about it."""
    worst = max(facts.report.ranks, key=lambda rank: rank.memory.peak)
    name, size = max(worst.memory.peak_categories.items(), key=lambda item: item[1])
    if name not in _ADVICE or size < 0.5 * facts.peak:
        return
    where = f"in {worst.memory.peak_phase} of '{worst.memory.peak_module}'"
    yield Finding(
        "peak",
        "bytes",
        float(size),
        size / facts.peak,
        f"the peak ({show(facts.peak, 'bytes')} on rank {worst.rank}, {where}) is mostly {name.replace('_', ' ')}",
        _ADVICE[name],
    )
