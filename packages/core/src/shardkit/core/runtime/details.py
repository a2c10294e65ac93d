"""What events of gathers and reductions tell beside the essentials."""

from __future__ import annotations

from typing import TypedDict

from shardkit.core.runtime.plan import GatherPlan, ReducePlan
from shardkit.core.runtime.transport import C10dTransport, PairwiseTransport, SharedTransport
from shardkit.core.runtime.transport.compressed import CompressedTransport

__all__ = ["Details", "details"]

_NAMES: dict[type, str] = {
    SharedTransport: "shared",
    PairwiseTransport: "pairwise",
    C10dTransport: "c10d",
    CompressedTransport: "compressed",
}


class Details(TypedDict):
    """The keyword fields of the events."""

    padding_bytes: int
    transport: str


def details(plan: GatherPlan | ReducePlan) -> Details:
    """The details of a plan's communication."""
    return Details(padding_bytes=plan.padding_nbytes, transport=_NAMES.get(type(plan.transport), "custom"))
