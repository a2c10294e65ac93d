"""Findings: what a report says is wrong with a run, what it costs, and what to change."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Literal

from shardkit.tools.files import InputError, check_targets, json_text, write_text
from shardkit.tools.quantities import Unit, show
from shardkit.tools.report.files import read_report
from shardkit.tools.report.measures import lateness, skew_by_rank, step_times, times_last
from shardkit.tools.report.schema import Collective, Operation, Report
from shardkit.tools.terminal import terminal


@dataclass(frozen=True)
class Finding:
    """`cost` is in seconds a step or in bytes; `share` is what that is of a step, or of the peak of memory.

    `rule` names the kind of finding, `seen` says what was measured, `change` what to do about it.
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
        unit: Unit = self.unit
        per = " a step" if self.unit == "seconds" else ""
        of = "of the step" if self.unit == "seconds" else "of the peak"
        return f"{show(self.cost, unit)}{per}, {self.share:.1%} {of}"


class Facts:
    """Sums over a report. Times are a step's."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.steps = max(1, report.run.recorded_steps)

    @cached_property
    def step(self) -> float:
        """Seconds of a step."""
        times = step_times(self.report)
        return max(statistics.median(times), 1e-9) if times else 1e-9

    @cached_property
    def peak(self) -> int:
        """Bytes of counted tensors at the peak of the rank that has most."""
        return max(1, *(rank.memory.peak for rank in self.report.ranks))

    @cached_property
    def root(self) -> str:
        """The root's name: the outermost module that runs forward."""
        for rank in self.report.ranks:
            spans = [span for span in rank.spans if span.phase == "forward"]
            if spans:
                return max(spans, key=lambda span: span.end - span.begin).fqn
        return ""

    @cached_property
    def gathers(self) -> dict[str, list[Collective]]:
        """The all-gathers of each group, by its label."""
        found: dict[str, list[Collective]] = defaultdict(list)
        for one in self.report.collectives:
            if one.kind == "all-gather":
                found[one.fqn].append(one)
        return found

    @cached_property
    def first_rank(self) -> list[Operation]:
        """The operations of the first rank, in the order of their start."""
        return self.report.ranks[0].operations

    def launch(self, fqn: str) -> float:
        """Seconds that the host of the first rank spent on starting a group's collectives."""
        return sum(one.launch for one in self.first_rank if one.fqn == fqn) / self.steps

    def exposed(self, fqn: str) -> float:
        """Seconds that were spent waiting for a group's collectives, not counting late ranks."""
        return sum(one.exposed - one.exposed_by_skew for one in self.report.collectives if one.fqn == fqn)


_LEAST_OF_RANK = 0.01


def late_rank(facts: Facts) -> Iterator[Finding]:
    """A rank that the others wait for, again and again; or ranks that wait for each other in turn."""
    report = facts.report
    waited, last = skew_by_rank(report), times_last(report)
    cost, met = max(waited.values()), sum(last.values())
    if len(report.ranks) < 2 or not met or cost < _LEAST_OF_RANK * facts.step:
        return
    rank, count = last.most_common(1)[0]
    if count >= max(0.7, 1.5 / len(report.ranks)) * met:
        yield Finding(
            "late-rank",
            "seconds",
            cost,
            cost / facts.step,
            f"rank {rank} ({_host(facts, rank)}) came last to {count} of "
            f"{met} collectives, {show(lateness(report)[rank], 'seconds')} after the first on average",
            "look at what only this rank does: its input pipeline, longer samples, logging or checkpoints, other load "
            "on its host, a slower device",
        )
        return
    yield Finding(
        "ranks-in-turn",
        "seconds",
        cost,
        cost / facts.step,
        f"ranks wait for each other, no rank in particular is late (last: {dict(sorted(last.items()))})",
        "balance the work of each step: pack samples to equal length, keep evaluation and logging alike on all ranks, "
        "and see that ranks do not share processor cores",
    )


def uneven_ranks(facts: Facts) -> Iterator[Finding]:
    """Modules whose dims do not divide, so that some ranks hold much more of them."""
    ranks = facts.report.ranks
    uneven: dict[str, float] = {}
    for module in dict.fromkeys(name for rank in ranks for name in rank.shard_bytes):
        # Stages of a pipeline hold different modules.
        held = [rank.shard_bytes[module] for rank in ranks if module in rank.shard_bytes]
        excess = max(held) - statistics.fmean(held)
        if excess > 0.1 * max(1.0, statistics.fmean(held)):
            uneven[module] = excess
    # Gradient and two states of an optimizer follow the shards.
    cost = 4 * sum(uneven.values())
    if cost < _LEAST_OF_RANK * facts.peak:
        return
    worst = max(uneven, key=lambda name: uneven[name])
    yield Finding(
        "uneven-shards",
        "bytes",
        cost,
        cost / facts.peak,
        f"the ranks' shards of {len(uneven)} modules differ in size by more than a tenth, most of '{worst}'; gradients "
        "and optimizer state differ with them",
        "choose a dim that the ranks divide, with shard_placement_fn=lambda p: Shard(1), or make the dim a multiple",
    )


