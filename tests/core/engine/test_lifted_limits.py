"""Cases that stock fully_shard refuses and ours supports, against a single process: gradients, steps, checkpoints."""

import functools
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core import MixedPrecisionPolicy, events, fully_shard
from shardkit.core.module import groups_of
from tests.support import on_ranks, rank_mesh
from tests.support.heard import heard
from tests.support.models import Block, Composed
from tests.support.sharding import shard_children, shard_each
from tests.support.twins import Twins, assert_close, batch, square_loss

WORLD_SIZES = (1, 2, 3, 4)
RESHARD = (None, True, False)


def _steps(twins: Twins, loss: Callable[[nn.Module, int], Tensor], count: int = 3) -> None:
    """Train, then accumulate a step without sync, and compare all the way."""
    for _ in range(count):
        twins.step(loss)
    for synced in (False, False, True):
        twins.sharded.set_requires_gradient_sync(synced)
        twins.backward(loss)
    twins.check_gradients()
    twins.update()
    twins.check_parameters()


def _round_trip(model: Any, other: Any) -> None:
    """Save `model` and load it into `other` through torch.distributed.checkpoint (collective)."""
    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    dcp.save({"model": model.state_dict()}, checkpoint_id=where[0], no_dist=False)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=where[0])
    other.load_state_dict(state["model"])
    for (fqn, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(theirs, mine.detach().full_tensor(), fqn)
    dist.barrier()
    shutil.rmtree(where[0], ignore_errors=True)


# -- tied across groups ------------------------------------------------------------------------------------------------


def _tied() -> nn.Module:
    """An embedding, blocks, and a head that is the embedding; `path` says which of them run."""

    def run(module: Any, tokens: Tensor, path: str) -> Tensor:
        x = module.embedding(tokens) if "e" in path else nn.functional.one_hot(tokens, 4).to(torch.float32)
        for block in module.blocks:
            x = block(x.to(block.scale.dtype))
        return module.head(x) if "h" in path else x

    model = Composed(
        run,
        embedding=nn.Embedding(11, 4),
        blocks=nn.ModuleList([Block(4, 5), Block(4, 3)]),
        head=nn.Linear(4, 11, bias=False),
    )
    model.head.weight = model.embedding.weight
    return model


TIES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "both sharded": lambda model: (model.embedding, *model.blocks, model.head),
    "head first": lambda model: (model.head, *model.blocks, model.embedding),
    "head in the root": lambda model: (model.embedding, *model.blocks),
    "in groups": lambda model: ([model.embedding, model.blocks[0]], [model.blocks[1], model.head]),
}
"""The modules, or lists of modules, that are sharded before the root."""


def _shard_tied(model: Any, ties: str = "both sharded", **options: Any) -> None:
    shard_each(*TIES[ties](model), model, **options)


def _tied_loss(path: str) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, rank: int) -> Tensor:
        tokens = torch.arange(rank, rank + 6).remainder(4 if "e" not in path else 11).view(2, 3)
        return model(tokens, path).square().mean()

    return loss


def _check_ties(twins: Twins) -> None:
    model = twins.sharded
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, DTensor)
    assert len(list(model.parameters())) == len(list(twins.whole.parameters()))
    assert model.state_dict().keys() == twins.whole.state_dict().keys()
    params = [param for group in groups_of(model, recurse=True) for param in group.params]
    assert not any(flat.untyped_storage().size() for param in params for flat in param.flats)


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    ("ties", "reshard"),
    [
        ("both sharded", None),
        ("both sharded", False),
        ("head first", True),
        ("head in the root", False),
        ("in groups", None),
    ],
)
@on_ranks()
def test_tied_across_groups(rank: int, world_size: int, ties: str, reshard: bool | None) -> None:
    twins = Twins.of(rank, world_size, _tied, lambda model: _shard_tied(model, ties, reshard_after_forward=reshard))
    _check_ties(twins)
    for path in ("eh", "eh", "e", "h", "eh"):
        twins.step(_tied_loss(path))
        _check_ties(twins)
    _steps(twins, _tied_loss("eh"), 1)
    with torch.no_grad():
        assert_close(_tied_loss("h")(twins.sharded, rank), _tied_loss("h")(twins.whole, rank), "evaluation")
    for model in twins.both:
        model.embedding.weight.requires_grad_(False)
    twins.step(_tied_loss("eh"))
    for model in twins.both:
        model.head.weight.requires_grad_(True)
        model.double()
    twins.align()  # the two have grown apart by roundings of float32
    twins.step(_tied_loss("eh"))
    for model in twins.both:
        model.float()
    _check_ties(twins)


