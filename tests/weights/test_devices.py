"""The way from device to device, by a process group of the pair: gloo's here, where GPUs would have NCCL's."""

import os
import signal

import pytest
import torch

from shardkit.weights import WeightReceiver, WeightSender, devices, targets_of
from tests.weights.processes import TIMEOUT

BUCKET = 1 << 16  # bytes; the values have five buckets


def as_if_on_gpus() -> None:
    """Each process has a device of its own."""
    devices.place_of = lambda device: {"host": devices.this_host(), "gpu": str(os.getpid())}


def values(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(80_000.0) + version}


def send(pipe, address, receivers):
    as_if_on_gpus()
    state = values(0)
    with WeightSender(state, address, receivers=receivers, bucket=BUCKET, timeout=10) as sender:
        pipe.send("there")
        for version in range(1, 4):
            state["w"].add_(1)
            report = sender.send(version)
            pipe.send((sorted(report.receivers), report.nbytes))
        pipe.poll(TIMEOUT)


def receive(pipe, address, name, in_place, stop_at=0):
    """Tells of each version; stops in the middle of bucket `stop_at`."""
    as_if_on_gpus()
    there = values(-1)
    count, taken = 0, devices._Pair.receive

    def counted(self, told, data):
        nonlocal count
        count += 1
        if count == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        taken(self, told, data)

    devices._Pair.receive = counted
    with WeightReceiver(address, targets_of(there), in_place=in_place, timeout=10, name=name) as receiver:
        for _ in range(3):
            version = receiver.receive(TIMEOUT)
            pipe.send((version, torch.equal(there["w"], values(version)["w"]), count))


@pytest.mark.parametrize("in_place", [False, True])
def test_buckets_go_through_a_group_of_the_pair(in_place, cast):
    """Also those that a receiver passes on."""
    a, b = (cast.other(receive, name, in_place, shared=False) for name in "ab")
    sender = cast.other(send, 2, shared=False)
    assert sender.says() == "there"
    for version in range(1, 4):
        assert sender.says() == (["a", "b"], 320_000)
        said = a.says(), b.says()
        assert said == ((version, True, 5 * version),) * 2, said


@pytest.mark.parametrize("in_place", [False, True])
def test_a_receiver_that_is_killed_breaks_only_its_pair(in_place, cast):
    """It is the first or the last of the chain."""
    a = cast.other(receive, "a", in_place, 7, shared=False)
    b = cast.other(receive, "b", in_place, shared=False)
    sender = cast.other(send, 2, shared=False)
    assert sender.says() == "there"
    assert sender.says() == (["a", "b"], 320_000)
    said = a.says(), b.says()
    assert said == ((1, True, 5),) * 2, said
    for version in (2, 3):
        assert sender.says()[0] == ["b"]
        assert b.says()[:2] == (version, True)
    a.process.join(TIMEOUT)


def test_a_sender_that_is_killed_is_followed_by_another(cast):
    a = cast.other(receive, "a", False, shared=False)
    sender = cast.other(send, 1, stop_at=8, shared=False)  # in the middle of the buckets
    assert sender.says() == "there"
    sender.process.join(TIMEOUT)
    again = cast.other(send, 1, shared=False)
    assert [again.says(), again.says()] == ["there", (["a"], 320_000)]
    assert a.says()[:2] == (1, True)
