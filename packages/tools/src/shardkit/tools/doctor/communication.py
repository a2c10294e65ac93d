"""Rules about groups and their collectives."""

from __future__ import annotations

from collections.abc import Iterator

from shardkit.tools.doctor.facts import Facts
from shardkit.tools.doctor.finding import Finding
from shardkit.tools.report.quantities import show
from shardkit.tools.report.schema import Collective

__all__ = [
    "embeddings_gathered_for_backward",
    "gathered_again_at_once",
    "gathered_too_often",
    "prefetch_misses",
    "small_groups",
    "uncovered_groups",
]

# Below this many bytes what a collective costs does not depend on its size.
_SMALL = 1 << 20
# What costs less than this share of a step is not worth a change.
_LEAST = 0.005


def small_groups(facts: Facts) -> Iterator[Finding]:
    """Groups so small that starting their collectives costs more than the bytes that they move."""
    small = {
        one.fqn: one.bytes
        for one in facts.report.collectives
        if one.kind == "all-gather" and one.bytes < _SMALL and one.fqn != facts.root and ": " not in one.fqn
    }
    cost = sum(facts.launch(fqn) + facts.exposed(fqn) for fqn in small)
    if len(small) < 2 or cost < _LEAST * facts.step:
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
        if cost < _LEAST * facts.step:
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
        if one.phase != "backward" or one.exposed < _LEAST * facts.step:
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
            if one.phase != "backward" or one.exposed < _LEAST * facts.step:
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
    if not missed or cost < _LEAST * facts.step:
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
