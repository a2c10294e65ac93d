"""Planted faults: the checker must find that the engine forgets to wait, or to keep memory alive.

Every wait that the engine asks for, and every tensor that it holds for a program, is left out in turn, until some
configuration has a finding. Waits are known by the lines that ask for them, as the configurations run: a new one is
tested without being listed. Lines that hold memory are named below.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

from shardkit.core.runtime import lanes
from tests.simulation.configurations import CONFIGURATIONS, check
from tests.simulation.races import Checker, Site, calling_site

# A line that holds memory, and which of its tensors: "first", "last" or "middle"; "all" that a lane keeps alive.
Reference = tuple[Site, str]


class Undisturbed(NamedTuple):
    """A run of a configuration without a fault: its findings, its waits, and its references to memory."""

    findings: list[str]
    waits: Collection[Site]
    references: Collection[Reference]


@cache
def undisturbed(name: str) -> Undisturbed:
    held: set[Reference] = set()
    with _dropping(lambda reference: bool(held.add(reference)), limit=20) as checker:  # type: ignore[func-returns-value]
        check(CONFIGURATIONS[name], checker)
    return Undisturbed(list(checker.findings), checker.waited_at, held)


def unneeded_waits() -> tuple[int, set[str]]:
    """How many waits the engine asks for, and those that can be left out without a finding."""
    count, missed = _unneeded("waits", lambda site: contextlib.nullcontext(Checker(lambda at: at == site, limit=1)))
    return count, {site.functions for site in missed}


def unneeded_references() -> tuple[int, set[str]]:
    """How many references keep memory alive for a program, and those that can be dropped without a finding."""
    count, missed = _unneeded("references", lambda reference: _dropping(lambda at: at == reference))
    return count, {f"{which} of {site.functions}" for site, which in missed}


def _unneeded(kind: str, without: Callable[[Any], Any]) -> tuple[int, list[Any]]:
    """How many places there are, and those `without` which each configuration that has them finds nothing."""
    places: dict[Any, list[str]] = {}
    for name in CONFIGURATIONS:
        for place in getattr(undisturbed(name), kind):
            places.setdefault(place, []).append(name)

    def found(name: str, place: Any) -> bool:
        with without(place) as checker:
            return bool(check(CONFIGURATIONS[name], checker).findings)

    return len(places), [one for one, names in places.items() if not any(found(name, one) for name in names)]


@contextlib.contextmanager
def _dropping(drops: Callable[[Reference], bool], limit: int = 1) -> Iterator[Checker]:
    """Drops references for which `drops` is true, of tensors that programs hold or that a lane keeps alive for them."""
    hold, start = lanes.hold, lanes.StreamLane.start

    def hold_some(*tensors: Any) -> None:
        site = calling_site(1)
        places = ["first", *["middle"] * (len(tensors) - 2), "last"] if len(tensors) > 1 else ["first"]
        hold(*(tensor for tensor, place in zip(tensors, places, strict=False) if not drops((site, place))))

    def start_with_some(lane: Any, running: Any, label: str, keep_alive: Sequence[Any] = (), **given: Any) -> Any:
        if keep_alive and drops((calling_site(1), "all")):
            keep_alive = ()
        return start(lane, running, label, keep_alive, **given)

    with contextlib.ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("shardkit.") and getattr(module, "hold", None) is hold:
                patches.enter_context(mock.patch.object(module, "hold", hold_some))
        patches.enter_context(mock.patch.object(lanes.StreamLane, "start", start_with_some))
        yield Checker(limit=limit)
