"""The backend's own collectives, for every backend but gloo on CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import torch_compat
from shardkit.core.runtime.slots import Slots

# What every backend gathers as it is. Other dtypes, and lists of several, travel as bytes.
PLAIN_DTYPES = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int32, torch.int64}


class C10dTransport:
    """All-gather and reduce-scatter of flat buffers with equal, padded slots.

    With `direct` (a backend that coalesces, NCCL) a list of buffers runs in place in one launch. Without it each call
    gets one buffer and goes through the plain collectives, which every backend has.

    Raises `NotImplementedError` from a call with several buffers when `direct` is false.
    """

    packs = True
    padded = True
    sums_locally = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, direct: bool) -> None:
        self.group = group
        self.device = device
        self.direct = direct
        self.rank = group.rank()
        self.world_size = group.size()
        # On a stream lane a blocking call only means "ordered on this stream" and saves a hop to another one.
        self._async = device.type == "cpu"

    def all_gather(self, buffers: Sequence[torch.Tensor], slots: Sequence[Slots]) -> Sequence[dist.Work]:
        outputs = list(buffers)
        dtypes = {output.dtype for output in outputs}
        if len(dtypes) > 1 or not dtypes <= PLAIN_DTYPES:
            outputs = [output.view(torch.uint8) for output in outputs]
        chunks = [output.numel() // self.world_size for output in outputs]
        inputs = [output.narrow(0, self.rank * chunk, chunk) for output, chunk in zip(outputs, chunks, strict=True)]
        if len(inputs) == 1:
            return _works(torch_compat.all_gather_flat(outputs[0], inputs[0], group=self.group, async_op=self._async))
        self._require_direct(len(inputs))
        return _works(torch_compat.all_gather_coalesced(self.group, outputs, inputs, self._async))

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: Any
    ) -> Sequence[dist.Work]:
        if len(inputs) == 1:
            call = torch_compat.reduce_scatter_flat
            return _works(call(outputs[0], inputs[0], op=op, group=self.group, async_op=self._async))
        self._require_direct(len(inputs))
        return _works(torch_compat.reduce_scatter_coalesced(self.group, list(outputs), list(inputs), op, self._async))

    def gather_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def reduce_buffer(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _require_direct(self, count: int) -> None:
        if not self.direct:
            raise NotImplementedError(f"{self.group.name()} cannot run {count} buffers in one launch; pack them")


def _works(work: dist.Work | None) -> Sequence[dist.Work]:
    return () if work is None else (work,)
