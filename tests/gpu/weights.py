"""Weights from one process with a GPU to another: by NCCL in a group of the pair, or from the memory of one GPU."""

import os
import socket

import torch
import torch.distributed as dist

from shardkit.weights import WeightReceiver, WeightSender, devices, targets_of
from tests.gpu.worlds import Place, needs_gpu

_ELEMENTS, _BUCKET = 300_000, 1 << 18  # bytes: five buckets


def moved(place: Place, way: str) -> None:
    """Versions are equal to the last bit in the receiver, in place and beside the targets; `way` is "pair" or "IPC"."""
    if way == "IPC":
        needs_gpu()
    else:
        os.environ["SHARDKIT_SHARED_MEMORY"] = "0"  # or on a CPU nothing goes through the group
        # as if each had a GPU of its own
        devices.place_of = lambda device: {"host": devices.this_host(), "gpu": str(place.rank)}
    for in_place in (False, True):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            told = [f"tcp://127.0.0.1:{free.getsockname()[1]}"]
        dist.broadcast_object_list(told)
        values = torch.arange(float(_ELEMENTS), device=place.device)
        if place.rank == 0:
            with WeightSender({"w": values}, told[0], bucket=_BUCKET, timeout=30, rank=0, world_size=1) as sender:
                for version in range(3):
                    report = sender.send(version)
                    assert report.receivers and report.nbytes == values.nbytes, report
                    values.add_(1)
        else:
            there = {"w": torch.zeros_like(values)}
            with WeightReceiver(told[0], targets_of(there), in_place=in_place, timeout=30) as receiver:
                for version in range(3):
                    assert receiver.receive() == version
                    assert torch.equal(there["w"], values + version), (in_place, version)
                    if version < 2:  # the sender is still there
                        kinds = {type(one.link).__name__ for one in receiver._inlets.values()}
                        assert kinds == {"_OneGPU" if way == "IPC" else "_Pair"}, kinds
        dist.barrier()
