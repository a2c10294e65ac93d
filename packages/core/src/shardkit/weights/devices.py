"""Buckets from GPU to GPU: through a process group of two members, or through CUDA IPC where both use one GPU.

Neither has run on a GPU yet; the tests run the process group on CPUs, with gloo. The receiver acknowledges each bucket
over the connection of both, which knows the secret; so the bucket is not filled again before, and the end of a process
is seen there. A process that dies breaks only its own pairs. NCCL knows no secret: its ports are open to strangers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from shardkit.weights.shared import this_host
from shardkit.weights.wire import Message

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def place_of(device: torch.device) -> Message | None:
    """Where tensors lie that a peer may reach from GPU to GPU; None if they do not lie on a GPU."""
    if device.type != "cuda":
        return None
    return {"host": this_host(), "gpu": str(torch.cuda.get_device_properties(device).uuid)}


def link_to(there: Message | None, device: torch.device, timeout: float) -> Link | None:
    """The way from tensors on `device` to those of a receiver; None if one of them is not on a GPU."""
    here = place_of(device)
    if here is None or there is None:
        return None
    if here["gpu"] != there["gpu"]:
        return _Pair(TCPStore("localhost", 0, is_master=True, wait_for_workers=False), 0, device, timeout)
    return _OneGPU(device) if here["host"] == there["host"] else None


def link_by(told: Message, host: str, device: torch.device, timeout: float) -> Link:
    """The receiver's end, by what the sender at a host tells with the first bucket."""
    if "port" not in told:
        return _OneGPU(device)
    return _Pair(TCPStore(host, told["port"], is_master=False, wait_for_workers=False), 1, device, timeout)


class _Pair:
    """A process group of two members: NCCL's, or on CPUs gloo's; made when the first bucket is sent."""

    def __init__(self, store: TCPStore, rank: int, device: torch.device, timeout: float) -> None:
        self.device = device
        self._store, self._rank, self._timeout = store, rank, timedelta(seconds=timeout)
        self._group: Any = None

    def told(self, data: torch.Tensor) -> Message:
        return {"port": self._store.port}

    def send(self, data: torch.Tensor) -> None:
        self._joined().send([data], 1, 0).wait()
        _synchronize(self.device)

    def receive(self, told: Message, data: torch.Tensor) -> None:
        self._joined().recv([data], 0, 0).wait()
        _synchronize(self.device)

    def _joined(self) -> Any:
        if self._group is None and self.device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # absent where torch has no CUDA

            torch.cuda.set_device(self.device)  # of this thread
            before = os.environ.get(_HANDLING)
            os.environ[_HANDLING] = "0"  # or a peer that dies would end this process too
            try:
                options = ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = ProcessGroupNCCL(self._store, self._rank, 2, options)
            finally:
                os.environ.pop(_HANDLING)
                os.environ |= {} if before is None else {_HANDLING: before}
        elif self._group is None:
            self._group = ProcessGroupGloo(self._store, self._rank, 2, self._timeout)
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()


class _OneGPU:
    """The receiver copies from the sender's memory; otherwise as `_Pair`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def told(self, data: torch.Tensor) -> Message:
        _synchronize(self.device)
        _, (_, _, _, offset, _, _, _, *handle) = reduce_tensor(data)
        ipc = [one.hex() if isinstance(one, bytes) else one for one in handle]
        return {"offset": offset, "ipc": ipc}

    def send(self, data: torch.Tensor) -> None:
        pass

    def receive(self, told: Message, data: torch.Tensor) -> None:
        handle = [bytes.fromhex(one) if isinstance(one, str) else one for one in told["ipc"]]
        look = (torch.Tensor, data.shape, (1,), told["offset"], torch.UntypedStorage, torch.uint8, self.device.index)
        data.copy_(rebuild_cuda_tensor(*look, *handle))
        _synchronize(self.device)

    def close(self) -> None:
        pass


Link = _Pair | _OneGPU
"""One end of the way between two processes."""


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
