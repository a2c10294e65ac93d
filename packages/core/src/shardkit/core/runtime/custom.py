"""User-supplied communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core.events import StorageKind
from shardkit.core.policies import AllGather, ReduceScatter
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.storage import note_allocated


class CustomTransport(C10dTransport):
    """Packs everything and sends it through the user's object for gathers, or for reductions.

    Raises `ValueError` with the label and the size or dtype seen and expected, if `allocate` returns a different tensor
    than requested.
    """

    name = "custom"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        all_gather: AllGather | None = None,
        reduce_scatter: ReduceScatter | None = None,
    ) -> None:
        super().__init__(group, device, direct=False)
        self._gathering = all_gather
        self._reducing = reduce_scatter

    def all_gather(self, buffers: Sequence[torch.Tensor]) -> Sequence[dist.Work | None]:
        (buffer,) = buffers
        chunk = buffer.numel() // self.world_size
        own = buffer.narrow(0, self.rank * chunk, chunk)
        assert self._gathering is not None
        work = self._gathering(output_tensor=buffer, input_tensor=own, group=self.group, async_op=self._async)
        return (work,)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> Sequence[dist.Work | None]:
        (output,), (full,) = outputs, inputs
        assert self._reducing is not None
        work = self._reducing(output_tensor=output, input_tensor=full, group=self.group, op=op, async_op=self._async)
        return (work,)

    def buffer(self, numel: int, dtype: torch.dtype, label: str, kind: StorageKind) -> torch.Tensor:
        comm = self._reducing if self._gathering is None else self._gathering
        assert comm is not None, label
        buffer = comm.allocate((numel,), dtype=dtype, device=self.device)
        who = f"{label}: {type(comm).__name__}.allocate"
        if buffer.numel() != numel:
            raise ValueError(
                f"{who} returned {buffer.numel()} elements, expected {numel}; "
                "return a tensor with exactly the size that was asked for"
            )
        if buffer.dtype != dtype:
            raise ValueError(f"{who} returned {buffer.dtype}, expected {dtype}; use the dtype that was asked for")
        if not buffer.is_contiguous():
            raise ValueError(f"{who} returned strides {buffer.stride()}, expected a contiguous tensor")
        note_allocated(buffer, label, kind)
        return buffer.view(-1)
