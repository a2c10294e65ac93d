"""Padding that collectives send is zero: checks for NaN, and for memory that nobody wrote to, find nothing in it."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import CompressionPolicy
from shardkit.core.events import StorageKind
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.compressed.transport import CompressedTransport
from tests.core.runtime.cases import CASES, CPU, F32, chunk_of, flats_for, gather_plan, reduce_plan, run_reduce, whole
from tests.support import on_ranks


class _Noting(C10dTransport):
    """Notes the bytes that it would send, and sends nothing. Buffers are full of `garbage` at first."""

    def __init__(self, garbage: int, *, coalesces: bool) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD, CPU, coalesces=coalesces)
        self.garbage = garbage
        self.sent: list[bytes] = []

    def buffer(self, numel: int, dtype: torch.dtype, label: str, kind: StorageKind) -> torch.Tensor:
        return _fill(super().buffer(numel, dtype, label, kind), self.garbage)

    def all_gather(self, buffers: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        for buffer in buffers:
            self._note(buffer.view(self.world_size, -1)[self.rank])
        return ()

    def reduce_scatter(self, outputs: Any, inputs: Sequence[torch.Tensor], op: Any) -> Sequence[dist.Work]:
        for tensor in inputs:
            self._note(tensor)
        return ()

    def exchange(self, outgoing: torch.Tensor, *sizes: Any) -> Sequence[dist.Work]:
        self._note(outgoing)
        return ()

    def _note(self, tensor: torch.Tensor) -> None:
        self.sent.append(bytes(tensor.contiguous().view(torch.uint8).numpy()))


def _fill(tensor: torch.Tensor, garbage: int) -> torch.Tensor:
    tensor.view(torch.uint8).fill_(garbage)
    return tensor


def _sends(garbage: int, direct: bool, policy: CompressionPolicy | None) -> dict[str, list[bytes]]:
    """The bytes that this rank sends in a gather and a reduction of each case."""
    sent = {}
    for name, case in CASES.items():
        over = _Noting(garbage, coalesces=direct)
        transport = over if policy is None else CompressedTransport(over, policy)
        plan = gather_plan(case, transport)
        full = [whole(shape, dtype, i) for i, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True))]
        sources = [chunk_of(one, item.layout, plan.rank) for one, item in zip(full, plan.items, strict=True)]
        flats = [_fill(flat, garbage) for flat in flats_for(plan)]
        for _ in plan.transport.gather(plan, sources, flats):
            pass
        run_reduce(reduce_plan(case, transport, F32, F32), [one.float() for one in full])
        sent[name] = over.sent
    return sent


@on_ranks(3, 4)
def test_what_is_sent_does_not_depend_on_what_lay_in_memory(rank: int, world_size: int) -> None:
    int8 = CompressionPolicy(gather="int8", reduce="int8", block=32)
    for direct, policy in itertools.product((True, False), (None, int8)):
        first, second = (_sends(garbage, direct, policy) for garbage in (0x7F, 0xFF))  # both make NaNs
        assert sum(map(len, first.values())) > len(CASES)
        for name in CASES:
            assert first[name] == second[name], (name, direct, policy)
