"""Replicas that hold different values are noticed, by name, and `broadcast_replicas` makes them equal."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from shardkit.core import broadcast_replicas, full_state_dict, fully_shard
from shardkit.core.digests import numbers_of
from tests.support import on_ranks, rank_mesh
from tests.support.meshes import data_mesh
from tests.support.models import Composed


def sharded(kind: str) -> Any:
    model: Any = Composed(
        lambda net, x: net.statistics(net.out(net.norm(net.inp(x))) * net.scale + net.shift),
        inp=nn.Linear(5, 600),
        norm=nn.LayerNorm(600),
        out=nn.Linear(600, 3),
        scale=nn.Parameter(torch.tensor(1.0)),
        statistics=nn.BatchNorm1d(3),
    )
    model.register_buffer("shift", torch.ones(1))
    if kind == "tp":
        mesh = rank_mesh((2, 2), ("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"norm": SequenceParallel(sequence_dim=0, use_local_output=True)})
        mesh = mesh["dp"]
    else:
        mesh = data_mesh(hsdp=kind == "hsdp")
    for part in (model.inp, model.norm):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def changed(model: nn.Module, fqn: str) -> None:
    """One element on one rank. The first forward looks at some elements of a large tensor, the debug mode at all."""
    tensor = model.get_parameter(fqn).to_local() if fqn != "shift" else model.shift
    with torch.no_grad():
        tensor.view(-1)[-1] += 1


def noticed(call: Callable[[], object], fqn: str) -> None:
    with pytest.raises(RuntimeError, match=rf"replicas of '{fqn}'.*different values.*broadcast_replicas\(model\)"):
        call()


@pytest.mark.parametrize(
    ("kind", "fqn"),
    [("hsdp", "norm.bias"), ("hsdp", "out.weight"), ("hsdp", "scale"), ("fsdp", "scale"), ("tp", "norm.weight")],
)
@on_ranks(4)
def test_ranks_that_start_apart(rank: int, world_size: int, kind: str, fqn: str) -> None:
    model = sharded(kind)
    expected = full_state_dict(model, rank0_only=False)
    if rank == 3:
        changed(model, fqn)
    x = torch.randn(4, 5)
    noticed(lambda: model(x), fqn)
    with pytest.raises(RuntimeError, match=rf"{fqn}: ranks \[3\] hold other values .*broadcast_replicas\(model\)"):
        full_state_dict(model)
    broadcast_replicas(model)
    model(x).sum().backward()
    for name, tensor in full_state_dict(model, rank0_only=False).items():
        assert "running" in name or "tracked" in name or torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("kind", "fqn"), [("hsdp", "inp.weight"), ("hsdp", "shift"), ("fsdp", "shift"), ("tp", "norm.bias")]
)
@on_ranks(4)
def test_ranks_that_go_apart(rank: int, world_size: int, kind: str, fqn: str) -> None:
    os.environ["SHARDKIT_DEBUG"] = "order,replicas=2"
    model = sharded(kind)
    x = torch.randn(4, 5)
    model.statistics.running_mean.fill_(rank)
    model(x).sum().backward()
    if rank == 3:
        changed(model, fqn)
    noticed(lambda: [model(x) for _ in range(2)], fqn)
    broadcast_replicas(model)
    for _ in range(3):
        model(x).sum().backward()


@on_ranks(2)
def test_dtypes_that_gloo_does_not_send(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("table", torch.full((3,), 7 + rank, dtype=torch.int16))
    model.register_buffer("scale", torch.full((3,), 7.0 + rank)[::3])  # a single element, whose stride is 3
    model.register_buffer("columns", torch.full((2, 3), 7j + rank).T)
    model.register_buffer("mask", torch.full((), not rank))
    broadcast_replicas(fully_shard(model, mesh=rank_mesh((2,))))
    assert model.table.tolist() == [7, 7, 7] and model.scale.item() == 7 and model.mask.item()
    assert model.columns.tolist() == [[7j] * 2] * 3


@pytest.mark.parametrize("whole", [False, True])
def test_memory_between_the_elements_of_a_buffer_does_not_count(whole: bool) -> None:
    strided = torch.arange(6.0)[::2]
    assert numbers_of([strided], whole=whole) == numbers_of([strided.contiguous()], whole=whole)
