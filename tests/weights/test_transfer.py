"""Weights between processes: receivers have the values of the sharded model, whatever the layouts of both."""

import contextlib
import os
from multiprocessing.connection import Connection as Pipe

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardkit.core import Blocks, Owned, fully_shard
from shardkit.weights import (
    Cut,
    Part,
    SendersClosed,
    Stack,
    Target,
    WeightReceiver,
    WeightSender,
    targets_for,
    targets_of,
)
from tests.support import run_ranks
from tests.weights.processes import Other, free_address


class Trained(nn.Module):
    """Small, with dims that do not divide evenly, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
        self.o = nn.Linear(8, 6)
        self.head = nn.Linear(6, 7)
        self.register_buffer("scale", torch.tensor(0.5))


class Engine(nn.Module):
    """The same on one of two tensor-parallel ranks, fused and padded."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 4 + 2 + 2)
        self.o = nn.Linear(4, 6)
        self.head = nn.Linear(6, 4)


RULES = {
    "qkv.*": Stack(Part("q", 8), Part("k", 4), Part("v", 4)),
    "o.*": Cut(1),
    "head.*": Cut(0, size=7),
}


def trained() -> Trained:
    torch.manual_seed(1)
    return Trained()


def shard(model: nn.Module, kind: str) -> nn.Module:
    """The model as trainers lay it over four ranks."""
    axes = {"hsdp": (2, 2), "stock hsdp": (2, 2), "strided": (2, 2)}.get(kind, (4,))
    ranks = torch.arange(4).view(axes)
    if kind == "strided":
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        for linear in (model.q, model.k, model.v, model.head):
            linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh["tp"], [Shard(0)]))
        stock_fully_shard(model, mesh=mesh["dp"])
        return model
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(axes) :])
    if kind.startswith("stock"):
        stock_fully_shard(model, mesh=mesh)
    elif kind == "dtensors":
        for name, parameter in model.named_parameters():
            placement = Shard(1) if parameter.ndim > 1 else Replicate()
            owner, _, leaf = name.rpartition(".")
            setattr(
                model.get_submodule(owner), leaf, nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
            )
    else:
        choose = {"owned": lambda one: Owned(), "blocks": lambda one: Blocks(elements=5)}.get(kind)
        fully_shard(model, mesh=mesh, shard_placement_fn=choose)
    return model


def send(rank: int, world_size: int, address: str, kind: str, shared: bool) -> None:
    """Three versions to two receivers."""
    os.environ["SHARDKIT_SHARED_MEMORY"] = "1" if shared else "0"
    model = shard(trained(), kind)
    with WeightSender(model, address, dtype=torch.bfloat16, receivers=2, timeout=40, bucket=64) as sender:
        for version in range(3):
            if version:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1)
            report = sender.send(version)
            assert report.version == version and not report.failed
            assert report.unused == ("scale",)


def receive(pipe: Pipe, number: int, address: str) -> None:
    engine = Engine().bfloat16() if number else Engine()  # one casts to its own dtype
    nn.init.constant_(engine.head.weight, 9)
    targets = targets_for(engine, RULES, tp_rank=number, tp_size=2)
    with WeightReceiver(address, targets, in_place=number == 1, timeout=40) as receiver:
        for version in range(3):
            assert receiver.receive() == version
            full = {
                name: (one + version).bfloat16().to(engine.o.weight.dtype) for name, one in trained().named_parameters()
            }
            for leaf in ("weight", "bias"):
                half = {one: full[f"{one}.{leaf}"].chunk(2)[number] for one in "qkv"}
                assert torch.equal(getattr(engine.qkv, leaf), torch.cat([half[one] for one in "qkv"]))
                rows = full[f"head.{leaf}"][4 * number : 4 * number + 4]
                assert torch.equal(getattr(engine.head, leaf)[: len(rows)], rows)
            assert torch.equal(engine.o.weight, full["o.weight"][:, 4 * number : 4 * number + 4])
            assert torch.equal(engine.o.bias, full["o.bias"])
            if number:  # the padding is not written
                assert (engine.head.weight[3:] == 9).all()
        with pytest.raises(SendersClosed):
            receiver.receive()
    pipe.send("right")


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "owned", "blocks", "stock", "stock hsdp", "dtensors", "strided"])
def test_models_of_all_layouts(kind):
    shared, address = kind in ("fsdp", "stock"), free_address()
    with Other(receive, 0, address, shared=shared) as one, Other(receive, 1, address, shared=shared) as other:
        run_ranks(4, send, address, kind, shared, timeout=120)
        assert (one.says(), other.says()) == ("right", "right")


def test_one_process_with_a_snapshot():
    """The receiver gets the model as it was at the call."""
    address = free_address()
    model = nn.Linear(3, 5)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    there = {name: torch.zeros_like(one) for name, one in before.items()}
    with WeightSender(model, address, timeout=20) as sender, WeightReceiver(address, targets_of(there)) as receiver:
        sending = sender.send(3, async_op=True)
        nn.init.zeros_(model.weight)
        assert receiver.receive(20) == 3
        report = sending.wait()
    assert report.receivers == (receiver.name,) and report.nbytes == 4 * 20
    assert all(torch.equal(there[name], one) for name, one in before.items())


def receive_into_dtensors(rank: int, world_size: int, address: str) -> None:
    """A receiver's tensors may be DTensors, cut in another way."""
    full = torch.arange(35.0).view(7, 5)
    mesh = DeviceMesh("cpu", range(world_size))
    there = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)])}
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(WeightReceiver(address, targets_of(there), timeout=40))
        state = {"w": distribute_tensor(full, mesh, [Shard(0)])}
        sender = stack.enter_context(WeightSender(state, address, receivers=world_size, timeout=40))
        sending = sender.send(1, async_op=True)
        receiver.receive()
        sending.wait()
        assert isinstance(there["w"], DTensor) and torch.equal(there["w"].full_tensor(), full)


def test_receivers_with_dtensors():
    run_ranks(3, receive_into_dtensors, free_address(), timeout=120)


def test_wants_that_nobody_has_are_refused_on_both_sides():
    address = free_address()
    bad = [Target("w", None, torch.zeros(3)), Target("x", None, torch.zeros(3))]
    with WeightSender({"w": torch.zeros(3, dtype=torch.int64)}, address, timeout=20) as sender:
        with WeightReceiver(address, bad, name="bad", timeout=20) as receiver:
            sending = sender.send(1, async_op=True)
            with pytest.raises(ValueError, match="x: no sender has this tensor"):
                receiver.receive()
            assert "x: no sender" in sending.wait().failed["bad"]
        with WeightReceiver(address, bad[:1], timeout=20) as receiver:
            sender.send(2, async_op=True)
            with pytest.raises(ValueError, match=r"w: sent as int64, its target is torch.float32"):
                receiver.receive()
