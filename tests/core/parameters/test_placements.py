"""Parameters on `Owned` and `Blocks`: where their bytes lie, and training with any settings as on `Shard(0)`."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core import (
    Blocks,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    Owned,
    clip_grad_norm_,
    fully_shard,
    grad_norm,
    materialize,
)
from shardkit.core.events import GatherStarted, ReduceStarted
from shardkit.core.parameters import collect
from shardkit.core.parameters.placements import layout_for
from shardkit.core.torch_compat import local_of
from tests.support import networked_mesh, on_ranks, rank_mesh
from tests.support.heard import heard
from tests.support.models import Composed, GatedBlock, TiedModel
from tests.support.sharding import shard_each
from tests.support.twins import batch

WORLD_SIZES = [1, 2, 3, 4]

PLACEMENTS: dict[str, Callable[[nn.Parameter], object]] = {
    "shard": lambda p: None,
    "owned": lambda p: Owned(),
    "rows": lambda p: Blocks(rows=5),
    "elements": lambda p: Blocks(elements=24),
    "replicated": lambda p: Replicate() if p.ndim == 1 or p.shape == (19, 16) else None,
    "mixed": lambda p: {(19, 16): Blocks(rows=2), (48, 16): Owned(), (16, 48): Shard(1)}.get(
        tuple(p.shape), Blocks(elements=8)
    ),
}


def build(placement: str | None, mesh: Any = None, **options: Any) -> Any:
    """The model, sharded unless `placement` is None. Its table is tied to its head."""
    torch.manual_seed(3)
    model = TiedModel()
    if placement is None:
        return model
    options |= {"mesh": mesh, "shard_placement_fn": PLACEMENTS[placement]}
    return shard_each(*model.blocks, model.head, model, **options)


def loss_of(model: nn.Module, rank: int, number: int = 0) -> torch.Tensor:
    tokens = torch.randint(19, (4, 6), generator=torch.Generator().manual_seed(100 * number + rank))
    return model(tokens).float().square().mean()


def trained(model: nn.Module, rank: int, parts: int) -> dict[str, torch.Tensor]:
    """Norms of the gradients of three steps; the last gradients, and the weights, as whole tensors."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        for part in range(parts):
            model.set_requires_gradient_sync(part == parts - 1)
            loss_of(model, rank, 10 * step + part).backward()
        found[f"{step} norm"] = clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.full_tensor().detach()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.full_tensor()
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "mixed precision, kept": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": False,
    },
    "offload, accumulated": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "smaller group, materialized": {"reshard_after_forward": 2},
    "hsdp, budget": {},
}


