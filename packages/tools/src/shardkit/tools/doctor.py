"""Findings: problems that a report shows, their cost, and what to change."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Literal, NamedTuple

from shardkit.tools.files import InputError, check_targets, json_text, write_text
from shardkit.tools.quantities import show
from shardkit.tools.report.files import read_report
from shardkit.tools.report.measures import (
    exposed_by_rank,
    lateness,
    memory_in_use,
    owners,
    share_of_step,
    skew_by_rank,
    times_last,
)
from shardkit.tools.report.merge import TOGETHER
from shardkit.tools.report.schema import Collective, Report
from shardkit.tools.terminal import terminal


@dataclass(frozen=True)
class Finding:
    """`cost` is in seconds per step or in bytes; `share` is its part of a step, or of the peak of memory.

    `rule` names the kind of finding, `seen` says what was measured, `change` says what to do.
    """

    rule: str
    unit: Literal["seconds", "bytes"]
    cost: float
    share: float
    seen: str
    change: str

    @property
    def price(self) -> str:
        """The cost in words."""
        if self.unit == "seconds":
            return f"{show(self.cost, 'seconds')} a step, {self.share:.1%} of the step"
        return f"{show(self.cost, 'bytes')}, {self.share:.1%} of the peak"


# Memory is short if this part of it is in use: allocators need room for fragments, and steps differ.
_SHORT = 0.9


class Facts:
    """Sums over a report.

    Attributes:
        peak: bytes of counted tensors at the peak of the rank with the most.
        used, capacity: bytes of memory in use and in total, where least is free; 0 and 0 if not known.
        short: whether memory is the limit, so that no advice may take more of it. Also true if capacity is unknown: a
            run that lacks memory ends, a run that waits does not.
        first_rank: the rank to look at if all do the same.
        missed: modules whose gathers the first rank had to launch when it needed them.
        gathers: the all-gathers of each group, by its label.
        last: how often each rank came last to a collective that the ranks did not begin together.
        late: the rank that comes last to most collectives, if there is one.
        waited: seconds per step that the longest waiting rank waits for others.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.steps = max(1, report.run.recorded_steps)
        self.peak = max(1, *(rank.memory.peak for rank in report.ranks))
        self.used, self.capacity = memory_in_use(report)
        self.short = self.used >= _SHORT * self.capacity
        self.first_rank = report.ranks[0]
        self.missed = {module.fqn for module in self.first_rank.modules if module.prefetch_misses}
        self.gathers: dict[str, list[Collective]] = defaultdict(list)
        for one in report.collectives:
            if one.kind == "all-gather":
                self.gathers[one.fqn].append(one)
        self.last, ranks = times_last(report), len(report.ranks)
        met, (rank, count) = sum(self.last.values()), self.last.most_common(1)[0]
        self.late = rank if count >= max(0.7, 1.5 / ranks) * max(1, met) else None
        self.waited = max(skew_by_rank(report).values()) if met and ranks > 1 else 0.0

    @cached_property
    def root(self) -> str:
        """The root's name: the outermost module that runs forward."""
        for rank in self.report.ranks:
            spans = [span for span in rank.spans if span.phase == "forward"]
            if spans:
                return max(spans, key=lambda span: span.end - span.begin).fqn
        return ""

    @property
    def room(self) -> str:
        if not self.capacity:
            return "the report does not say how much memory there is"
        return f"{show(self.used, 'bytes')} of {show(self.capacity, 'bytes')} of memory are in use"

    def exposed(self, fqn: str) -> float:
        """Seconds spent waiting for a group's collectives, without the time spent waiting for late ranks."""
        return sum(one.exposed - one.exposed_by_skew for one in self.report.collectives if one.fqn == fqn)


class Seen(NamedTuple):
    """The finding of a rule: its cost in seconds per step or bytes, what was measured, and what to change.

    `spend` is a change that takes more memory for less time; it is advised only if memory is not short.
    """

    cost: float
    seen: str
    change: str = ""
    spend: str = ""


# -- ranks -------------------------------------------------------------------------------------------------------------


