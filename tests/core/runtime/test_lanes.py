"""Tickets on CPU: when a program moves, which memory stays alive, and how failures are reported."""

import weakref
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from shardkit.core import events
from shardkit.core.runtime.lanes import CpuLane, Program, StreamLane, hold, make_lane
from tests.support.heard import heard


def _work(error: Exception | None = None) -> mock.Mock:
    """Stands for a transfer, to see when it is waited for; real transfers are in the other tests."""
    return mock.Mock(wait=mock.Mock(side_effect=error))


def _program(log: list[str], *works: Sequence[mock.Mock]) -> Program:
    try:
        for step, batch in enumerate(works):
            log.append(f"launch {step}")
            yield batch
        log.append("end")
    finally:
        log.append("closed")


def test_a_cpu_lane_runs_to_the_first_yield_and_advances_by_one() -> None:
    log: list[str] = []
    first, second = _work(), _work()
    ticket = CpuLane("all-gather").start(_program(log, [first], [second]), "blocks.0")
    assert (log, first.wait.call_count, ticket.done) == (["launch 0"], 0, False)
    ticket.wait_for_stage()
    assert (log, first.wait.call_count, second.wait.call_count, ticket.done) == (["launch 0", "launch 1"], 1, 0, False)
    ticket.wait_for_stage()
    ticket.wait_for_stage()
    ticket.wait()
    ticket.wait()
    assert ticket.done
    assert log == ["launch 0", "launch 1", "end", "closed"]
    assert (first.wait.call_count, second.wait.call_count) == (1, 1)


def test_keep_alive_is_dropped_when_the_ticket_is_done() -> None:
    tensor = torch.ones(3)
    reference = weakref.ref(tensor)
    ticket = CpuLane("all-gather").start(_program([], [_work()]), "blocks.0", [tensor])
    del tensor
    assert reference() is not None
    ticket.wait()
    assert reference() is None


def test_a_failed_transfer_names_the_group_and_drains_its_siblings() -> None:
    log: list[str] = []
    bad, sibling = _work(OSError("peer left")), _work()
    ticket = CpuLane("all-gather").start(_program(log, [bad, sibling]), "blocks.0")
    with pytest.raises(RuntimeError, match=r"^blocks\.0: all-gather .*2 transfers.* failed: peer left") as error:
        ticket.wait()
    assert isinstance(error.value.__cause__, OSError)
    assert ticket.done
    assert sibling.wait.call_count == 1
    assert log[-1] == "closed"
    with pytest.raises(RuntimeError, match="failed: peer left"):  # its memory has no values, whoever asks
        ticket.wait()
    ticket.abandon()
    ticket.wait()


def _refuse(event: events.Event) -> None:
    if isinstance(event, events.Launched):
        raise LookupError("of the listener")


def test_an_error_of_a_listener_leaves_no_transfer_behind() -> None:
    """The caller frees the memory that transfers write to."""
    log: list[str] = []
    work = _work()
    with events.subscribe(_refuse), pytest.raises(LookupError, match="of the listener"):
        CpuLane("all-gather").start(_program(log, [work]), "blocks.0")
    assert work.wait.call_count == 1
    assert log == ["launch 0", "closed"]


def test_a_failing_program_names_the_group() -> None:
    def program(when: int) -> Program:
        if when == 0:
            raise OSError("no route")
        yield ()
        raise OSError("no memory")

    with pytest.raises(RuntimeError, match=r"^blocks\.0: launching all-gather failed: no route"):
        CpuLane("all-gather").start(program(0), "blocks.0")
    ticket = CpuLane("all-gather").start(program(1), "blocks.0")
    with pytest.raises(RuntimeError, match=r"^blocks\.0: all-gather .* failed: no memory"):
        ticket.wait_for_stage()
    assert ticket.done


def test_abandon_waits_ignores_errors_and_closes() -> None:
    log: list[str] = []
    bad, sibling = _work(OSError("peer left")), _work()
    ticket = CpuLane("all-gather").start(_program(log, [bad, sibling]), "blocks.0")
    ticket.abandon()
    assert ticket.done
    assert sibling.wait.call_count == 1
    assert log == ["launch 0", "closed"]
    ticket.abandon()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """A device module with a lane's stream and another one, for machines without streams."""
    device = mock.MagicMock()
    device.is_current_stream_capturing.return_value = False
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return device


def _calls(device: mock.MagicMock) -> list[str]:
    """The calls of streams' methods, in order; `Stream()` is the lane's, `current_stream()` the other one."""
    return [name for name, *_ in device.mock_calls if name.endswith(("_event", "__enter__", "__exit__", "program"))]


def test_a_stream_lane_times_what_it_runs_and_who_waits_for_somebody_who_listens(device: mock.MagicMock) -> None:
    def program() -> Program:
        hold(torch.ones(1))
        device.program()
        yield [_work()]
        device.program()

    lane = make_lane(torch.device("cuda:0"), "all-gather", priority=-1)
    assert isinstance(lane, StreamLane)
    with heard() as told:
        lane.start(program(), "blocks.0").wait()
    assert _calls(device) == [
        *("current_stream().record_event", "Stream().wait_event"),
        "Stream().record_event",  # the time
        *("stream().__enter__", "program", "program", "stream().__exit__"),
        *("Stream().record_event", "Stream().record_event"),
        *("current_stream().record_event", "current_stream().wait_event", "current_stream().record_event"),
    ]
    on_lane, elsewhere = device.Stream().record_event(), device.current_stream().record_event()
    launched, waited = told
    assert isinstance(launched, events.Launched)
    assert isinstance(waited, events.WaitFinished)
    assert launched.span == events.DeviceSpan(on_lane, on_lane)
    assert waited.span == events.DeviceSpan(elsewhere, elsewhere)
    assert (launched.fqn, waited.fqn, waited.operation) == ("blocks.0", "blocks.0", "all-gather")


def test_a_stream_lane_names_the_group_of_a_failure(device: mock.MagicMock) -> None:
    lane = make_lane(torch.device("cuda:0"), "all-gather")
    with pytest.raises(RuntimeError, match=r"^blocks\.0: launching all-gather failed: peer left"):
        lane.start(_program([], [_work(OSError("peer left"))]), "blocks.0")
    assert _calls(device)[-3:] == ["stream().__exit__", "Stream().record_event", "current_stream().wait_event"]