@pytest.mark.parametrize(
    ("world_size", "networked", "setting"),
    [
        (3, False, "plain"),
        (3, True, "plain"),
        *((4, True, setting) for setting in SETTINGS),
        *(pytest.param(4, False, setting, marks=pytest.mark.slow) for setting in ("plain", *SETTINGS)),
    ],
)
@on_ranks()
def test_trains_as_on_shard(rank: int, world_size: int, networked: bool, setting: str) -> None:
    """In shared memory, and with padded rows in a packed buffer, as gloo between hosts sends them, and NCCL."""
    make = networked_mesh if networked else rank_mesh
    mesh = make((2, world_size // 2), ("replicate", "shard")) if "hsdp" in setting else make((world_size,))
    expected: dict[str, torch.Tensor] | None = None
    for placement in PLACEMENTS:
        meta = "materialized" in setting
        with torch.device("meta" if meta else "cpu"):
            model = build(placement, mesh, **SETTINGS.get(setting, {}))
        if meta:
            torch.manual_seed(9)
            materialize(model)
        if "budget" in setting:
            model.set_prefetch_budget(40_000)
        seen = trained(model, rank, parts=2 if "accumulated" in setting else 1)
        expected = expected or seen
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            # Collectives add terms in an order that depends on where they lie.
            sums = networked or placement == "replicated" or "gain" in name or name.endswith("norm")
            assert sums or torch.equal(seen[name], value), (placement, name)
            torch.testing.assert_close(seen[name], value)


@on_ranks(*WORLD_SIZES)
def test_bytes_lie_where_the_placement_says(rank: int, world_size: int) -> None:
    original = {name: p.detach().clone() for name, p in build(None).named_parameters()}
    mesh = rank_mesh((world_size,))
    for placement in PLACEMENTS:
        for name, parameter in build(placement, mesh).named_parameters():
            one = parameter.placements[0]
            local = local_of(parameter)
            if placement == "replicated":
                assert one.is_replicate() == (parameter.ndim < 2 or parameter.shape == (19, 16))
                assert not one.is_replicate() or torch.equal(local, original[name])
            if not isinstance(one, Owned | Blocks):
                continue
            layout = layout_for(one, tuple(parameter.shape), world_size)
            flat = original[name].reshape(layout.shape)
            expected = flat.narrow(0, layout.offset(rank), layout.length(rank))
            assert torch.equal(local, expected), name
            if isinstance(one, Owned):
                assert local.numel() == (parameter.numel() if rank == one.rank else 0)
            else:
                size = one.rows or one.elements
                assert layout.offset(rank) % size == 0 or not local.numel()


@on_ranks(2, 3)
def test_a_step_sends_the_bytes_of_shard(rank: int, world_size: int) -> None:
    """Over shared memory, by all ranks together: a frozen weight is gathered and not reduced."""
    totals = []
    for placement in ("shard", "owned", "rows", "elements", "mixed"):
        model = build(placement)
        with heard(GatherStarted, ReduceStarted) as started:
            loss_of(model, rank).backward()
        kinds = GatherStarted, ReduceStarted
        sent = torch.tensor([sum(one.wire_bytes for one in started if type(one) is kind) for kind in kinds])
        dist.all_reduce(sent)
        totals.append(sent.tolist())
    whole = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad and p.ndim)
    assert totals[0][1] == whole * (world_size - 1)
    assert totals == totals[:1] * 5


def _experts(shape: tuple[int, ...]) -> Any:
    torch.manual_seed(3)
    run = lambda module, x: torch.einsum("bi,eio->ebo", x, module.weight).tanh().square().mean()  # noqa: E731
    return Composed(run, weight=nn.Parameter(torch.randn(shape)))


@dataclass(frozen=True)
class LikeBlockShard:
    """The attribute of torch's `BlockShard` that counts; no torch that can be installed has that class yet."""

    block_numels: tuple[int, ...]


INITIALISERS = (nn.init.trunc_normal_, nn.init.kaiming_uniform_, lambda p: nn.init.trunc_normal_(p, 0, 1, 0.1, 0.2))


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("shape", [(8, 6, 3), (3, 4, 5), (2, 3, 2)], ids=str)
@on_ranks(*WORLD_SIZES)
def test_rows_of_merged_dims(rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    """Cut within experts, uneven, with an empty last rank: initialisers and steps that need rows as in one process."""
    size, mesh, whole = shape[-1], rank_mesh((world_size,)), _experts(shape)
    for chosen in (Blocks(elements=size), LikeBlockShard((size,))):
        model = fully_shard(_experts(shape), mesh=mesh, shard_placement_fn=lambda p, chosen=chosen: chosen)
        assert model.weight.placements == (Blocks(elements=size),)
    first = layout_for(Blocks(elements=size), shape, world_size)
    assert first.shape == (whole.weight.numel() // size, size)
    for initialise in INITIALISERS:
        for one in (model, whole):
            torch.manual_seed(7)
            initialise(one.weight)
        torch.testing.assert_close(model.weight.full_tensor(), whole.weight)
    rows = [local_of(model.weight).detach(), whole.weight.detach().view(-1, size)]
    count = -(-len(rows[1]) // world_size)
    assert torch.equal(rows[0], rows[1][rank * count : (rank + 1) * count])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, whole)]
    for step in range(3):
        model(batch(rank, 5, shape[-2], seed=step)).backward()
        torch.stack([whole(batch(each, 5, shape[-2], seed=step)) for each in range(world_size)]).mean().backward()
        gradients = [local_of(model.weight.grad), whole.weight.grad.view(-1, size)]
        for local, gradient in zip(rows, gradients, strict=True):
            local -= 0.1 * gradient / gradient.norm(dim=1, keepdim=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight.full_tensor(), whole.weight)


@on_ranks(1, 3)
def test_clipping_counts_every_rank(rank: int, world_size: int) -> None:
    mesh = rank_mesh((world_size,))
    norms = []
    for placement in PLACEMENTS:
        model = build(placement, mesh)
        loss_of(model, rank).backward()
        before = grad_norm(model.parameters())
        stock = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        torch.testing.assert_close(stock.full_tensor(), before)
        norms.append(clip_grad_norm_(model.parameters(), 0.01))
        torch.testing.assert_close(grad_norm(model.parameters()), torch.tensor(0.01), rtol=1e-3, atol=0)
        stock = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.005)
        torch.testing.assert_close(grad_norm(model.parameters()), torch.tensor(0.005), rtol=1e-3, atol=0)
    for norm in norms[1:]:
        torch.testing.assert_close(norm, norms[0])


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number first": lambda p: 2**p,
    "tensor of no dims first": lambda p: torch.tensor(2.0) * p,
    "tensor of no dims last": lambda p: p * torch.tensor(2.0),
    "number of its own": lambda p: p / p.norm(),
    "number of its own first": lambda p: p.norm() * p,
    "choice": lambda p: torch.where(p > 0, p, -p),
    "choice of a number": lambda p: torch.where(p > 0, 0.5, p),
    "difference": lambda p: 1 - p,
    "two results": lambda p: torch.frexp(p)[0],
    "lists": lambda p: torch._foreach_pow(0.5, [p])[0],
    "bounds": lambda p: torch.maximum(p.clamp(-0.1, 0.1), p.square()),
}