def late_rank(facts: Facts) -> Iterator[Seen]:
    """A rank that the others repeatedly wait for."""
    rank, last = facts.late, facts.last
    if rank is None:
        return
    host = next(one.place.host for one in facts.report.ranks if one.rank == rank)
    count = sum(one.count for one in facts.report.collectives)
    yield Seen(
        facts.waited,
        f"rank {rank} ({host}) came last to {last[rank]} of the {sum(last.values())} collectives ({count} in all) that "
        f"ranks began at least {show(TOGETHER, 'seconds')} apart, "
        f"{show(lateness(facts.report)[rank], 'seconds')} after the first on average",
        "look at what only this rank does: its input pipeline, longer samples, logging or checkpoints, other load "
        "on its host, a slower device",
    )


def ranks_in_turn(facts: Facts) -> Iterator[Seen]:
    """Ranks that wait for each other in turn."""
    if facts.late is None:
        often = ", ".join(f"rank {rank} {count} times" for rank, count in facts.last.most_common(4))
        yield Seen(
            facts.waited,
            f"ranks wait for each other, no rank in particular is late (came last: {often})",
            "balance the work of each step: pack samples to equal length, keep evaluation and logging alike on all "
            "ranks, and see that ranks do not share processor cores",
        )


def uneven_shards(facts: Facts) -> Iterator[Seen]:
    """Modules whose dims do not divide evenly, so that some ranks hold much larger parts of them."""
    ranks = facts.report.ranks
    uneven: dict[str, float] = {}
    for module in dict.fromkeys(name for rank in ranks for name in rank.shard_bytes):
        # Stages of a pipeline hold different modules.
        held = [rank.shard_bytes[module] for rank in ranks if module in rank.shard_bytes]
        excess = max(held) - statistics.fmean(held)
        if excess > 0.1 * max(1.0, statistics.fmean(held)):
            uneven[module] = excess
    if uneven:
        yield Seen(
            4 * sum(uneven.values()),  # gradient and two optimizer states have the size of the shards
            f"the ranks' shards of {len(uneven)} modules differ in size by more than a tenth, most of "
            f"'{_most(uneven)}'; gradients and optimizer state differ with them",
            "choose a dim that the ranks divide, with shard_placement_fn=lambda p: Shard(1), or make the dim a "
            "multiple",
        )


def uneven_owners(facts: Facts) -> Iterator[Seen]:
    """Owners of whole parameters whose optimizer step takes much longer: all ranks wait for them."""
    ranks = owners(facts.report)
    if not ranks:
        return
    mean = statistics.fmean(one.optimizer for one in ranks)
    slowest = max(ranks, key=lambda one: one.optimizer)
    yield Seen(
        slowest.optimizer - mean,
        f"the optimizer takes rank {slowest.rank} {show(slowest.optimizer, 'seconds')}, all ranks "
        f"{show(mean, 'seconds')} on average; it owns {show(slowest.bytes, 'bytes')} "
        f"({_some(slowest.owned) or 'nothing'}) where the mean is "
        f"{show(statistics.fmean(one.bytes for one in ranks), 'bytes')}",
        "balance owners over the whole model: shard_placement_fn=shardkit.core.plan_owners(model, choose, cost=...), "
        "made before the first fully_shard, with the optimizer's cost of a matrix",
        "shard over fewer ranks (HSDP)",
    )


# -- communication -----------------------------------------------------------------------------------------------------


def host_bound(facts: Facts) -> Iterator[Seen]:
    """The host spends long on starting communication."""
    cost = max(sum(step.launch for step in rank.steps) / len(rank.steps) for rank in facts.report.ranks)
    operations = facts.first_rank.operations
    yield Seen(
        cost,
        f"the host spends {show(cost, 'seconds')} a step on starting {len(operations) / facts.steps:.0f} "
        "collectives: packing small ones, copying gradients for other ranks",
        spend="use fewer, larger groups; a larger micro-batch makes the step longer and this share smaller",
    )


# Below this many bytes the cost of a collective does not depend on its size.
_SMALL = 1 << 20


