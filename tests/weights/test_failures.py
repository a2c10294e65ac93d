"""Senders and receivers that end or stop at any step: the others keep a version as a whole, and go on."""

import contextlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardkit.weights import WeightReceiver, WeightSender, targets_of
from tests.weights.processes import TIMEOUT, Other, free_address


def state(version: int) -> dict[str, torch.Tensor]:
    """Two senders share the work: both hold everything. Each sends several buckets."""
    return {name: torch.full((40, 4), float(version)) for name in "abc"}


def sender(rank: int, values: dict[str, torch.Tensor], address: str, receivers: int, timeout: float) -> WeightSender:
    return WeightSender(values, address, receivers=receivers, rank=rank, world_size=2, timeout=timeout, bucket=256)


def set_to(values: dict[str, torch.Tensor], version: int) -> None:
    for one in values.values():
        one.fill_(version)


def send_two(pipe, rank, address, receivers, timeout):
    """Sends version 1 and 2 and tells of each; waits to be killed."""
    values = state(1)
    pipe.send("there")
    with sender(rank, values, address, receivers, timeout) as one:
        for version in (1, 2):
            set_to(values, version)
            try:
                one.send(version)
                pipe.send(version)
            except ConnectionError as error:
                pipe.send(str(error))
        pipe.poll(TIMEOUT)


def send_again(pipe, rank, address):
    values = state(3)
    with sender(rank, values, address, 1, TIMEOUT) as one:
        one.send(3)
        pipe.send(3)
        pipe.poll(TIMEOUT)


def receive_all(pipe, address, in_place, timeout):
    """Tells of each version, and whether all values are of it."""
    there = state(0)
    with WeightReceiver(address, targets_of(there), in_place=in_place, timeout=timeout, name="other") as one:
        while True:
            pipe.send(
                (one.receive(TIMEOUT), *sorted({value for each in there.values() for value in each.unique().tolist()}))
            )


class Watched:
    """A receiver in this process, with a thread that receives until version 3; `seen` has what was visible."""

    def __init__(self, address: str, name: str, in_place: bool = False) -> None:
        self.values = state(0)
        self.receiver = WeightReceiver(address, targets_of(self.values), in_place=in_place, timeout=TIMEOUT, name=name)
        self.seen: list[int] = []
        self.errors: list[str] = []

    def until(self, last: int) -> None:
        while not self.seen or self.seen[-1] != last:
            try:
                version = self.receiver.receive()
            except ConnectionError as error:
                self.errors.append(str(error))
                assert not self.receiver.valid and self.receiver.version is None
                continue
            assert self.visible() == [version], version
            self.seen.append(version)

    def visible(self) -> list[float]:
        return sorted({value for each in self.values.values() for value in each.unique().tolist()})


# Messages that sender 1 sends for each version: its offer, for each of two receivers a hello and four buckets, and that
# it has sent. The first is the hello to sender 0.
@pytest.mark.parametrize(
    ("shared", "step"),
    [*((True, one) for one in (2, 5, 13, 14, 18)), *((False, one) for one in (1, 3, 4, 9, 13, 16, 22, 25))],
)
def test_a_sender_that_is_killed(shared, step, monkeypatch):
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", str(int(shared)))
    address = free_address()
    values = state(1)
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        mine = stack.enter_context(sender(0, values, address, 2, 8))
        watched = [Watched(address, f"receiver {number}", in_place=number == 1) for number in range(2)]
        for one in watched:
            stack.callback(one.receiver.close)
        other = stack.enter_context(Other(send_two, 1, address, 2, 8.0, shared=shared, stop_at=step))
        assert other.says() == "there"
        receiving = [threads.submit(one.until, 3) for one in watched]
        sent = []
        with contextlib.suppress(ConnectionError, RuntimeError):
            for version in (1, 2):
                set_to(values, version)
                mine.send(version)
                sent.append(version)
        other.process.join(TIMEOUT)
        assert other.process.exitcode == -signal.SIGKILL
        stack.enter_context(Other(send_again, 1, address, shared=shared))
        set_to(values, 3)
        while True:  # until the new sender is there
            with contextlib.suppress(ConnectionError, RuntimeError):
                assert set(mine.send(3).receivers) == {"receiver 0", "receiver 1"}
                break
        for one in receiving:
            one.result(TIMEOUT)
        for one in watched:
            assert [version for version in one.seen if version != 3] == sent
    assert watched[0].errors == [] and len(watched[1].errors) <= 1


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("in_place", [True, False])
def test_a_receiver_that_is_killed(step, in_place):
    """Its messages: hello; for each version that it waits, that it has all, that it has taken it."""
    address = free_address()
    values = state(1)
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        senders = [stack.enter_context(sender(rank, values, address, 1, TIMEOUT)) for rank in range(2)]
        watched = Watched(address, "receiver 0")
        stack.callback(watched.receiver.close)
        other = stack.enter_context(Other(receive_all, address, in_place, TIMEOUT, stop_at=step))
        joined = senders[0]._coordinator._receivers
        while len(joined) < 2 and other.process.is_alive():
            time.sleep(0.01)
        receiving = threads.submit(watched.until, 4)
        failed = {}
        for version in range(1, 5):
            if version == 4:
                other.process.join(TIMEOUT)
                new = stack.enter_context(Other(receive_all, address, in_place, TIMEOUT))
                while len(joined) < 2:
                    time.sleep(0.01)
            set_to(values, version)
            reports = list(threads.map(WeightSender.send, senders, [version] * 2))
            assert "receiver 0" in reports[0].receivers and reports[0].receivers == reports[1].receivers
            failed |= reports[0].failed
        assert new.says() == (4, 4.0)
        receiving.result(TIMEOUT)
    assert watched.seen == [1, 2, 3, 4]
    assert set(failed) <= {"other"} and all(
        "its process has ended" in one or "sender" in one for one in failed.values()
    )


