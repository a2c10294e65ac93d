"""Cases that stock fully_shard refuses and ours supports, against a single process: gradients, steps, checkpoints."""

import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardkit.core import MixedPrecisionPolicy, events, fully_shard
from shardkit.core.engine.step import state_of
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.models import Block
from tests.support.twins import Twins, assert_close, batch

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


class Tied(nn.Module):
    """An embedding, blocks, and a head that is the embedding; `path` says which of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList([Block(4, 5), Block(4, 3)])
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, path: str) -> Tensor:
        x = self.embedding(tokens) if "e" in path else torch.nn.functional.one_hot(tokens, 4).to(torch.float32)
        for block in self.blocks:
            x = block(x.to(block.scale.dtype))
        return self.head(x) if "h" in path else x


def _both_sharded(model: Any, **options: Any) -> None:
    for module in (model.embedding, *model.blocks, model.head, model):
        fully_shard(module, **options)


def _head_first(model: Any, **options: Any) -> None:
    for module in (model.head, *model.blocks, model.embedding, model):
        fully_shard(module, **options)


def _head_in_the_root(model: Any, **options: Any) -> None:
    for module in (model.embedding, *model.blocks, model):
        fully_shard(module, **options)


def _in_groups(model: Any, **options: Any) -> None:
    fully_shard([model.embedding, model.blocks[0]], **options)
    fully_shard([model.blocks[1], model.head], **options)
    fully_shard(model, **options)


TIES = (_both_sharded, _head_first, _head_in_the_root, _in_groups)


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
    held = [
        flat
        for module in model.modules()
        if (state := state_of(module)) is not None
        for group in state.groups
        for param in group.params
        for flat in param.flats
        if flat.untyped_storage().size()
    ]
    assert not held


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("shard", TIES)
@on_ranks()
def test_tied_across_groups(rank: int, world_size: int, shard: Callable[..., None]) -> None:
    for reshard in RESHARD:
        twins = Twins.of(rank, world_size, Tied, lambda model: shard(model, reshard_after_forward=reshard))  # noqa: B023
        _check_ties(twins)
        for path in ("eh", "eh", "e", "h", "eh"):
            twins.step(_tied_loss(path))
            _check_ties(twins)
        _steps(twins, _tied_loss("eh"), 1)
        with torch.no_grad():
            assert_close(_tied_loss("h")(twins.sharded, rank), _tied_loss("h")(twins.whole, rank), "evaluation")
        for model in (twins.sharded, twins.whole):
            model.embedding.weight.requires_grad_(False)
        twins.step(_tied_loss("eh"))
        for model in (twins.sharded, twins.whole):
            model.head.weight.requires_grad_(True)
            model.double()
        twins.align()  # the two have grown apart by roundings of float32
        twins.step(_tied_loss("eh"))
        for model in (twins.sharded, twins.whole):
            model.float()
        _check_ties(twins)


@on_ranks(1, 3)
def test_checkpoints_of_tied_parameters(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, Tied, _both_sharded)
    twins.step(_tied_loss("eh"))
    state = twins.sharded.state_dict()
    assert state["head.weight"].to_local().data_ptr() == state["embedding.weight"].to_local().data_ptr()
    torch.manual_seed(3)
    other = Tied()
    _both_sharded(other)
    _round_trip(twins.sharded, other)
    for assign in (False, True):
        torch.manual_seed(4)
        loaded = Tied()
        _both_sharded(loaded)
        loaded.load_state_dict(state, assign=assign)
        resumed = Twins(loaded, twins.whole, rank, world_size)
        _check_ties(resumed)
        resumed.backward(_tied_loss("eh"))
        resumed.check_gradients()
        _check_ties(resumed)
        twins.whole.zero_grad()


@on_ranks(2)
def test_a_tied_parameter_assigned_while_unsharded(rank: int, world_size: int) -> None:
    """Parameters that stay unsharded between forwards are gathered again when both names get another value."""
    twins = Twins.of(rank, world_size, Tied, lambda model: _both_sharded(model, reshard_after_forward=False))
    model = twins.sharded
    with torch.no_grad():
        other = nn.Parameter(model.head.weight.detach() * 2)
        _tied_loss("eh")(model, rank)
        model.head.weight = model.embedding.weight = other
        twins.whole.head.weight *= 2
        assert_close(_tied_loss("eh")(model, rank), _tied_loss("eh")(twins.whole, rank), "after an assignment")
    twins.step(_tied_loss("eh"))
    _check_ties(twins)


class Pair(nn.Module):
    """Two layers of two weights each, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4)) for _ in range(3))
        self.layers[1][1].weight = self.layers[0][1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2)