def uneven_owners(facts: Facts) -> Iterator[Finding]:
    """Owners of whole parameters that step much longer than others: all ranks wait for them."""
    ranks = [rank for rank in facts.report.ranks if rank.steps]
    if not any(rank.owned for rank in ranks):
        return
    seconds = {rank.rank: statistics.fmean(step.optimizer for step in rank.steps) for rank in ranks}
    cost = max(seconds.values()) - statistics.fmean(seconds.values())
    if cost < _LEAST_OF_RANK * facts.step:
        return
    slowest = max(ranks, key=lambda rank: seconds[rank.rank])
    mean = statistics.fmean(sum(rank.owned.values()) for rank in ranks)
    largest = sorted((fqn for fqn, size in slowest.owned.items() if size), key=lambda fqn: -slowest.owned[fqn])
    yield Finding(
        "uneven-owners",
        "seconds",
        cost,
        cost / facts.step,
        f"the optimizer takes rank {slowest.rank} {show(seconds[slowest.rank], 'seconds')}, all ranks "
        f"{show(statistics.fmean(seconds.values()), 'seconds')} on average; it owns "
        f"{show(sum(slowest.owned.values()), 'bytes')} ({_some(largest) or 'nothing'}) where the mean is "
        f"{show(mean, 'bytes')}",
        "balance owners over the whole model: shard_placement_fn=shardkit.core.plan_owners(model, choose, cost=...), "
        "made before the first fully_shard, with the optimizer's cost of a matrix; or shard over fewer ranks (HSDP)",
    )


def host_bound(facts: Facts) -> Iterator[Finding]:
    """Starting communication takes the host long."""
    cost = max(sum(step.launch for step in rank.steps) / max(1, len(rank.steps)) for rank in facts.report.ranks)
    if cost < 0.05 * facts.step:
        return
    count = len(facts.first_rank) / facts.steps
    yield Finding(
        "launch",
        "seconds",
        cost,
        cost / facts.step,
        f"the host spends {show(cost, 'seconds')} a step on starting {count:.0f} collectives: packing small ones, "
        "copying gradients for other ranks",
        "use fewer, larger groups; a larger micro-batch makes the step longer and this share smaller",
    )


def slow_optimizer(facts: Facts) -> Iterator[Finding]:
    """The optimizer takes a large part of a step."""
    cost = max(statistics.fmean(step.optimizer for step in rank.steps) for rank in facts.report.ranks if rank.steps)
    if cost < 0.2 * facts.step:
        return
    yield Finding(
        "optimizer",
        "seconds",
        cost,
        cost / facts.step,
        f"the optimizer's steps take {show(cost, 'seconds')}",
        "fused=True, and shardkit.core.optimizer_step_on_shards(optimizer) if it is element-wise (as Adam is) and does "
        "not step on shards yet; a larger batch needs fewer steps",
    )


def _host(facts: Facts, number: int) -> str:
    return next(rank.place.host for rank in facts.report.ranks if rank.rank == number)


# Below this many bytes what a collective costs does not depend on its size.
_SMALL = 1 << 20
# What costs less than this share of a step is not worth a change.
_LEAST_OF_STEP = 0.005


def small_groups(facts: Facts) -> Iterator[Finding]:
    """Groups so small that starting their collectives costs more than the bytes that they move."""
    small = {
        one.fqn: one.bytes
        for one in facts.report.collectives
        if one.kind == "all-gather" and one.bytes < _SMALL and one.fqn != facts.root and ": " not in one.fqn
    }
    cost = sum(facts.launch(fqn) + facts.exposed(fqn) for fqn in small)
    if len(small) < 2 or cost < _LEAST_OF_STEP * facts.step:
        return
    names = _some(sorted(small))
    yield Finding(
        "small-group",
        "seconds",
        cost,
        cost / facts.step,
        f"{len(small)} groups hold less than {show(_SMALL, 'bytes')} each ({names}): too small for a transfer to "
        "overlap with anything",
        "call fully_shard on a module that contains several of them, or on a list of them: fully_shard([a, b])",
    )


def gathered_too_often(facts: Facts) -> Iterator[Finding]:
    """Groups that are gathered more than once for forward and once for backward."""
    for fqn, gathers in facts.gathers.items():
        times = sum(one.count for one in gathers) / facts.steps
        if times <= 2.05:
            continue
        cost = sum(one.exposed for one in gathers) * (times - 2) / times
        if cost < _LEAST_OF_STEP * facts.step:
            continue
        wire = sum(one.wire_bytes * one.count for one in gathers) / facts.steps * (times - 2) / times
        yield Finding(
            "gathered-often",
            "seconds",
            cost,
            cost / facts.step,
            f"'{fqn}' is gathered {times:.3g} times a step where twice would do: {show(wire, 'bytes')} more to send",
            "if its module is called several times, set_reshard_after_forward(False) on it; when accumulating "
            "gradients, set_reshard_after_backward(False) on the model for all micro-batches but the last",
        )


