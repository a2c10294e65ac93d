"""Planted faults: the checker must find that the engine forgets to wait, or to keep memory alive.

Every wait that the engine asks for, and every tensor that it holds for a program, is left out in turn, until some
configuration has a finding. Waits are known by the lines that ask for them, as the configurations run: a new one is
tested without being listed. Lines that hold memory are named below.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from shardkit.core.runtime import lanes
from tests.simulation.configurations import CONFIGURATIONS, check
from tests.simulation.races import Checker, Site, calling_site
from tests.simulation.training import Scenario

# A line that holds memory, and which of its tensors: "first", "last" or "middle"; "all" that a lane keeps alive.
Reference = tuple[Site, str]


def unneeded_waits() -> tuple[int, set[str]]:
    """How many waits the engine asks for, and those that can be left out without a finding."""
    places: dict[Site, list[Scenario]] = {}
    for configuration in CONFIGURATIONS:
        for site in check(configuration).waited_at:
            places.setdefault(site, []).append(configuration)

    def found(site: Site) -> bool:
        return any(check(one, Checker(lambda at: at == site, limit=1)).findings for one in places[site])

    return len(places), {site.functions for site in places if not found(site)}


def unneeded_references() -> tuple[int, set[str]]:
    """How many references keep memory alive for a program, and those that can be dropped without a finding."""
    places: dict[Reference, list[Scenario]] = {}
    for configuration in CONFIGURATIONS:
        seen: set[Reference] = set()
        with _dropping(lambda reference, seen=seen: bool(seen.add(reference))):  # type: ignore[misc, func-returns-value]
            check(configuration)
        for reference in seen:
            places.setdefault(reference, []).append(configuration)

    def found(reference: Reference) -> bool:
        with _dropping(lambda at: at == reference):
            return any(check(one, Checker(limit=1)).findings for one in places[reference])

    return len(places), {f"{which} of {site.functions}" for site, which in places if not found((site, which))}


@contextlib.contextmanager
def _dropping(drops: Callable[[Reference], bool]) -> Iterator[None]:
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
        yield
