"""Optimizers on the placements that they want: each, unmodified, steps as in one process, or is refused."""

import copy
import io
import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from scripts.separate_optimizers import DATA, tried
from shardkit.core import (
    Blocks,
    CPUOffloadPolicy,
    Owned,
    clip_grad_norm_,
    fully_shard,
    optimizer_step_on_shards,
    placements_for,
    plan_owners,
)
from tests.core.optimizer_steps.placed_training import (
    Layers,
    check,
    class_of,
    matrices,
    optimizer_for,
    shard_layers,
    step,
)
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed, TiedModel

# -- placements_for ----------------------------------------------------------------------------------------------------


# package: class -> where it wants matrices
KINDS: dict[str, type[Any] | None] = {
    "torch.optim.Muon": Owned,
    "torch.optim.Adafactor": Owned,
    "torch.optim.AdamW": None,
    "torch.optim.SGD": None,
    "torch.optim.Adagrad": None,
    "torch.optim.RMSprop": None,
    "torchao.optim.AdamW8bit": Blocks,
    "torchao.optim.Adam4bit": Blocks,
    "torchao.optim.AdamWFp8": Blocks,
    "bitsandbytes.optim.AdamW8bit": Blocks,
    "bitsandbytes.optim.Lion8bit": Blocks,
    "bitsandbytes.optim.RMSprop8bit": Blocks,
    "bitsandbytes.optim.PagedAdamW8bit": Blocks,
    "bitsandbytes.optim.AdEMAMix8bit": Owned,
    "pytorch_optimizer.SOAP": Owned,
    "pytorch_optimizer.Shampoo": Owned,
    "pytorch_optimizer.ScalableShampoo": Owned,
    "pytorch_optimizer.CAME": Owned,
    "pytorch_optimizer.SPlus": Owned,
    "pytorch_optimizer.SCION": Owned,
    "heavyball.SOAP": Owned,
}


def net() -> nn.Module:
    torch.manual_seed(1)
    table, up, down = nn.Embedding(70, 64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False)
    return Composed(None, table=table, up=up, down=down, head=nn.Linear(64, 70, bias=False))


def trainees(model: nn.Module, kind: str) -> list[nn.Parameter]:
    """The parameters to train: for Muon and the like, the matrices between embedding and head."""
    if KINDS[kind] is Owned and "8bit" not in kind:
        return [model.up.weight, model.down.weight]
    return list(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(3)
def test_common_optimizers_step_as_in_one_process(rank: int, world_size: int, kind: str) -> None:
    warnings.simplefilter("ignore")
    reference, model = net(), net()
    choose = placements_for(model, class_of(kind))
    fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=choose)
    wanted = KINDS[kind]
    for parameter in (model.up.weight, model.down.weight):
        assert isinstance(parameter.placements[0], wanted or Shard)
    options = {"momentum": 0.9} if kind.endswith("SGD") else {}
    ours, theirs = (optimizer_for(kind, trainees(one, kind), **options) for one in (model, reference))
    if wanted is None:
        optimizer_step_on_shards(ours)
    for number in range(4):
        for one, optimizer in ((model, ours), (reference, theirs)):
            step(one, optimizer, number, scale=0.01)
            optimizer.zero_grad()
        check(model, reference.parameters(), number)


# -- classes on `Owned` that were tried, or that users vouch for -------------------------------------------------------


KNOWN: dict[str, Any] = json.loads(DATA.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("package", KNOWN)
def test_classes_that_step_on_each_parameter_by_itself(package: str) -> None:
    """If this fails: python -m scripts.separate_optimizers."""
    pytest.importorskip(package.replace("-", "_"))
    assert tried(package) == KNOWN[package]


class Own(torch.optim.SGD):
    """A subclass of a known class: it may do anything."""


@on_ranks(2)
def test_an_unknown_class_is_refused_before_it_steps(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, lambda p: Owned(rank=0))
    model(torch.ones(2, 12)).sum().backward()
    before = [p.full_tensor() for p in model.parameters()]
    for kind in (Own, torch.optim.LBFGS):
        optimizer = kind(matrices(model), lr=0.1)
        name = kind.__name__
        said = rf"{name} is not known .* 'layers\.0\.weight' is placed .* {name}\.steps_each_parameter_alone = True"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                optimizer.step(lambda: 1.0)
    assert all(map(torch.equal, [p.full_tensor() for p in model.parameters()], before))

    class Vouched(Own):
        steps_each_parameter_alone = True

    Vouched(matrices(model), lr=0.1).step()
    assert not all(map(torch.equal, [p.full_tensor() for p in model.parameters()], before))


@on_ranks(1)
def test_one_rank_alone_may_combine_them(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, plan_owners(Layers()))
    torch.optim.LBFGS(matrices(model)).step(lambda: model(torch.ones(2, 12)).sum())


# -- Muon on `Owned` beside AdamW, in recipes that users combine it with -----------------------------------------------


def placement(parameter: nn.Parameter) -> object:
    """Matrices owned, the table in blocks of elements, vectors in rows."""
    if parameter.ndim == 2:
        return Blocks(elements=24) if parameter.shape[0] == 19 else Owned()
    return None


def split(model: nn.Module, muon_first: bool) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and p.shape[0] != 19]
    rest = [p for p in trained if p.ndim != 2 or p.shape[0] == 19]
    made = [lambda: torch.optim.Muon(matrices, lr=0.02), lambda: torch.optim.AdamW(rest, lr=0.01, foreach=muon_first)]
    return [make() for make in (made if muon_first else reversed(made))]


def backward(model: nn.Module, rank: int, number: int, parts: int) -> None:
    """With several parts, they are added up before they are reduced."""
    for part in range(parts):
        model.set_requires_gradient_sync(part == parts - 1)
        generator = torch.Generator().manual_seed(100 * number + 10 * part + rank)
        model(torch.randint(19, (4, 6), generator=generator)).square().mean().backward()


@pytest.mark.daily(muon_first=[True])
@pytest.mark.parametrize("muon_first", [True, False])
@pytest.mark.parametrize(("world_size", "setting"), [(4, "hsdp"), (3, "offload"), (3, "accumulated")])
@on_ranks()
def test_muon_beside_adamw(rank: int, world_size: int, setting: str, muon_first: bool) -> None:
    torch.manual_seed(4)
    reference = TiedModel()  # with a tied head, a frozen matrix and a number
    model = copy.deepcopy(reference)
    hsdp = setting == "hsdp"
    mesh = rank_mesh((2, world_size // 2), ("replicate", "shard")) if hsdp else rank_mesh((world_size,))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if setting == "offload" else {}
    for module in (*model.blocks, model.head, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement, **options)
    ours, theirs = split(model, muon_first), split(reference, muon_first)
    for number in range(4):
        backward(model, rank, number, 2 if setting == "accumulated" else 1)
        before = torch.stack([p.grad.full_tensor().norm() for p in model.parameters() if p.grad is not None]).norm()
        norm = clip_grad_norm_(model.parameters(), 1e-2)
        torch.testing.assert_close(norm.full_tensor() if isinstance(norm, DTensor) else norm, before)
        for parameter, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.grad = None if parameter.grad is None else parameter.grad.full_tensor()
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:  # by way of a file, into other optimizers
            again = split(model, muon_first)
            for optimizer, other in zip(ours, again, strict=True):
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
            ours = again
        for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), whole), (number, name)
    start = TiedModel().state_dict()
    moved = [name for name, value in reference.state_dict().items() if not torch.equal(value, start[name])]
    assert "blocks.0.up.weight" in moved
