"""The ranks of a run: joining them, and agreeing on errors so that none is left waiting for another."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from errors import UserError


def device_type(requested: str) -> str:
    """`cpu` or `cuda` for `--device`. Raises `UserError` for GPUs that are not there."""
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise UserError("--device cuda: PyTorch sees no GPU here; use --device cpu")
    return "cuda" if requested != "cpu" and available else "cpu"


def local_device(requested: str) -> torch.device:
    """This rank's device, made the current one."""
    if device_type(requested) == "cpu":
        return torch.device("cpu")
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise UserError(f"process {local} of this machine has no GPU: there are {gpus}; start fewer processes")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@contextmanager
def process_group() -> Iterator[None]:
    """Join the process group that torchrun describes, for the time of the block; gloo for the CPU, NCCL for GPUs."""
    # Two ranks on two cores gain nothing from more threads, and a fixed number of them keeps sums the same everywhere.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # torchrun gives one store to all attempts of a run. Without a prefix a process would look for its peers where those
    # of the attempt before had been.
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def failing_together() -> Iterator[None]:
    """A `UserError` that the block raises on any rank ends all with exit code 2, and rank 0 prints it. Collective."""
    mine: str | None = None
    try:
        yield
    except UserError as error:
        mine = str(error)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine)
    first = next((message for message in errors if message is not None), None)
    if first is None:
        return
    if dist.get_rank() == 0:
        print_error(first)
    # torchrun ends the other ranks as soon as one has failed: none may leave before rank 0 has printed.
    dist.all_reduce(torch.zeros(1))
    raise SystemExit(2)


def print_error(message: object) -> None:
    """The one line of a `UserError`."""
    print("train_lm: error:", " ".join(str(message).split()), file=sys.stderr, flush=True)


def total(values: Tensor) -> list[float]:
    """The sum over all ranks of each element, in fp64. Collective."""
    values = values.to(torch.float64)
    dist.all_reduce(values)
    result: list[float] = values.tolist()
    return result