def test_settings_of_a_tied_parameter(rank: int, world_size: int) -> None:
    """A setting made before a later call finds the tie also holds for the tied parameter."""
    factor = 0.5

    def shard(model: Any) -> None:
        fully_shard(model.layers[0])
        model.layers[0].set_gradient_divide_factor(factor)
        fully_shard(model.layers[1])
        fully_shard(model)

    twins = Twins.of(rank, world_size, Pair, shard)
    twins.backward(_vector_loss)
    expected = twins.whole.layers[0][1].weight.grad * (world_size / factor)
    assert_close(twins.sharded.layers[0][1].weight.grad, expected, "tied")


def _tied_traffic(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """The reductions of one backward, and the groups that the forward of a second iteration had not prefetched."""
    torch.manual_seed(0)
    model = Pair()
    for module in (*model.layers, model):
        fully_shard(module)
    loss = _vector_loss(model, rank)
    backward: list[events.Event] = []
    with events.subscribe(backward.append):
        loss.backward()
    forward: list[events.Event] = []
    with events.subscribe(forward.append):
        model(batch(rank, 3, 4))
    reductions = [one.fqn for one in backward if isinstance(one, events.ReduceStarted)]
    return reductions, [one.fqn for one in forward if isinstance(one, events.PrefetchMiss)]


def test_a_tied_parameter_is_reduced_once_and_prefetched_with_the_others() -> None:
    for reductions, missed in run_ranks(2, _tied_traffic):
        assert len(reductions) == len(set(reductions)) == 4, reductions  # the layers' own, and the tied one
        assert missed == []


class Around(nn.Module):
    """Uses a weight itself, and then has a child use it: in backward the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.child = nn.Linear(4, 4)
        self.child.weight = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.child(torch.tanh(nn.functional.linear(self.first(x), self.weight)))


@on_ranks(2)
def test_a_tied_parameter_stays_while_anybody_needs_it(rank: int, world_size: int) -> None:
    def shard(model: Any) -> None:
        fully_shard(model.child)
        fully_shard(model, reshard_after_forward=True)

    _steps(Twins.of(rank, world_size, Around, shard), _vector_loss)


# -- 0-dim parameters --------------------------------------------------------------------------------------------------


class GainBlock(Block):
    """A block with a 0-dim parameter beside larger ones."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Lonely(nn.Module):
    """Nothing but a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.block = GainBlock(4, 5)
        self.lonely = Lonely()

    def forward(self, x: Tensor) -> Tensor:
        return self.lonely(self.block(x)) * self.temperature


def _vector_loss(model: nn.Module, rank: int) -> Tensor:
    return (model(batch(rank, 3, 4)) - 0.3).square().mean()


@pytest.mark.daily(world_size=[1, 3])
@on_ranks(*WORLD_SIZES)
def test_zero_dim_parameters(rank: int, world_size: int) -> None:
    meshes = [rank_mesh((world_size,))]
    if world_size == 4:
        meshes.append(rank_mesh((2, 2), ("replicate", "shard")))
    for mesh in meshes:
        for reshard in RESHARD:
            for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float64)):

                def shard(model: Any, **options: Any) -> None:
                    for module in (model.block, model.lonely, model):
                        fully_shard(module, **options)

                options = {"mesh": mesh, "reshard_after_forward": reshard, "mp_policy": policy}
                twins = Twins.of(rank, world_size, Scaled, lambda model: shard(model, **options))  # noqa: B023
                for scalar in (twins.sharded.temperature, twins.sharded.block.gain, twins.sharded.lonely.shift):
                    assert scalar.placements == (Replicate(),) * mesh.ndim
                    assert scalar.to_local().shape == ()
                _steps(twins, _vector_loss)
                gain = twins.sharded.block.gain.to_local().clone()
                everyone = [torch.empty_like(gain) for _ in range(world_size)]
                dist.all_gather(everyone, gain.detach())
                assert all(torch.equal(one, gain) for one in everyone)
    other = Scaled()
    shard(other)
    _round_trip(twins.sharded, other)


# -- mixed dtypes ------------------------------------------------------------------------------------------------------


class MixedDtypes(nn.Module):
    """Trainable parameters of three dtypes in one group, with odd sizes, beside an integer one and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 7)
        self.wide = nn.Linear(7, 5).double()
        self.narrow = nn.Linear(5, 3).bfloat16()
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)
        self.frozen = nn.Parameter(torch.randn(3).double(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.single(x.to(self.single.weight.dtype)).to(self.wide.weight.dtype)) + self.counts
        return self.narrow(x.to(self.narrow.weight.dtype)).to(self.frozen.dtype) * self.frozen


def _mixed_loss(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank, 3, 4)).square().mean()