@on_ranks(1, 3)
def test_checkpoints_of_tied_parameters(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _tied, _shard_tied)
    twins.step(_tied_loss("eh"))
    state = twins.sharded.state_dict()
    assert state["head.weight"].to_local().data_ptr() == state["embedding.weight"].to_local().data_ptr()
    torch.manual_seed(3)
    other = _tied()
    _shard_tied(other)
    _round_trip(twins.sharded, other)
    for assign in (False, True):
        torch.manual_seed(4)
        loaded = _tied()
        _shard_tied(loaded)
        loaded.load_state_dict(state, assign=assign)
        resumed = Twins(loaded, twins.whole, rank, world_size)
        _check_ties(resumed)
        resumed.backward(_tied_loss("eh"))
        resumed.check_gradients()
        _check_ties(resumed)
        twins.whole.zero_grad()


def _pair() -> nn.Module:
    """Layers of two weights each, one of them tied."""
    layers = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4)) for _ in range(3)]
    layers[1][1].weight = layers[0][1].weight
    return nn.Sequential(*layers)


@on_ranks(2)
def test_a_tied_parameter_is_reduced_once_and_prefetched_with_the_others(rank: int, world_size: int) -> None:
    model = _pair()
    shard_each(*model, model)
    loss = _vector_loss(model, rank)
    with heard(events.ReduceStarted) as reductions:
        loss.backward()
    with heard(events.PrefetchMiss) as misses:
        model(batch(rank, 3, 4))
    assert len(reductions) == len({one.fqn for one in reductions}) == 4  # the layers' own, and the tied one
    assert misses == []


# -- 0-dim parameters --------------------------------------------------------------------------------------------------


def _scaled() -> nn.Module:
    """0-dim parameters: beside larger ones, alone in a module, and in the root."""

    def gain() -> nn.Parameter:
        return nn.Parameter(torch.tensor(1.3))

    return Composed(
        lambda module, x: module.lonely(module.block(x)) * module.temperature,
        temperature=gain(),
        block=Composed(lambda module, x: module.inner(x) * module.gain, inner=Block(4, 5), gain=gain()),
        lonely=Composed(lambda module, x: x + module.shift, shift=gain()),
    )


def _vector_loss(model: nn.Module, rank: int) -> Tensor:
    return (model(batch(rank, 3, 4)) - 0.3).square().mean()


@pytest.mark.daily(world_size=[1, 3])
@on_ranks(*WORLD_SIZES)
def test_zero_dim_parameters(rank: int, world_size: int) -> None:
    meshes = [rank_mesh((world_size,))]
    if world_size == 4:
        meshes.append(rank_mesh((2, 2), ("replicate", "shard")))
    for mesh in meshes:
        for reshard, reduce_dtype in ((None, None), (True, torch.float64), (False, None)):
            policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            options = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy}
            twins = Twins.of(rank, world_size, _scaled, functools.partial(shard_children, **options))
            for scalar in (twins.sharded.temperature, twins.sharded.block.gain, twins.sharded.lonely.shift):
                assert scalar.placements == (Replicate(),) * mesh.ndim
                assert scalar.to_local().shape == ()
            _steps(twins, _vector_loss)
            gain = twins.sharded.block.gain.to_local().clone()
            everyone = [torch.empty_like(gain) for _ in range(world_size)]
            dist.all_gather(everyone, gain.detach())
            assert all(torch.equal(one, gain) for one in everyone)
    _round_trip(twins.sharded, shard_children(_scaled()))


@on_ranks(2)
def test_torch_loads_the_full_optimizer_state_of_zero_dim_parameters(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _scaled, shard_children)
    whole = torch.optim.AdamW(twins.whole.parameters(), eps=1e-2)
    state: dict[str, Any] = {}
    for broadcast in (False, False, True):
        sharded = torch.optim.AdamW(twins.sharded.parameters(), eps=1e-2)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        if whole.state:
            seen = {} if broadcast and rank else state
            set_optimizer_state_dict(twins.sharded, sharded, seen, options=options)
        for _ in range(2):
            twins.backward(_vector_loss)
            for optimizer in (sharded, whole):
                optimizer.step()
                optimizer.zero_grad()
            twins.check_parameters()
        state = get_optimizer_state_dict(twins.sharded, sharded, options=options)


