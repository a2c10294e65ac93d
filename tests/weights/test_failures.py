"""Senders and receivers that end or stop at any step: the others keep a version as a whole, and go on."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from shardkit.weights import SendersClosed, WeightReceiver, WeightSender, coordinator, shared, targets_of, wire
from shardkit.weights.coordinator import Coordinator
from shardkit.weights.plan import plan
from tests.support.waiting import await_true
from tests.weights.processes import TIMEOUT, Cast, free_address

PAIR = {"world_size": 2, "bucket": 256}  # two senders share the work: both hold everything, and send several buckets


def state(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((40, 4), float(version)) for name in "abc"}


def set_to(values: dict[str, torch.Tensor], version: int) -> None:
    for one in values.values():
        one.fill_(version)


def send_two(pipe, address, rank, timeout):
    """Sends version 1 and 2 to two receivers and tells of each; waits to be killed."""
    values = state(1)
    pipe.send("there")
    with WeightSender(values, address, rank=rank, receivers=2, timeout=timeout, **PAIR) as one:
        for version in (1, 2):
            set_to(values, version)
            try:
                one.send(version)
                pipe.send(version)
            except ConnectionError as error:
                pipe.send(str(error))
        pipe.poll(TIMEOUT)


def send_again(pipe, address, rank):
    with WeightSender(state(3), address, rank=rank, receivers=2, timeout=TIMEOUT, **PAIR) as one:
        one.send(3)
        pipe.send(3)
        pipe.poll(TIMEOUT)


def receive_all(pipe, address, in_place, timeout, beat=None):
    """Tells of each version, and whether all values are of it."""
    wire._BEAT = beat or wire._BEAT
    there = state(0)
    with WeightReceiver(address, targets_of(there), in_place=in_place, timeout=timeout, name="other") as one:
        while True:
            pipe.send((one.receive(TIMEOUT), *visible(there)))


def visible(values: dict[str, torch.Tensor]) -> list[float]:
    return sorted({value for each in values.values() for value in each.unique().tolist()})


class Watched:
    """A receiver in this process, which a thread may have receive until some version; `seen` has what was visible."""

    def __init__(self, cast: Cast, name: str, timeout: float = TIMEOUT, **options: bool) -> None:
        self.values, self.seen = state(0), list[int]()
        self.receiver = cast.receiver(targets_of(self.values), timeout=timeout, name=name, **options)

    def until(self, last: int) -> None:
        while not self.seen or self.seen[-1] != last:
            version = self.receiver.receive()
            assert self.receiver.valid and self.receiver.version == version
            assert self.visible() == [version], version
            self.seen.append(version)

    def visible(self) -> list[float]:
        return visible(self.values)


# Messages that sender 1 sends for each version: its offer, and to the first of two receivers four buckets, and that
# these were all. The first is the hello to sender 0.
@pytest.mark.daily(step=[2, 3, 6, 8, 9, 13])
@pytest.mark.parametrize(
    ("shared", "step"),
    [*((True, one) for one in (2, 5, 8, 12)), *((False, one) for one in (1, 2, 3, 4, 6, 7, 8, 9, 12, 13))],
)
def test_a_sender_that_is_killed(shared, step, cast, monkeypatch):
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", str(int(shared)))
    values = state(1)
    mine = cast.sender(values, rank=0, receivers=2, timeout=8, **PAIR)
    watched = [Watched(cast, f"receiver {number}", in_place=number == 1) for number in range(2)]
    other = cast.other(send_two, 1, 8.0, shared=shared, stop_at=step)
    assert other.says() == "there"
    receiving = [cast.threads.submit(one.until, 3) for one in watched]
    taken = []
    with contextlib.suppress(ConnectionError, RuntimeError):
        for version in (1, 2):
            set_to(values, version)
            if mine.send(version).receivers:  # that the sender has ended may be seen at the receivers first
                taken.append(version)
    other.process.join(TIMEOUT)
    assert other.process.exitcode == -signal.SIGKILL
    cast.other(send_again, 1, shared=shared)
    set_to(values, 3)
    await_true(lambda: has_sent(mine, 3), "the new sender is there")
    for one in receiving:
        one.result(TIMEOUT)
    for one in watched:
        assert [version for version in one.seen if version != 3] == taken


# Its messages: hello; for each version that it waits, for each sender what it asks for, the first time after a hello,
# that it has all, that it has taken it. One that is not the last of the chain sends eight buckets to the next, and that
# these were all.
KILLS = [
    *((position, bool(position), True, step) for position in (0, 1) for step in (3, 6)),
    *((0, False, False, step) for step in (1, 2, 3, 5, 13, 14, 18)),
    *((1, True, False, step) for step in (2, 3, 4, 9, 13, 15)),
    *((2, in_place, False, step) for in_place in (True, False) for step in (2, 3, 6, 7, 8)),
]


@pytest.mark.daily(step=[2, 5, 6, 9, 14, 18])
@pytest.mark.parametrize(("position", "in_place", "shared", "step"), KILLS)
def test_a_receiver_that_is_killed_in_a_chain(position, in_place, shared, step, cast, monkeypatch):
    """The others get every version, also those behind it."""
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", str(int(shared)))
    values = state(1)
    senders = [cast.sender(values, rank=rank, timeout=TIMEOUT, **PAIR) for rank in range(2)]
    joined = senders[0]._coordinator._receivers

    def has_joined(name: str) -> bool:
        return name in [one.name for one in list(joined.values())]

    other, watched = None, []
    for number in range(3):
        if number == position:
            other = cast.other(receive_all, in_place, TIMEOUT, shared=shared, stop_at=step)
            await_true(lambda it=other: has_joined("other") or not it.process.is_alive())
        else:
            watched.append(Watched(cast, f"receiver {number}", in_place=in_place))
            await_true(lambda name=f"receiver {number}": has_joined(name))
    receiving = [cast.threads.submit(one.until, 4) for one in watched]
    failed = {}
    for version in range(1, 5):
        if version == 4:
            other.process.join(TIMEOUT)
            new = cast.other(receive_all, in_place, TIMEOUT, shared=shared)
            await_true(lambda: len(joined) == 3)
        set_to(values, version)
        reports = list(cast.threads.map(WeightSender.send, senders, [version] * 2))
        assert {one.receiver.name for one in watched} <= set(reports[0].receivers)
        assert reports[0].receivers == reports[1].receivers
        failed |= reports[0].failed
    assert new.says() == (4, 4.0)
    for one in receiving:
        one.result(TIMEOUT)
    assert [one.seen for one in watched] == [[1, 2, 3, 4]] * 2
    assert set(failed) <= {"other"}


@pytest.mark.daily(step=[1, 8, 10, 13])
@pytest.mark.parametrize("step", [1, 4, 8, 9, 10, 11, 13])
def test_sender_0_that_is_killed(step, cast):
    """Its messages: its own; to receivers the layout, that a version is offered and begins; to senders to go."""
    timeout = 2.0 if step == 1 else 8.0  # nobody has heard of it, and the other one waits as long
    watched = [Watched(cast, f"receiver {number}", in_place=number == 1) for number in range(2)]
    receiving = [cast.threads.submit(one.until, 3) for one in watched]
    zero = cast.other(send_two, 0, 8.0, stop_at=step)
    assert zero.says() == "there"
    values = state(1)
    one = cast.sender(values, rank=1, receivers=2, timeout=timeout, **PAIR)
    with contextlib.suppress(ConnectionError, TimeoutError):
        for version in (1, 2):
            set_to(values, version)
            one.send(version)
    zero.process.join(TIMEOUT)
    assert zero.process.exitcode == -signal.SIGKILL
    cast.other(send_again, 0)
    set_to(values, 3)
    await_true(lambda: has_sent(one, 3))
    for each in receiving:
        each.result(TIMEOUT)
    for each in watched:
        assert each.seen in ([3], [1, 3], [1, 2, 3])


def test_a_sender_that_is_killed_before_it_confirms_its_last_bucket(cast, monkeypatch):
    """Nobody takes it, neither the receiver that got it nor that to which this one passed it on."""
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", "0")
    monkeypatch.setattr(Coordinator, "_lose", lambda *_: None)  # it is on another host, and this is seen later
    watched = [Watched(cast, f"receiver {number}") for number in range(2)]
    receiving = [cast.threads.submit(one.receiver.receive, TIMEOUT) for one in watched]
    cast.other(send_two, 1, TIMEOUT, shared=False, stop_at=7)
    with WeightSender(state(1), cast.address, rank=0, receivers=2, timeout=TIMEOUT, **PAIR) as mine:
        assert mine.send(1).receivers == ()
        assert [one.visible() for one in watched] == [[0.0]] * 2
    for one in receiving:
        with pytest.raises(SendersClosed):
            one.result(TIMEOUT)


def has_sent(one: WeightSender, version: int) -> bool:
    with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
        return len(one.send(version).receivers) == 2
    return False


@pytest.mark.parametrize(
    ("position", "step", "in_place"), [(0, 2, False), (0, 4, True), (1, 5, True), (1, 5, False), (2, 3, True)]
)
def test_a_receiver_that_stops_is_left_behind(position, step, in_place, cast, monkeypatch):
    """It is not seen to have ended, and says nothing more."""
    beat, timeout = 0.1, 2.0
    monkeypatch.setattr(wire, "_BEAT", beat)
    one = cast.sender(state(1), timeout=timeout, receivers=3, bucket=256)
    watched = []
    for number in range(3):
        if number == position:
            cast.other(receive_all, in_place, timeout, beat, stop_at=step, stop_by=signal.SIGSTOP)
        else:
            watched.append(Watched(cast, str(number), in_place=in_place))
        await_true(lambda number=number: len(one._coordinator._receivers) > number)
    receiving = [cast.threads.submit(each.until, 1) for each in watched]
    report = one.send(1)
    for each in receiving:
        each.result(TIMEOUT)
    assert sorted(report.receivers) == [each.receiver.name for each in watched]
    assert report.failed.keys() == {"other"}


def interrupt(receiver: WeightReceiver) -> None:
    for task in asyncio.all_tasks(receiver._io.loop):
        if "WeightReceiver._take" in repr(task):
            receiver._io.loop.call_soon_threadsafe(task.cancel)


def hold(cast: Cast, one: WeightSender) -> threading.Event:
    """Nothing comes from a sender until this is set."""
    go = threading.Event()
    packed = one._packed
    one._packed = lambda *args: (go.wait(TIMEOUT), packed(*args))[1]
    cast.callback(go.set)
    return go


def test_a_receiver_that_gives_up_passes_on_nothing_more(cast):
    """A bucket that waits for memory when its receiver gives up would come from the bytes that it had before."""
    values, watched = state(1), []
    senders = [cast.sender(values, rank=rank, receivers=2, timeout=TIMEOUT, **PAIR) for rank in range(2)]
    for number in range(2):
        watched.append(Watched(cast, str(number)))
        await_true(lambda: len(senders[0]._coordinator._receivers) == len(watched))
    first, second = watched
    go = [hold(cast, one) for one in senders]
    sending = [cast.threads.submit(each.send, 1) for each in senders]
    receiving = cast.threads.submit(first.receiver._io.run, first.receiver._take(TIMEOUT))
    last = cast.threads.submit(second.until, 1)
    await_true(lambda: first.receiver._round is not None)
    free = first.receiver._free
    buckets = [first.receiver._io.run(free.get()) for _ in range(2)]
    go[0].set()
    await_true(lambda: free._getters)  # it is about to pass on the first bucket
    interrupt(first.receiver)
    with pytest.raises(CancelledError):
        receiving.result(TIMEOUT)
    for one in buckets:
        first.receiver._io.loop.call_soon_threadsafe(free.put_nowait, one)
    go[1].set()
    last.result(TIMEOUT)
    assert all(each.result(TIMEOUT).receivers == ("1",) for each in sending)


def pass_on_late(pipe, address):
    """A receiver that hands its first bucket on when it is told to, as after a stop; the next ones at once."""
    opened, late = shared.opened, [True]

    class Late:
        def __init__(self, memory):
            self.memory = memory

        def __getitem__(self, part):
            return Late(self.memory[part]) if late and late.pop() else self.memory[part]

        def copy_(self, data):
            data = data.clone()
            pipe.send("late")
            pipe.recv()
            self.memory.copy_(data)
            pipe.send("written")

    shared.opened = lambda place: None if (memory := opened(place)) is None else Late(memory)
    with WeightReceiver(address, targets_of(state(0)), timeout=TIMEOUT, name="late") as one:
        while True:
            one.receive()


def test_a_receiver_that_hands_on_late_does_not_write_into_a_later_version(cast, monkeypatch):
    """It writes when the receiver after it has all of the second version, and has not taken it yet."""
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", "1")
    values = state(1)
    one = cast.sender(values, receivers=2, delta=True, timeout=TIMEOUT, bucket=256)
    before = cast.other(pass_on_late)
    await_true(lambda: one._coordinator._receivers)
    there = Watched(cast, "there", timeout=1)
    await_true(lambda: len(one._coordinator._receivers) == 2)
    write = there.receiver._write

    def write_after_it(taken):
        before.pipe.send("go")
        assert before.says() == "written"
        write(taken)

    for version in (1, 2):
        set_to(values, version)
        sending = one.send(version, async_op=True)
        if version == 2:
            assert before.says() == "late"
            there.receiver._write = write_after_it
        there.until(version)
        assert set(sending.wait().receivers) == {"late", "there"}


def test_a_receiver_that_was_closed_is_not_waited_for(cast):
    one, receivers = cast.sender(state(1)), [cast.receiver(targets_of(state(0))) for _ in range(2)]
    await_true(lambda: len(one._coordinator._receivers) == 2)
    receivers[0].close()
    await_true(lambda: len(one._coordinator._receivers) == 1)


def test_an_interrupt_leaves_the_receiver_as_it_was(cast):
    """The version that was on its way is given up, and the next is received."""
    there, values = Watched(cast, "one", in_place=True), state(1)
    zero, one = (cast.sender(values, rank=rank, timeout=TIMEOUT, **PAIR) for rank in range(2))
    go = hold(cast, one)
    sending = [cast.threads.submit(each.send, 1) for each in (zero, one)]
    receiving = cast.threads.submit(there.receiver._io.run, there.receiver._take(TIMEOUT))
    await_true(lambda: there.visible() == [0.0, 1.0])  # a part has come
    assert not there.receiver.valid
    interrupt(there.receiver)
    last = cast.threads.submit(there.receiver.receive)  # at once: the version before is being given up
    with pytest.raises(CancelledError):
        receiving.result(TIMEOUT)
    go.set()
    for each in sending:
        assert "receive() was interrupted" in each.result(TIMEOUT).failed["one"]
    await_true(lambda: zero._coordinator._receivers)  # it has joined again
    set_to(values, 2)
    for each in [cast.threads.submit(each.send, 2) for each in (zero, one)]:
        assert each.result(TIMEOUT).receivers == ("one",)
    assert last.result(TIMEOUT) == 2
    assert there.visible() == [2.0]


def test_absent_peers_are_named(cast):
    receiver = cast.receiver(targets_of(state(0)), timeout=0.3)
    with pytest.raises(TimeoutError, match=r"no version within 0.3 s: waited for sender 0 to listen; .*read the"):
        receiver.receive()
    one = cast.sender(state(1), rank=0, timeout=0.5, **PAIR)
    with pytest.raises(RuntimeError, match=r"senders \[1\] have not called send\(1\) within 0.5 s"):
        one.send(1)
    with pytest.raises(TimeoutError, match="waited for the senders to send a version"):
        receiver.receive()
    with (
        WeightSender(state(1), free_address(), timeout=0.3, receivers=2) as one,
        pytest.raises(RuntimeError, match=r"0 receivers have joined within 0.3 s, expected at least 2"),
    ):
        one.send(1)
    with (
        WeightSender(state(1), free_address(), rank=1, timeout=0.3, **PAIR) as one,
        pytest.raises(TimeoutError, match="sender 1 has not reached sender 0"),
    ):
        one.send(1)


def test_a_receiver_that_does_not_receive_gets_the_next_version(cast):
    one, receiver = cast.sender(state(1), timeout=1), cast.receiver(targets_of(state(0)))
    with pytest.warns(UserWarning, match="has not called receive"):
        assert one.send(1).receivers == ()
    await_true(lambda: not receiver.offered)  # it is told beside the sender
    sending = one.send(2, async_op=True)
    await_true(lambda: receiver.offered)
    assert receiver.receive() == 2 and not receiver.offered
    assert sending.wait().failed == {}


def test_a_receiver_whose_time_is_up_while_it_is_planned_is_not_waited_for(cast, monkeypatch):
    """As with large models, whose plans take seconds; it lives, but does not call receive() again."""
    planning, go = threading.Event(), threading.Event()

    def slow(*args, **options):
        planning.set()
        assert go.wait(TIMEOUT)
        return plan(*args, **options)

    monkeypatch.setattr(coordinator, "plan", slow)
    one, receiver = cast.sender(state(1), timeout=10), cast.receiver(targets_of(state(0)))
    await_true(lambda: one._coordinator._receivers)
    receiving = cast.threads.submit(receiver.receive, 1)
    await_true(lambda: all(each.asks for each in one._coordinator._receivers.values()))
    sending = one.send(1, async_op=True)
    assert planning.wait(TIMEOUT)
    with pytest.raises(TimeoutError):
        receiving.result(TIMEOUT)
    go.set()
    assert sending._future.result(TIMEOUT).receivers == ()
    assert sending.wait().failed.keys() == {receiver.name}


def test_offered_may_be_asked_while_another_thread_begins_to_receive(cast, monkeypatch):
    """As by a server that generates in one thread and looks for versions in another."""
    say, asked, go = Coordinator._say, threading.Event(), threading.Event()

    async def late(self, connection, message):
        if message["op"] == "offered":
            asked.set()
            await asyncio.to_thread(go.wait, TIMEOUT)
        await say(self, connection, message)

    monkeypatch.setattr(Coordinator, "_say", late)
    one, receiver = cast.sender(state(1), timeout=10), cast.receiver(targets_of(state(0)), timeout=10)
    await_true(lambda: one._coordinator._receivers)
    looking = cast.threads.submit(lambda: receiver.offered)
    assert asked.wait(TIMEOUT)
    receiving = cast.threads.submit(receiver.receive)
    await_true(lambda: receiver._waiting)
    go.set()
    assert looking.result(TIMEOUT) is False
    assert one.send(1).receivers and receiving.result(TIMEOUT) == 1
    assert receiver._looking is None  # its question would wait for an answer that the other has taken


def wait_stopped(pipe, address):
    with WeightSender(state(1), address, timeout=TIMEOUT) as one:
        pipe.send("there")
        pipe.recv()
        os.kill(os.getpid(), signal.SIGSTOP)
        one.send(1)
        pipe.poll(TIMEOUT)


def test_nothing_is_offered_by_senders_that_are_stopped(cast):
    """A process that generates does not wait for them, and receives when they go on."""
    other, receiver = cast.other(wait_stopped), cast.receiver(targets_of(state(0)), timeout=TIMEOUT)
    assert other.says() == "there"
    await_true(lambda: not receiver.offered and receiver._control is not None)
    other.pipe.send("stop")
    await_true(lambda: Path(f"/proc/{other.process.pid}/stat").read_text().split()[2] == "T")
    looking = cast.threads.submit(lambda: [receiver.offered for _ in range(2)])
    assert looking.result(TIMEOUT / 2) == [False, False]
    os.kill(other.process.pid, signal.SIGCONT)
    assert receiver.receive() == 1


def test_a_version_that_waits_is_offered_to_a_receiver_that_joins(cast):
    one, first = cast.sender(state(1), timeout=10, receivers=2), cast.receiver(targets_of(state(0)))
    sending = one.send(1, async_op=True)
    late = cast.receiver(targets_of(state(0)))
    while not (first.offered and late.offered):
        assert not sending.done()
        time.sleep(0.01)
    assert list(cast.threads.map(WeightReceiver.receive, (first, late))) == [1, 1]


@pytest.mark.parametrize("other", [{"bucket": 512}, {"world_size": 3}, {"rank": 2}])
def test_senders_that_do_not_belong_together_are_refused(other, cast):
    cast.sender(state(1), rank=0, timeout=5, **PAIR)
    odd = cast.sender(state(1), timeout=5, **{"rank": 1, **PAIR, **other})
    with pytest.raises(RuntimeError, match=r"has \(world_size, bucket\) = .*; give all senders the same"):
        odd.send(1)


def test_versions_that_differ_are_refused(cast):
    senders = [cast.sender(state(1), rank=rank, timeout=20, **PAIR) for rank in range(2)]
    sending = [cast.threads.submit(one.send, version) for one, version in zip(senders, (1, 2), strict=True)]
    for one in sending:
        with pytest.raises(RuntimeError, match=r"offer different versions, by rank \{0: 1, 1: 2\}"):
            one.result()
