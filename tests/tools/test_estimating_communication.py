"""Communication that a training step starts itself, beside core's: counted under its own kind, with its bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from shardkit.tools import TrainingJob, estimate_job, preset
from shardkit.tools.estimating.trace import Awaited, Transfer

RANKS = 4


def _parts(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=dtype) for size in sizes]


def _waited(begin: Callable[[Any], Any]) -> Callable[[], None]:
    """A functional collective over all ranks, and the wait for each of its results."""

    def communicate() -> None:
        tensors = [functional.wait_tensor(one) for one in reversed(begin(dist.group.WORLD))]
        assert all(one.numel() for one in tensors)

    return communicate


_FOUR = (6, 6, 6, 6)
# Each is about tensors of 8 and 16 numbers in float32 that are whole: 96 bytes, of which the second has 64.
COLLECTIVES: dict[str, tuple[str, Callable[[], Any]]] = {
    "all_gather_into_tensor_coalesced": (
        "all-gather",
        _waited(lambda group: functional.all_gather_into_tensor_coalesced(_parts(2, 4), group)),
    ),
    "reduce_scatter_tensor_coalesced": (
        "reduce-scatter",
        _waited(lambda group: functional.reduce_scatter_tensor_coalesced(_parts(8, 16), "avg", [0, 0], group)),
    ),
    "all_reduce_coalesced": (
        "all-reduce",
        _waited(lambda group: functional.all_reduce_coalesced(_parts(8, 16), "sum", group)),
    ),
    "all_reduce_coalesced, bits": (
        "all-reduce",
        _waited(lambda group: functional.all_reduce_coalesced(_parts(8, 16, dtype=torch.int32), "bor", group)),
    ),
    "functional all_gather_tensor": (
        "all-gather",
        _waited(lambda group: [functional.all_gather_tensor(torch.ones(6), 0, group)]),
    ),
    "functional reduce_scatter_tensor": (
        "reduce-scatter",
        _waited(lambda group: [functional.reduce_scatter_tensor(torch.ones(24), "sum", 0, group)]),
    ),
    "functional all_to_all_single": (
        "all-to-all",
        _waited(lambda group: [functional.all_to_all_single(torch.ones(24), None, None, group)]),
    ),
    "all_reduce": ("all-reduce", lambda: dist.all_reduce(torch.ones(24))),
    "all_gather_into_tensor": ("all-gather", lambda: dist.all_gather_into_tensor(torch.ones(24), torch.ones(6))),
    "all_gather": ("all-gather", lambda: dist.all_gather(_parts(*_FOUR), torch.ones(6))),
    "reduce_scatter_tensor": ("reduce-scatter", lambda: dist.reduce_scatter_tensor(torch.ones(6), torch.ones(24))),
    "reduce_scatter": ("reduce-scatter", lambda: dist.reduce_scatter(torch.ones(6), _parts(*_FOUR))),
    "all_to_all_single": ("all-to-all", lambda: dist.all_to_all_single(torch.ones(24), torch.ones(24))),
    "all_to_all": ("all-to-all", lambda: dist.all_to_all(_parts(*_FOUR), _parts(*_FOUR))),
    "broadcast": ("broadcast", lambda: dist.broadcast(torch.ones(24), 0)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    kind, communicate = COLLECTIVES[name]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        communicate()

    job = TrainingJob(partial(nn.Linear, 4, 4), partial(torch.ones, 1, 4), step=step)
    steps = estimate_job(job, RANKS).recording.trace.steps
    transfer, awaited = (one for one in steps if isinstance(one, Transfer | Awaited))
    assert (transfer.collective, transfer.bytes) == (kind, 96)
    assert transfer.wire_bytes == (2 if kind == "all-reduce" else 1) * 96 * (RANKS - 1) // RANKS
    assert awaited.about == transfer.about


@pytest.mark.parametrize(
    ("version", "settings", "packs"),
    [("2.13.0", {}, False), ("2.15.0", {}, True), ("2.15.0", {"TORCH_DIST_USE_NCCL2": "0"}, False)],
)
def test_nccl_of_torch_2_15_gets_packed_buffers(
    version: str, settings: dict[str, str], packs: bool, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    job = TrainingJob(lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), partial(torch.ones, 1, 256))
    buffers = estimate_job(job, RANKS, preset("a100")).peak.by_category["communication"]
    assert (buffers >= 256 * 256 * 4) == packs
