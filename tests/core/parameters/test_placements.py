"""Parameters on `Owned` and `Blocks`: where their bytes lie, and training against a single process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core import Blocks, DataParallelMeshDims, Owned, clip_grad_norm_, fully_shard, grad_norm
from shardkit.core.parameters import collect
from shardkit.core.parameters.placements import layout_for
from shardkit.core.torch_compat import local_of
from tests.support import networked_mesh, on_ranks, rank_mesh
from tests.support.models import Composed, GatedBlock
from tests.support.sharding import shard_each

WORLD_SIZES = [1, 2, 3, 4]


def build(width: int = 10) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(GatedBlock(width) for _ in range(3)), nn.Linear(width, 7))


PLACEMENTS: dict[str, Callable[[nn.Parameter], object]] = {
    "owned": lambda p: Owned() if p.ndim == 2 else None,
    "all_owned": lambda p: Owned(),
    "rows": lambda p: Blocks(rows=4),
    "elements": lambda p: Blocks(elements=16),
    "replicated": lambda p: Replicate() if p.ndim == 1 or p.shape == (7, 10) else None,
    "mixed": lambda p: {(7, 10): Blocks(rows=2), (30, 10): Owned(), (10, 30): Shard(1)}.get(
        tuple(p.shape), Blocks(elements=8)
    ),
}


def shard(model: nn.Sequential, mesh: object, placement: str) -> nn.Sequential:
    return shard_each(*model[:3], model, mesh=mesh, shard_placement_fn=PLACEMENTS[placement])


def batch(rank: int, step: int, width: int = 10) -> torch.Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank))


def alone(world_size: int, steps: int, optimizer: Callable[..., torch.optim.Optimizer]) -> nn.Sequential:
    """One process that is given the mean of all ranks' gradients, added in rank order as the owner does."""
    model = build()
    opt = optimizer(model.parameters())
    for step in range(steps):
        sums: list[torch.Tensor] | None = None
        for rank in range(world_size):
            model(batch(rank, step)).square().mean().backward()
            grads = [p.grad for p in model.parameters()]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
            opt.zero_grad()
        assert sums is not None
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total / world_size
        opt.step()
        opt.zero_grad()
    return model


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("world_size", "networked"), [(1, False), (2, False), (2, True), (3, False), (3, True), (4, False), (4, True)]
)
@on_ranks()
def test_trains_as_one_process(rank: int, world_size: int, networked: bool, placement: str) -> None:
    """In shared memory, and with padded rows in a packed buffer, as gloo between hosts sends them, and NCCL."""
    make = networked_mesh if networked else rank_mesh
    model = shard(build(), make((world_size,)), placement)
    opt = sgd(model.parameters())
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    expected = dict(alone(world_size, 3, sgd).named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected[name], msg=name)
        owner_sums = not networked and parameter.ndim and placement != "replicated"
        if world_size <= 2 or owner_sums:  # gloo sums as it likes
            assert torch.equal(parameter.full_tensor(), expected[name]), name


@on_ranks(*WORLD_SIZES)
def test_bytes_lie_where_the_placement_says(rank: int, world_size: int) -> None:
    original = {name: p.detach().clone() for name, p in build().named_parameters()}
    mesh = rank_mesh((world_size,))
    for placement in PLACEMENTS:
        for name, parameter in shard(build(), mesh, placement).named_parameters():
            one = parameter.placements[0]
            local = local_of(parameter)
            if placement == "replicated":
                assert one.is_replicate() == (parameter.ndim < 2 or parameter.shape == (7, 10))
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
        model(batch(rank, step, shape[-2])).backward()
        torch.stack([whole(batch(each, step, shape[-2])) for each in range(world_size)]).mean().backward()
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
        model = shard(build(), mesh, placement)
        model(batch(rank, 0)).square().mean().backward()
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
    whole = {name: p.detach().clone() for name, p in build().named_parameters()}
    for placement in PLACEMENTS:
        for name, parameter in shard(build(), rank_mesh((world_size,)), placement).named_parameters():
            if name[0] in "01":  # the blocks are alike
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


REFUSED: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "owner": (lambda p: Owned(rank=2), r"Owned\(rank=2\) for parameter 'norm.weight', but the shard group has 2 ranks"),
    "ragged": (lambda p: LikeBlockShard((2, 6)), r"block_numels=\(2, 6\)\) for parameter 'norm.weight'; expected"),
    "kind": (lambda p: "whole", r"'whole' for parameter 'norm.weight'; expected Shard\(dim\), Replicate\(\), Owned"),
}


@on_ranks(2)
def test_owners_among_replicas_only(rank: int, world_size: int) -> None:
    """A mesh without a shard axis, where every rank has all of a parameter that has an owner."""
    model, expected = build(), build()
    axes = DataParallelMeshDims(replicate="replicas")
    mesh = rank_mesh((world_size,), ("replicas",))
    fully_shard(model, mesh=mesh, dp_mesh_dims=axes, shard_placement_fn=PLACEMENTS["all_owned"])
    model(torch.ones(2, 10)).sum().backward()
    expected(torch.ones(2, 10)).sum().backward()
    for seen, whole in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(seen.full_tensor(), whole)
        torch.testing.assert_close(seen.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_what_cannot_work_is_refused_by_name(rank: int, world_size: int) -> None:
    for choose, message in REFUSED.values():
        with pytest.raises((ValueError, TypeError), match=message):
            fully_shard(GatedBlock(8), mesh=rank_mesh((world_size,)), shard_placement_fn=choose)
    model = shard(build(), rank_mesh((world_size,)), "rows")
    with pytest.raises(NotImplementedError, match=r"aten.mm.default .*Blocks\(rows=4\).*full_tensor"):
        model[3].weight.detach() @ torch.ones(10, 2)
    for initialise in (nn.init.orthogonal_, nn.init.eye_):
        with pytest.raises(NotImplementedError, match=r"Blocks\(rows=4\).*shardkit\.core\.materialize"):
            initialise(model[3].weight)


@on_ranks(2)
def test_a_torch_that_runs_no_operators_of_ours_is_refused_by_version(rank: int, world_size: int) -> None:
    model = GatedBlock(8)
    with mock.patch.object(collect, "RUNS_SUBCLASSES", False):
        for kind in ("owned", "rows"):
            with pytest.raises(
                ValueError, match=r"(Owned\(\)|Blocks\(rows=4\)) for parameter '.*', which needs torch 2.12"
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