def gathered_again_at_once(facts: Facts) -> Iterator[Finding]:
    """The last module of forward: freed, and gathered again at once, as backward begins with it."""
    ran = [
        span.fqn
        for span in facts.report.ranks[0].spans
        if span.phase == "forward" and span.step == 0 and span.fqn != facts.root
    ]
    if not ran:
        return
    for one in facts.gathers.get(ran[-1], ()):
        if one.phase != "backward" or one.exposed < _LEAST_OF_STEP * facts.step:
            continue
        yield Finding(
            "gathered-at-once",
            "seconds",
            one.exposed,
            one.exposed / facts.step,
            f"'{one.fqn}' is the last module of forward: it is freed, and gathered again at once for backward",
            f"set_reshard_after_forward(False) on it; its {show(one.bytes, 'bytes')} are needed right after",
        )


def embeddings_gathered_for_backward(facts: Facts) -> Iterator[Finding]:
    """Embeddings, whose backward does not read their weight."""
    holders = {module.fqn: module.holders for module in facts.report.ranks[0].modules}
    for fqn, gathers in facts.gathers.items():
        kinds = holders.get(fqn, [])
        if not kinds or any(kind not in ("Embedding", "EmbeddingBag") for kind in kinds):
            continue
        for one in gathers:
            if one.phase != "backward" or one.exposed < _LEAST_OF_STEP * facts.step:
                continue
            yield Finding(
                "embedding",
                "seconds",
                one.exposed,
                one.exposed / facts.step,
                f"'{fqn}' holds an embedding only and is gathered again for backward, which does not read its weight: "
                f"a rank sends {show(one.wire_bytes, 'bytes')} for nothing",
                "set_unshard_in_backward(False) on it",
            )


def prefetch_misses(facts: Facts) -> Iterator[Finding]:
    """Modules whose gather was launched only when they needed it."""
    missed = {
        module.fqn: module.prefetch_misses / facts.steps
        for module in facts.report.ranks[0].modules
        if module.fqn != facts.root and module.prefetch_misses
    }
    cost = sum(_gather_exposed(facts, fqn) for fqn in missed)
    if not missed or cost < _LEAST_OF_STEP * facts.step:
        return
    yield Finding(
        "prefetch-miss",
        "seconds",
        cost,
        cost / facts.step,
        f"the gathers of {len(missed)} modules were launched when they were needed ({_some(sorted(missed))})",
        "if modules run in another order at each step, name what comes next with set_modules_to_forward_prefetch and "
        "set_modules_to_backward_prefetch; if large and small blocks alternate, set_prefetch_depth(2) on the root",
    )


def uncovered_groups(facts: Facts) -> Iterator[Finding]:
    """Groups whose prefetched gathers and reductions still make the rank wait: nothing is long enough to hide them."""
    missed = {module.fqn for module in facts.report.ranks[0].modules if module.prefetch_misses}
    waits = {
        fqn: facts.exposed(fqn)
        for fqn in dict.fromkeys(one.fqn for one in facts.report.collectives)
        if fqn not in missed and fqn != facts.root
    }
    cost = sum(waits.values())
    if not waits or cost < 0.05 * facts.step:
        return
    worst = sorted(waits, key=lambda fqn: -waits[fqn])
    yield Finding(
        "exposed",
        "seconds",
        cost,
        cost / facts.step,
        f"communication of {len(waits)} groups is not hidden by computation, most of {_some(worst)}",
        "give each rank more to compute per byte: a larger micro-batch, or accumulation with "
        "set_requires_gradient_sync(False); halve the bytes with MixedPrecisionPolicy(param_dtype=torch.bfloat16); or "
        "keep parameters from forward to backward with set_reshard_after_forward(False) where memory allows",
    )


def _gather_exposed(facts: Facts, fqn: str) -> float:
    gathers: list[Collective] = facts.gathers.get(fqn, [])
    return sum(one.exposed - one.exposed_by_skew for one in gathers)


def _some(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")


_LEAST_OF_PEAK = 0.02
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
    if not need or held < 2.2 * need or cost < _LEAST_OF_PEAK * facts.peak:
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
    if cost < _LEAST_OF_PEAK * facts.peak:
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


_RULES = (
    late_rank,
    uneven_ranks,
    uneven_owners,
    host_bound,
    slow_optimizer,
    small_groups,
    gathered_too_often,
    gathered_again_at_once,
    embeddings_gathered_for_backward,
    prefetch_misses,
    uncovered_groups,
    buffers_that_double,
    padding,
    dominant_category,
)


def diagnose(report: Report) -> list[Finding]:
    """What every rule finds, by its share of the step or of the peak. Times in different findings may overlap.

    Raises:
        InputError: for a report without steps: nothing can be put in proportion.
    """
    if not all(rank.steps for rank in report.ranks):
        raise InputError(
            "the report holds no whole step of some rank; record at least one behind the warm-up, of a sharded model"
        )
    facts = Facts(report)
    return sorted((finding for rule in _RULES for finding in rule(facts)), key=lambda one: -one.share)


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit doctor`."""
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