class _Counting(torch.optim.SGD):
    """Keeps a plain number for each parameter, under a name that torch's optimizers do not have."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for one in self.param_groups[0]["params"]:
            self.state[one]["seen"] = self.state[one].get("seen", torch.zeros(())) + 1


@on_ranks(2)
def test_plain_numbers_of_other_optimizers_stay_plain(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _scaled, shard_children)
    optimizer = _Counting(twins.sharded.parameters(), 0.1)
    for _ in range(3):
        twins.backward(_vector_loss)
        optimizer.step()
    assert {type(state["seen"]) for state in optimizer.state.values()} == {torch.Tensor}


# -- mixed dtypes ------------------------------------------------------------------------------------------------------


def _mixed_dtypes() -> nn.Module:
    """Parameters of three dtypes whose gradients do not meet, a frozen one, and an integer one that a cast spoils."""

    def run(module: Any, x: Tensor) -> Tensor:
        assert module.large.tolist() == [2**24 + 1 + index for index in range(4)]
        layers = (module.single, module.wide, module.narrow)
        losses = [layer(x.to(layer.weight.dtype)).double().square().mean() for layer in layers]
        return sum(losses) * module.frozen.sum()

    return Composed(
        run,
        single=nn.Linear(4, 7),
        wide=nn.Linear(4, 5).double(),
        narrow=nn.Linear(4, 3).bfloat16(),
        large=nn.Parameter(torch.arange(4) + 2**24 + 1, requires_grad=False),
        frozen=nn.Parameter(torch.randn(3).double(), requires_grad=False),
    )


def _mixed_loss(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank, 3, 4))


@pytest.mark.daily(world_size=[1, 3])
@on_ranks(*WORLD_SIZES)
def test_mixed_dtypes_in_a_group(rank: int, world_size: int) -> None:
    """Each gradient is reduced in its parameter's dtype, or in reduce_dtype."""
    for reshard in RESHARD:
        shard = functools.partial(fully_shard, reshard_after_forward=reshard)
        twins = Twins.of(rank, world_size, _mixed_dtypes, shard)
        expected = {fqn: value.dtype for fqn, value in twins.whole.state_dict().items()}
        assert {fqn: value.dtype for fqn, value in twins.sharded.state_dict().items()} == expected
        for _ in range(2):
            twins.backward(_mixed_loss)
            for (fqn, seen), whole in zip(twins.sharded.named_parameters(), twins.whole.parameters(), strict=True):
                assert (seen.grad is None) == (whole.grad is None), fqn
                if whole.grad is not None:
                    assert seen.grad.dtype == whole.grad.dtype == seen.dtype
                    within = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[seen.dtype]
                    torch.testing.assert_close(seen.grad.full_tensor(), whole.grad, rtol=within, atol=within)
            twins.update()
            twins.align()
    for policy in (
        MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    ):
        model = fully_shard(_mixed_dtypes(), mp_policy=policy)
        _mixed_loss(model, rank).backward()
        for fqn, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, fqn
    _round_trip(twins.sharded, fully_shard(_mixed_dtypes()))


# -- other dims, other layouts -----------------------------------------------------------------------------------------


def _odd() -> nn.Module:
    """Dims that no world size divides; a convolution in channels-last, a transposed and a strided weight."""

    def run(module: Any, x: Tensor) -> Tensor:
        x = module.convolution(x.view(-1, 3, 4, 6))
        x = torch.tanh(module.linear(x.mean(2)))
        return x @ (module.strided + module.expanded)

    linear = nn.Linear(7, 5)
    linear.weight = nn.Parameter(torch.randn(7, 5).t() * 0.3)
    return Composed(
        run,
        convolution=nn.Conv2d(3, 5, (3, 2), padding=1).to(memory_format=torch.channels_last),
        linear=linear,
        strided=nn.Parameter(torch.randn(10, 9)[::2, ::3]),
        expanded=nn.Parameter(torch.randn(1, 3).expand(5, 3).clone().as_strided((5, 3), (1, 5))),
    )


_ODD_LOSS = square_loss(2, 72)


DIMS: dict[str, Callable[[nn.Parameter], Shard | None] | None] = {
    "default": None,
    "dim 1": lambda parameter: Shard(1) if parameter.ndim > 1 else None,
    "last": lambda parameter: Shard(-1),
    "longest": lambda parameter: Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim])),
}


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dims", DIMS)
@on_ranks()
def test_any_dim_and_layout(rank: int, world_size: int, dims: str) -> None:
    placement = DIMS[dims]
    for reshard, param_dtype in ((None, None), (False, None), (True, torch.float64)):
        precision = MixedPrecisionPolicy(param_dtype=param_dtype, output_dtype=torch.float32)
        options = {"reshard_after_forward": reshard, "shard_placement_fn": placement, "mp_policy": precision}
        shard = functools.partial(fully_shard, **options)
        twins = Twins.of(rank, world_size, _odd, shard)
        for fqn, parameter in twins.whole.named_parameters():
            chosen = placement(parameter) if placement else None
            dim = 0 if chosen is None else chosen.dim % parameter.ndim
            sharded = twins.sharded.get_parameter(fqn)
            assert sharded.placements == (Shard(dim),), fqn
            chunks = torch.chunk(parameter, world_size, dim)
            length = chunks[rank].shape[dim] if rank < len(chunks) else 0
            assert sharded.to_local().shape[dim] == length, fqn
            assert sharded.is_contiguous(), fqn
            assert torch.equal(sharded.full_tensor(), parameter), fqn
        if param_dtype is None:
            _steps(twins, _ODD_LOSS)
            continue
        _ODD_LOSS(twins.sharded, rank).backward()  # computed in float64 from float32 shards
        assert all(one.grad.dtype == one.dtype == torch.float32 for one in twins.sharded.parameters())
        twins.reference_backward(_ODD_LOSS)
        twins.check_gradients()
    other = _odd()
    shard(other)
    _round_trip(twins.sharded, other)