def small_groups(facts: Facts) -> Iterator[Seen]:
    """Groups so small that starting their collectives costs more than moving their bytes."""
    small = {
        one.fqn: sum(op.launch for op in facts.first_rank.operations if op.fqn == one.fqn) / facts.steps
        + facts.exposed(one.fqn)
        for one in facts.report.collectives
        if one.kind == "all-gather" and one.bytes < _SMALL and one.fqn != facts.root and ": " not in one.fqn
    }
    if len(small) > 1:
        yield Seen(
            sum(small.values()),
            f"{len(small)} groups hold less than {show(_SMALL, 'bytes')} each ({_some(sorted(small))}): too small for "
            "a transfer to overlap with anything",
            "call fully_shard on a module that contains several of them, or on a list of them: fully_shard([a, b]); "
            "that takes little more memory",
        )


def gathered_too_often(facts: Facts) -> Iterator[Seen]:
    """Groups that are gathered more than once for forward and once for backward."""
    for fqn, gathers in facts.gathers.items():
        times = sum(one.count for one in gathers) / facts.steps
        if times <= 2.05:
            continue
        spare = (times - 2) / times
        wire = sum(one.wire_bytes * one.count for one in gathers) / facts.steps * spare
        yield Seen(
            sum(one.exposed for one in gathers) * spare,
            f"'{fqn}' is gathered {times:.3g} times a step where twice would do: {show(wire, 'bytes')} more to send",
            spend="if its module is called several times, set_reshard_after_forward(False) on it; when accumulating "
            "gradients, set_reshard_after_backward(False) on the model for all micro-batches but the last",
        )


def embeddings_gathered_for_backward(facts: Facts) -> Iterator[Seen]:
    """Embeddings, whose backward does not read their weight."""
    for module in facts.first_rank.modules:
        if not module.holders or not {"Embedding", "EmbeddingBag"}.issuperset(module.holders):
            continue
        for one in facts.gathers.get(module.fqn, ()):
            if one.phase == "backward":
                yield Seen(
                    one.exposed,
                    f"'{one.fqn}' holds an embedding only and is gathered again for backward, which does not read its "
                    f"weight: a rank sends {show(one.wire_bytes, 'bytes')} for nothing",
                    "set_unshard_in_backward(False) on it",
                )


def prefetch_misses(facts: Facts) -> Iterator[Seen]:
    """Modules whose gather was launched only when they needed it."""
    missed = sorted(facts.missed - {facts.root})
    gathers = [one for fqn in missed for one in facts.gathers.get(fqn, ())]
    yield Seen(
        sum(one.exposed - one.exposed_by_skew for one in gathers),
        f"the gathers of {len(missed)} modules were launched when they were needed ({_some(missed)})",
        "if modules run in another order at each step, name what comes next with set_modules_to_forward_prefetch and "
        "set_modules_to_backward_prefetch",
        "if large and small blocks alternate, set_prefetch_depth(2) on the root",
    )


def uncovered_groups(facts: Facts) -> Iterator[Seen]:
    """Groups whose prefetched gathers and reductions still make the rank wait: no computation is long enough."""
    groups = dict.fromkeys(one.fqn for one in facts.report.collectives)
    waits = {fqn: facts.exposed(fqn) for fqn in groups if fqn not in facts.missed and fqn != facts.root}
    yield Seen(
        sum(waits.values()),
        f"communication of {len(waits)} groups is not hidden by computation, most of "
        f"{_some(sorted(waits, key=lambda fqn: -waits[fqn]))}",
        "halve the bytes with MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        "give each rank more to compute per byte: a larger micro-batch, or accumulation with "
        "set_requires_gradient_sync(False); keep parameters from forward to backward with "
        "set_reshard_after_forward(False)",
    )


# -- memory ------------------------------------------------------------------------------------------------------------


_ADVICE = {
    "activations": "recompute them: torch.utils.checkpoint around blocks; or a smaller micro-batch with accumulation",
    "unsharded_parameters": "make the largest groups smaller (fully_shard on modules inside them), reshard them after "
    "forward, lower set_prefetch_depth",
    "optimizer": "more ranks, CPUOffloadPolicy, or an optimizer with less state",
    "gradients": "more ranks; reduce at each micro-batch rather than accumulate unsharded gradients",
}


