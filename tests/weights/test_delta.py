"""Sending changes: the same to the last bit as the whole, in fewer bytes; the whole where changes would be wrong."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.weights import WeightReceiver, targets_of
from shardkit.weights.boxes import Piece, numel
from shardkit.weights.delta import apply, changes, update
from shardkit.weights.packing import Values, pack
from tests.weights.processes import TIMEOUT

WIRES = {  # by the dtype of a model: what it may be on the wire
    "float32": ["float32", "bfloat16", "float16"],
    "bfloat16": ["bfloat16", "float32"],
    "complex64": ["complex64"],
    "int8": ["int8"],
    "bool": ["bool"],
}
SHAPES = st.one_of(st.lists(st.integers(1, 20), max_size=3), st.just([3, 100_000]))  # of one block, or of several
SHARES = st.one_of(st.sampled_from([0.0, 0.01, 1.0]), st.floats(0, 1))


@st.composite
def parts(draw):
    """A sender's part of a tensor: its dtype in the model and on the wire, its shape, and the boxes that are wanted."""
    dtype, shape = draw(st.sampled_from(sorted(WIRES))), draw(SHAPES)
    boxes = [tuple(draw(st.tuples(st.integers(0, size - 1), st.integers(1, size))) for size in shape) for _ in range(2)]
    return dtype, draw(st.sampled_from(WIRES[dtype])), shape, [one for one in boxes if all(a < b for a, b in one)]


def some_values(dtype, shape):
    """Many of them are NaN, with different bits, and many are zero, with either sign."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    data = torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8)
    for these, value in [(data, 0), (data[..., -1:], -128), (data[..., -2:], -1)]:
        these[torch.rand(shape) < 0.2] = value
    return data.view(dtype).view(shape)


def bits(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


@settings(deadline=None)
@given(st.lists(parts(), min_size=1, max_size=3), SHARES, st.integers(0, 2**31))
def test_changes_turn_old_into_new_and_are_short(model, share, seed):
    torch.manual_seed(seed)
    source, changed, most, pieces = {}, {}, 0, []
    for number, (dtype, wire, shape, boxes) in enumerate(
        sorted(model, key=lambda one: -getattr(torch, one[1]).itemsize)
    ):
        name, whole = str(number), tuple((0, size) for size in shape)
        old = some_values(getattr(torch, dtype), shape)
        new = torch.where(torch.rand(shape) < share, some_values(old.dtype, shape), old)
        # As rows of a tensor: torch casts NaN of a tensor without dims to other bits.
        before, after = (one.view(-1).to(getattr(torch, wire)).view(shape) for one in (old, new))
        source[name] = [Values(whole, before.clone())]
        changed[name, whole] = update(source[name][0].tensor, new)
        assert torch.equal(bits(source[name][0].tensor), bits(after))
        for box in boxes:
            pieces.append((Piece(name, getattr(torch, wire), box, 0), Values(whole, before)))
            differ = [bits(Values(whole, one).of(box)).view(numel(box), -1) for one in (before, after)]
            most += int((differ[0] != differ[1]).any(1).sum()) * before.itemsize + -(-numel(box) // 8)
    wanted = [piece for piece, _ in pieces]
    there, here = (torch.empty(sum(one.nbytes for one in wanted), dtype=torch.uint8) for _ in range(2))
    pack(wanted, [source[one.name][0] for one in wanted], there)
    pack(wanted, [values for _, values in pieces], here)
    old, other = here.clone(), here.clone()
    found = changes(wanted, source, changed)
    if found is None:
        assert most >= there.numel()
        return
    told, data = found
    assert data.numel() <= min(most, there.numel() - 1)
    apply(told, data, wanted, here)
    assert torch.equal(here, there)
    other[torch.randint(len(other), ())] += 1  # of a receiver that has something else
    with contextlib.suppress(ConnectionError):
        apply(told, data, wanted, other)
        assert torch.equal(other, there)  # what was wrong there has changed
    if len(data):
        data[torch.randint(len(data), ())] += 1  # on the way
        with pytest.raises(ConnectionError, match="the checksum of the changes differs"):
            apply(told, data, wanted, old)


@pytest.mark.parametrize("way", ["sockets", "shared memory", "two hosts"])
def test_only_changes_are_sent_to_those_that_have_the_version_before(way, cast, monkeypatch):
    """The second receiver comes late, the third receives in place: the first passes the whole on to them.

    Through shared memory the whole is sent, unless a receiver of another host is behind in the chain.
    """
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", str(int(way != "sockets")))
    values = {"a": torch.randn(100, 100), "b": torch.randn(5000)}
    there = [{name: torch.zeros_like(one) for name, one in values.items()} for _ in range(3)]
    whole, changed = 60000, 400  # bytes: of all in float32; of fifty positions of four bytes and values
    sender = cast.sender(values, delta=True, timeout=TIMEOUT, bucket=7000)
    receivers = []

    def join(number):
        targets = targets_of(there[number])
        receivers.append(cast.receiver(targets, in_place=number == 2, timeout=TIMEOUT, name=str(number)))
        while len(sender._coordinator._receivers) < len(receivers):
            pass
        if way == "two hosts" and number:
            list(sender._coordinator._receivers.values())[-1].place["host"] = "localhost"

    def send(version):
        values["a"][version, :50] += 1
        sending = sender.send(version, async_op=True)
        receiving = [cast.threads.submit(one.receive) for one in receivers]
        assert [one.result(TIMEOUT) for one in receiving] == [version] * len(receivers)
        report = sending.wait()
        assert len(report.receivers) == len(receivers) and not report.failed
        return report.nbytes

    def are_equal():
        return all(torch.equal(one[name], values[name]) for one in there[: len(receivers)] for name in values)

    done, kept = WeightReceiver._done, list[str]()

    async def taken(self, found):
        kept.extend([self.name] * bool(found.changes))
        await done(self, found)

    monkeypatch.setattr(WeightReceiver, "_done", taken)
    for version, joining in enumerate([(0,), (), (1, 2), (), (), ()]):
        for number in joining:
            join(number)
        if version == 4:  # as if they had missed one
            receivers[0]._layout.holds = receivers[1]._layout.holds = receivers[0]._layout.holds - 1
        expected = {
            "sockets": [whole, changed, changed, changed, whole, changed],
            "shared memory": [whole] * 6,
            "two hosts": [whole, whole, whole, changed, whole, changed],  # nobody could use changes before
        }
        assert send(version) == expected[way][version]
        assert are_equal()
    if way == "shared memory":
        return
    receivers[0]._layout.staging[0].data[0] += 1  # as after an error of the memory
    assert send(6) > changed and are_equal()
    assert set(kept) <= {"0", "1"} and kept.count("0") == (way == "sockets") + 2, kept  # none for nobody
    assert send(7) and are_equal()  # whole where a transfer had failed, maybe from the receiver before
    assert send(8) == changed and are_equal()