@pytest.mark.daily(world_size=[3])
@on_ranks(*WORLD_SIZES)
def test_operators_give_what_whole_tensors_give(rank: int, world_size: int) -> None:
    whole = {name: p.detach().clone() for name, p in build(None).named_parameters()}
    for placement in PLACEMENTS:
        for name, parameter in build(placement, rank_mesh((world_size,))).named_parameters():
            if name.startswith(("blocks.0", "blocks.1")):  # the blocks are alike
                continue
            seen, expected = parameter.detach(), whole[name]
            for what, operator in OPERATORS.items():
                result = operator(seen)
                assert isinstance(result, DTensor), what
                assert tuple(result.placements) == tuple(seen.placements), what
                torch.testing.assert_close(result.full_tensor(), operator(expected), equal_nan=True, msg=what)
            other = seen.clone()
            assert torch.equal(seen, other)
            if rank == 0 and local_of(other).numel():
                local_of(other).reshape(-1)[-1] += 1
            if isinstance(seen.placements[0], Owned | Blocks):
                held = torch.tensor(local_of(seen).numel() if rank == 0 else 0)
                torch.distributed.all_reduce(held)
                assert torch.equal(seen, other) == (not held)
                assert not torch.equal(seen, torch.zeros(3, 2))
                with pytest.raises(NotImplementedError, match="_foreach_max"):
                    torch._foreach_max([seen])


@on_ranks(2)
def test_owners_among_replicas_only(rank: int, world_size: int) -> None:
    """A mesh without a shard axis, where every rank has all of a parameter that has an owner."""
    model = GatedBlock()
    expected = copy.deepcopy(model)
    axes = DataParallelMeshDims(replicate="replicas")
    mesh = rank_mesh((world_size,), ("replicas",))
    fully_shard(model, mesh=mesh, dp_mesh_dims=axes, shard_placement_fn=PLACEMENTS["owned"])
    model(torch.ones(2, 16)).sum().backward()
    expected(torch.ones(2, 16)).sum().backward()
    for seen, whole in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(seen.full_tensor(), whole)
        torch.testing.assert_close(seen.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_what_cannot_work_is_refused_by_name(rank: int, world_size: int) -> None:
    for choice, message in (
        (Owned(rank=2), r"Owned\(rank=2\) for parameter 'norm.weight', but the shard group has 2 ranks"),
        (LikeBlockShard((2, 6)), r"block_numels=\(2, 6\)\) for parameter 'norm.weight'; expected"),
        ("whole", r"'whole' for parameter 'norm.weight'; expected Shard\(dim\), Replicate\(\), Owned"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            fully_shard(GatedBlock(8), mesh=rank_mesh((world_size,)), shard_placement_fn=lambda p, one=choice: one)
    weight = build("rows", rank_mesh((world_size,))).head.weight
    with pytest.raises(NotImplementedError, match=r"aten.mm.default .*Blocks\(rows=5\).*full_tensor"):
        weight.detach() @ torch.ones(16, 2)
    for initialise in (nn.init.orthogonal_, nn.init.eye_):
        with pytest.raises(NotImplementedError, match=r"Blocks\(rows=5\).*shardkit\.core\.materialize"):
            initialise(weight)


@on_ranks(2)
def test_a_torch_that_runs_no_operators_of_ours_is_refused_by_version(rank: int, world_size: int) -> None:
    model = GatedBlock(8)
    with mock.patch.object(collect, "RUNS_SUBCLASSES", False):
        for kind in ("owned", "rows"):
            with pytest.raises(
                ValueError, match=r"(Owned\(\)|Blocks\(rows=5\)) for parameter '.*', which needs torch 2.12"
            ):
                fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=PLACEMENTS[kind])
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=lambda p: Shard(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Blocks, "give either rows or elements"),
        (lambda: Blocks(rows=2, elements=3), "give either rows or elements"),
        (lambda: Blocks(rows=0), "0 rows"),
        (lambda: Owned(rank=-1), "expected a rank of the shard group"),
    ],
)
def test_placements_check_their_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