def dominant_category(facts: Facts) -> Iterator[Seen]:
    """Memory is short, one category makes up most of the peak, and it can be reduced, mostly at a cost in time."""
    if not facts.short:
        return
    worst = max(facts.report.ranks, key=lambda rank: rank.memory.peak)
    memory = worst.memory
    name = _most(memory.peak_categories)
    if name in _ADVICE:
        where = f"in {memory.peak_phase} of '{memory.peak_module}'"
        what = name.replace("_", " ")
        waited = share_of_step(facts.report, max(exposed_by_rank(facts.report).values()))
        yield Seen(
            float(memory.peak_categories[name]),
            f"the peak ({show(facts.peak, 'bytes')} on rank {worst.rank}, {where}) is mostly {what}, and {facts.room}; "
            f"so no finding advises to spend memory on time, though {waited:.1%} of a step is spent waiting",
            _ADVICE[name],
        )


def _most(sizes: Mapping[str, float]) -> str:
    return max(sizes, key=lambda name: sizes[name])


def _some(names: Iterable[str]) -> str:
    found = [f"'{name}'" for name in names]
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")


# A cost below this share of a step is not worth a change.
_LEAST_OF_STEP = 0.005

# Name, unit of the cost, the share of a step or of the peak below which a finding is dropped, and the rule.
_RULES: tuple[tuple[str, Literal["seconds", "bytes"], float, Callable[[Facts], Iterator[Seen]]], ...] = (
    ("late-rank", "seconds", 0.01, late_rank),
    ("ranks-in-turn", "seconds", 0.01, ranks_in_turn),
    ("uneven-shards", "bytes", 0.01, uneven_shards),
    ("uneven-owners", "seconds", 0.01, uneven_owners),
    ("launch", "seconds", 0.05, host_bound),
    ("small-group", "seconds", _LEAST_OF_STEP, small_groups),
    ("gathered-often", "seconds", _LEAST_OF_STEP, gathered_too_often),
    ("embedding", "seconds", _LEAST_OF_STEP, embeddings_gathered_for_backward),
    ("prefetch-miss", "seconds", _LEAST_OF_STEP, prefetch_misses),
    ("exposed", "seconds", 0.05, uncovered_groups),
    ("peak", "bytes", 0.5, dominant_category),
)


def diagnose(report: Report) -> list[Finding]:
    """The findings of all rules: first those for the limiting resource (memory if short, else time), then the rest.

    Within each, larger shares of the step or the peak come first. Times of different findings may overlap. If memory is
    short, no advice takes more of it; otherwise none saves memory at a cost in time.

    Raises:
        InputError: if the report has no steps, so that shares cannot be computed.
    """
    if not all(rank.steps for rank in report.ranks):
        raise InputError(
            "the report holds no whole step of some rank; record at least one behind the warm-up, of a sharded model"
        )
    facts, findings = Facts(report), []
    for name, unit, least, find in _RULES:
        for one in find(facts):
            share = share_of_step(report, one.cost) if unit == "seconds" else one.cost / facts.peak
            if one.cost > 0 and share >= least:
                findings.append(Finding(name, unit, one.cost, share, one.seen, _advice(facts, one)))
    return sorted(findings, key=lambda one: ((one.unit == "bytes") != facts.short, -one.share))


def _advice(facts: Facts, seen: Seen) -> str:
    """The change to make, and what to spend free memory on."""
    if not seen.spend:
        return seen.change
    if facts.short:
        return seen.change or f"free memory first: the remedies need more ({facts.room})"
    return f"{'; '.join(filter(None, (seen.change, seen.spend)))} (that takes memory: {facts.room})"


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit doctor`. Raises `InputError` for an unwritable target, and as `read_report` and `diagnose`."""
    check_targets(options.json)
    findings = diagnose(read_report(options.report))
    if options.json is not None:
        write_text(options.json, json_text(findings, indent=2))
    console = terminal()
    if not findings:
        console.print("nothing found that is worth a change")
    for number, finding in enumerate(findings, 1):
        console.print(f"{number}. {finding.seen}")
        console.print(f"   costs {finding.price}", style="yellow")
        console.print(f"   change: {finding.change}")
    return 0