@pytest.mark.daily(world_size=[1, 3])
@on_ranks(*WORLD_SIZES)
def test_mixed_dtypes_in_a_group(rank: int, world_size: int) -> None:
    for reshard in RESHARD:
        twins = Twins.of(rank, world_size, MixedDtypes, lambda model: fully_shard(model, reshard_after_forward=reshard))  # noqa: B023
        expected = {fqn: value.dtype for fqn, value in twins.whole.state_dict().items()}
        assert {fqn: value.dtype for fqn, value in twins.sharded.state_dict().items()} == expected
        for _ in range(2):
            twins.backward(_mixed_loss)
            for fqn, parameter in twins.sharded.named_parameters():
                whole = dict(twins.whole.named_parameters())[fqn]
                assert (parameter.grad is None) == (whole.grad is None), fqn
                if whole.grad is not None:
                    assert parameter.grad.dtype == whole.grad.dtype == parameter.dtype
                    seen = parameter.grad.full_tensor()
                    # Values that pass through the bfloat16 layer have its precision, whatever their dtype.
                    torch.testing.assert_close(seen, whole.grad, rtol=5e-2, atol=5e-3)
            twins.update()
            twins.align()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = fully_shard(MixedDtypes(), mp_policy=policy)
    _mixed_loss(model, rank).backward()
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, fqn
    other = fully_shard(MixedDtypes())
    _round_trip(twins.sharded, other)


class Branches(nn.Module):
    """Parameters of three dtypes whose gradients do not meet, and an integer one that a cast would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 7)
        self.wide = nn.Linear(4, 5).double()
        self.narrow = nn.Linear(4, 3).bfloat16()
        self.large = nn.Parameter(torch.arange(4) + 2**24 + 1, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.large.tolist() == [2**24 + 1 + index for index in range(4)]
        branches = (self.single, self.wide, self.narrow)
        return sum(layer(x.to(layer.weight.dtype)).double().square().mean() for layer in branches)  # type: ignore[return-value]


@on_ranks(2, 3)
def test_each_dtype_is_reduced_as_it_is(rank: int, world_size: int) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(batch(rank, 3, 4))

    twins = Twins.of(rank, world_size, Branches, fully_shard)
    twins.backward(loss)
    expected = dict(twins.whole.named_parameters())
    for fqn, parameter in twins.sharded.named_parameters():
        if parameter.grad is not None:
            within = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[parameter.dtype]
            seen = parameter.grad.full_tensor()
            torch.testing.assert_close(seen, expected[fqn].grad, rtol=within, atol=within)
    loss(fully_shard(Branches(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), rank).backward()


# -- other dims, other layouts -----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Dims that no world size divides; a convolution in channels-last, a transposed and a strided weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, (3, 2), padding=1).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(7, 5)
        self.linear.weight = nn.Parameter(torch.randn(7, 5).t() * 0.3)
        self.strided = nn.Parameter(torch.randn(10, 9)[::2, ::3])
        self.expanded = nn.Parameter(torch.randn(1, 3).expand(5, 3).clone().as_strided((5, 3), (1, 5)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x.view(-1, 3, 4, 6))
        x = torch.tanh(self.linear(x.mean(2)))
        return x @ (self.strided + self.expanded)


def _odd_loss(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank, 2, 72)).square().mean()


def _last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1)


def _dim_one(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


def _longest_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("placement", [None, _dim_one, _last_dim, _longest_dim])
@on_ranks()
def test_any_dim_and_layout(
    rank: int, world_size: int, placement: Callable[[nn.Parameter], Shard | None] | None
) -> None:
    for reshard in RESHARD:
        for param_dtype in (None, torch.float64):

            def shard(model: Any) -> None:
                fully_shard(
                    model,
                    reshard_after_forward=reshard,  # noqa: B023
                    shard_placement_fn=placement,
                    mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, output_dtype=torch.float32),  # noqa: B023
                )

            twins = Twins.of(rank, world_size, Odd, shard)
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
                _steps(twins, _odd_loss)
                continue
            _odd_loss(twins.sharded, rank).backward()  # computed in float64 from float32 shards
            assert all(one.grad.dtype == one.dtype == torch.float32 for one in twins.sharded.parameters())
            twins.reference_backward(_odd_loss)
            twins.check_gradients()
    other = Odd()
    shard(other)
    _round_trip(twins.sharded, other)
