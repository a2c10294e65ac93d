"""All rules, most costly finding first."""

from __future__ import annotations

from shardkit.tools.doctor import communication, memory, ranks
from shardkit.tools.doctor.facts import Facts
from shardkit.tools.doctor.finding import Finding
from shardkit.tools.report.schema import Report

__all__ = ["diagnose"]

_RULES = (
    ranks.late_rank,
    ranks.uneven_ranks,
    ranks.host_bound,
    ranks.slow_optimizer,
    communication.small_groups,
    communication.gathered_too_often,
    communication.gathered_again_at_once,
    communication.embeddings_gathered_for_backward,
    communication.prefetch_misses,
    communication.uncovered_groups,
    memory.buffers_that_double,
    memory.padding,
    memory.dominant_category,
)


def diagnose(report: Report) -> list[Finding]:
    """What every rule finds, by its share of the step or of the peak. Times in different findings may overlap.

    Raises:
        ValueError: for a report without steps: nothing can be put in proportion.
    """
    if not all(rank.steps for rank in report.ranks):
        raise ValueError(
            "the report holds no whole step of some rank; record at least one behind the warm-up, of a sharded model"
        )
    facts = Facts(report)
    return sorted((finding for rule in _RULES for finding in rule(facts)), key=lambda one: -one.share)
