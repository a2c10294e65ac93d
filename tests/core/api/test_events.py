"""The hub: which listener gets which event; without a listener it is inactive."""

import pytest

from shardkit.core import events
from shardkit.core.events import Event, PrefetchHit, PrefetchMiss, StorageAllocated, StorageFreed


def test_a_listener_hears_every_event_until_closed() -> None:
    heard: list[Event] = []
    subscription = events.subscribe(heard.append)
    assert events.hub.active
    events.emit(PrefetchHit("a"))
    subscription.close()
    events.emit(PrefetchHit("b"))
    assert heard == [PrefetchHit("a")]
    assert not events.hub.active


def test_a_subscription_is_a_context_and_ends_with_an_exception() -> None:
    def listen_and_fail() -> None:
        with events.subscribe(lambda event: None):
            assert events.hub.active
            raise KeyError

    with pytest.raises(KeyError):
        listen_and_fail()
    assert not events.hub.active


def test_listeners_are_independent_and_ordered() -> None:
    order: list[str] = []
    first = events.subscribe(lambda event: order.append("first"))
    with events.subscribe(lambda event: order.append("second")):
        events.emit(PrefetchMiss("a"))
        first.close()
        first.close()
        assert events.hub.active
        events.emit(PrefetchMiss("a"))
    assert order == ["first", "second", "second"]


def test_events_of_two_kinds_differ() -> None:
    assert StorageAllocated("w", 4, "packed") != StorageFreed("w", 4, "packed")
    with pytest.raises(AttributeError):
        StorageAllocated("w", 4, "packed").bytes = 5  # type: ignore[misc]