@pytest.mark.parametrize("step", [2, 3])
def test_a_receiver_that_stops_is_left_behind(step):
    """At about the message that it waits, or that it has all. It is not seen to have ended, and says nothing more."""
    address = free_address()
    there = state(0)
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(WeightSender(state(1), address, timeout=8, receivers=2))
        receiver = stack.enter_context(WeightReceiver(address, targets_of(there), timeout=TIMEOUT, name="good"))
        stack.enter_context(Other(receive_all, address, False, TIMEOUT, stop_at=step, stop_by=signal.SIGSTOP))
        while len(one._coordinator._receivers) < 2:
            time.sleep(0.01)
        sending = one.send(1, async_op=True)
        assert receiver.receive() == 1 and all((each == 1).all() for each in there.values())
        report = sending.wait()
        assert report.receivers == ("good",) and report.failed.keys() == {"other"}


def test_absent_peers_are_named():
    address = free_address()
    with WeightReceiver(address, targets_of(state(0)), timeout=0.3) as receiver:
        with pytest.raises(TimeoutError, match=r"no version within 0.3 s: waited for sender 0 to listen; .*read the"):
            receiver.receive()
        with sender(0, state(1), address, 1, 0.5) as one:
            with pytest.raises(RuntimeError, match=r"senders \[1\] have not called send\(1\) within 0.5 s"):
                one.send(1)
            with pytest.raises(TimeoutError, match="waited for the senders to send a version"):
                receiver.receive()
    address = free_address()
    words = r"0 receivers have joined within 0.3 s, expected at least 2"
    with pytest.raises(RuntimeError, match=words), WeightSender(state(1), address, timeout=0.3, receivers=2) as one:
        one.send(1)
    with pytest.raises(TimeoutError, match="sender 1 has not reached sender 0"), sender(1, {}, address, 1, 0.3) as one:
        one.send(1)


def test_a_receiver_that_does_not_receive_gets_the_next_version():
    address = free_address()
    with WeightSender(state(1), address, timeout=1) as one, WeightReceiver(address, targets_of(state(0))) as receiver:
        with pytest.warns(UserWarning, match="has not called receive"):
            assert one.send(1).receivers == ()
        assert not receiver.offered
        sending = one.send(2, async_op=True)
        while not receiver.offered:
            time.sleep(0.01)
        assert receiver.receive() == 2 and not receiver.offered
        assert sending.wait().failed == {}


def test_versions_that_differ_are_refused():
    address = free_address()
    with (
        ThreadPoolExecutor() as threads,
        sender(0, state(1), address, 1, 20) as a,
        sender(1, state(1), address, 1, 20) as b,
    ):
        sending = [threads.submit(one.send, version) for one, version in ((a, 1), (b, 2))]
        for one in sending:
            with pytest.raises(RuntimeError, match=r"offer different versions, by rank \{0: 1, 1: 2\}"):
                one.result()
