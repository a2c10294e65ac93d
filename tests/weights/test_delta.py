"""Sending changes: the same to the last bit as the whole, in fewer bytes; the whole where changes would be wrong."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.weights import WeightReceiver, WeightSender, targets_of
from shardkit.weights.boxes import Piece
from shardkit.weights.delta import apply, changes
from tests.weights.processes import TIMEOUT, free_address

SIZES = st.one_of(st.integers(1, 300), st.integers(500_000, 600_000))  # of less than a chunk, or of several
SHARES = st.one_of(st.floats(0, 1), st.floats(0, 0.05))


@settings(deadline=None)
@given(st.sampled_from(["float64", "float32", "bfloat16", "int8"]), SIZES, SHARES, st.integers(0, 2**31))
def test_changes_turn_old_into_new_and_are_short(dtype, numel, share, seed):
    torch.manual_seed(seed)
    piece = Piece("w", dtype, ((0, numel),), 0)
    size = piece.nbytes // numel
    old = torch.randint(0, 256, (piece.nbytes,), dtype=torch.uint8)
    new = old.clone()
    places = torch.randperm(numel)[: int(share * numel)]
    new.view(numel, size)[places] = torch.randint(0, 256, (len(places), size), dtype=torch.uint8)
    changed = int((new != old).view(numel, size).any(1).count_nonzero())
    kept = old.clone()
    found = changes([piece], new, kept)
    assert torch.equal(kept, new)
    if found is None:
        assert changed * size + numel / 8 >= piece.nbytes - 1
        return
    told, sent = found
    assert len(sent) <= changed * size + -(-numel // 8)
    before = old.clone()
    apply(told, torch.frombuffer(bytearray(sent), dtype=torch.uint8) if len(sent) else torch.empty(0).byte(), old)
    assert torch.equal(old, new)
    if changed:
        before[-1] += 1  # a receiver that has something else
        with pytest.raises(ConnectionError, match="the checksum of the changes differs"):
            apply(
                {**told, "checksum": told["checksum"] ^ 1}, torch.frombuffer(bytearray(sent), dtype=torch.uint8), before
            )


@pytest.mark.parametrize("shared", ["0", "1"])
def test_only_changes_are_sent_to_those_that_have_the_version_before(shared, monkeypatch):
    """The second receiver comes late, the third receives in place: the first passes the whole on to them."""
    monkeypatch.setenv("SHARDKIT_SHARED_MEMORY", shared)
    address = free_address()
    values = {"a": torch.randn(100, 100), "b": torch.randn(5000)}
    there = [{name: torch.zeros_like(one) for name, one in values.items()} for _ in range(3)]
    whole = 60000  # bytes in float32
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        sender = stack.enter_context(WeightSender(values, address, delta=True, timeout=TIMEOUT, bucket=7000))
        receivers = []
        for version, joining in enumerate([(0,), (1, 2), (), (), ()]):
            values["a"][version, :50] += 1
            for number in joining:
                targets = targets_of(there[number])
                one = WeightReceiver(address, targets, in_place=number == 2, timeout=TIMEOUT, name=str(number))
                receivers.append(stack.enter_context(one))
            while len(sender._coordinator._receivers) < len(receivers):
                pass
            if version == 3:  # as after an error of the memory
                receivers[0]._layout.staging.part(0, 0, 1)[0] += 1
            sending = sender.send(version, async_op=True)
            receiving = [threads.submit(one.receive) for one in receivers]
            assert [one.result(TIMEOUT) for one in receiving] == [version] * len(receivers)
            assert all(torch.equal(one[name], values[name]) for one in there[: len(receivers)] for name in values)
            report = sending.wait()
            assert len(report.receivers) == len(receivers) and not report.failed
            # Fifty positions of four bytes and values; all of it again where the checksum differs.
            assert (report.nbytes - 400 if version == 3 else report.nbytes) == [whole, 400, 400, whole, 400][version]
