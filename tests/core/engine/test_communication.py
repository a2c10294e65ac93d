"""How a user steers communication: own collectives, hooks, groups, divisors; other process groups; named mesh axes."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardkit.core as shardkit
from shardkit.core import events
from tests.support import on_ranks, rank_mesh
from tests.support.comms import CountingAllGather, RankOrderReduceScatter
from tests.support.heard import heard
from tests.support.meshes import data_mesh
from tests.support.models import Block, Composed
from tests.support.sharding import shard_each
from tests.support.twins import Twins, batch, square_loss


def _twins(rank: int, world_size: int, mesh: Any, **options: Any) -> Twins:
    build = lambda: nn.Sequential(Block(7, 13), Block(7, 5), nn.Linear(7, 3))  # noqa: E731
    return Twins.of(rank, world_size, build, lambda model: shard_each(*model[:2], model, mesh=mesh, **options))


_loss = square_loss(4, 7)


def _sharded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, stock.FSDPModule)]


# -- custom collectives ------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_custom_collectives(rank: int, world_size: int) -> None:
    """One without the other, both, on some modules only. Collectives that are not replaced stay the default ones."""
    for gathers, reduces in [(True, False), (False, True), (True, True)]:
        twins = _twins(rank, world_size, rank_mesh((world_size,)))
        all_gather, reduce_scatter = CountingAllGather(), MoreThanAsked()
        if gathers:
            twins.sharded[0].set_custom_all_gather(all_gather)
        if reduces:
            twins.sharded[0].set_custom_reduce_scatter(reduce_scatter)
        twins.backward(_loss)
        twins.check_gradients()
        assert all_gather.calls == (2 if gathers else 0)  # forward and backward, of one block alone
        assert reduce_scatter.calls == (1 if reduces else 0)


class MoreThanAsked(RankOrderReduceScatter):
    """A user's object may have methods of its own, as upstream's own are to get: nobody here calls them."""

    def layout(self, *unknown: Any) -> None:
        raise AssertionError("it is not ours to call")


class Wrong(CountingAllGather, RankOrderReduceScatter):
    """Allocates a buffer of another size, dtype or stride than requested."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = size[0] + 1 if self.change == "size" else size[0]
        buffer = torch.empty(numel * 2, dtype=torch.float64 if self.change == "dtype" else dtype, device=device)
        return buffer[::2] if self.change == "strides" else buffer[:numel]


@on_ranks(2, isolated=True)
def test_wrong_buffers(rank: int, world_size: int) -> None:
    changes = {
        "size": r"(\d+) elements of.*expected (?!\1 )\d+ of torch.float32",
        "dtype": r"(\d+) elements of torch.float64.*expected \1 of torch.float32",
        "strides": r"strides \(2,\).*contiguous",
    }
    for change, match in changes.items():
        model = _twins(rank, world_size, rank_mesh((world_size,))).sharded
        refused = rf"(?s)0: Wrong\.allocate returned.*{match}"
        model[0].set_custom_all_gather(Wrong(change))
        with pytest.raises((ValueError, RuntimeError), match=refused):
            _loss(model, rank)
        model.reset_iter_state()
        model[0].set_custom_all_gather(CountingAllGather())
        model[0].set_custom_reduce_scatter(Wrong(change))
        with pytest.raises((ValueError, RuntimeError), match=refused):
            _loss(model, rank).backward()


@on_ranks(2, isolated=True)
def test_allocation_by_the_process_group(rank: int, world_size: int) -> None:
    """Gloo has no allocator: the setter raises at once, and the earlier setting stays."""
    twins = _twins(rank, world_size, rank_mesh((world_size,)))
    block = twins.sharded[0]
    allocate = block.set_allocate_memory_from_process_group_for_comm
    for setter, value in ((allocate, True), (block.set_symm_mem_for_comm, "NCCL")):
        with pytest.raises(ValueError, match=r"group '.*gloo.*cannot allocate.*NCCL"):
            setter(value)
    allocate(False)
    twins.backward(_loss)
    twins.check_gradients()
    block.set_custom_all_gather(CountingAllGather())
    with pytest.raises(ValueError, match=r"CountingAllGather.*own buffers"):
        allocate(True)


# -- hooks, groups, contexts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "hsdp"), [(3, False), (4, True)])
@on_ranks()
def test_all_reduce_hook(rank: int, world_size: int, hsdp: bool) -> None:
    """Runs once for each group, after HSDP's own all-reduce, and the optimizer gets the values that it writes."""
    mesh = data_mesh(hsdp)
    twins = _twins(rank, world_size, mesh)
    seen: list[Tensor] = []

    def halve(reduced: Tensor) -> None:
        assert reduced.dim() == 1
        seen.append(reduced.clone())
        reduced.mul_(0.5)

    for module in _sharded(twins.sharded):
        module.set_all_reduce_hook(halve)
    twins.backward(_loss)
    assert len(seen) == 3
    for parameter in twins.whole.parameters():
        parameter.grad /= 2
    twins.check_gradients()
    if hsdp:  # all-reduced before: the replicas saw the same
        for tensor in seen:
            highest = tensor.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh["replicate"].get_group())
            assert torch.equal(highest, tensor)
        with pytest.raises(ValueError, match="stream cannot be set together with native HSDP"):
            twins.sharded.set_all_reduce_hook(halve, stream=object())


@on_ranks(2)
def test_separate_reduce_scatter_group(rank: int, world_size: int) -> None:
    """Reductions go over a group of their own, one for the whole model; switched off, over the shard group again."""
    mesh = rank_mesh((world_size,))
    twins = _twins(rank, world_size, mesh)
    for enabled in (True, False):
        twins.sharded.set_separate_reduce_scatter_group(enabled)
        with heard(events.GatherStarted) as gathers, heard(events.ReduceStarted) as reductions:
            twins.step(_loss)
        gathered, reduced = {one.group for one in gathers}, {one.group for one in reductions}
        assert gathered == {mesh.get_group()}
        assert len(reduced) == 1
        assert (reduced == gathered) != enabled


# -- divisors ----------------------------------------------------------------------------------------------------------


_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    ("world_size", "hsdp", "dtype"), [(1, False, torch.float32), (3, False, torch.float16), (4, True, torch.bfloat16)]
)
@on_ranks()
def test_gradient_divide_factor(rank: int, world_size: int, dtype: torch.dtype, hsdp: bool) -> None:
    mesh = data_mesh(hsdp)
    for force_sum, factor in itertools.product([False, True], [None, 1.0, 3.0, 0.5, 8.0]):
        twins = _twins(rank, world_size, mesh, mp_policy=shardkit.MixedPrecisionPolicy(reduce_dtype=dtype))
        for module in _sharded(twins.sharded):
            module.set_force_sum_reduction_for_comms(force_sum)
            if factor is not None:
                module.set_gradient_divide_factor(factor)
        twins.backward(_loss)
        rtol = _TOLERANCE[dtype]
        for parameter, whole in zip(twins.sharded.parameters(), twins.whole.parameters(), strict=True):
            assert parameter.grad.dtype == torch.float32
            expected = whole.grad * (world_size / factor if factor else 1)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=rtol, atol=rtol / 10)


@on_ranks(2)
def test_divide_factor_of_one_module(rank: int, world_size: int) -> None:
    """The factor is one module's own; the older name warns and does the same."""
    twins = _twins(rank, world_size, rank_mesh((world_size,)))
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        twins.sharded[0].set_reduce_scatter_divide_factor(1.0)
    twins.backward(_loss)
    for parameter in twins.whole[0].parameters():
        parameter.grad *= world_size
    twins.check_gradients()


SETTERS = [
    ("set_requires_gradient_sync", False),
    ("set_requires_all_reduce", False),
    ("set_reduce_scatter_unused_params", True),
    ("set_reduce_scatter_max_input_buffers", 3),
    ("set_separate_reduce_scatter_group", True),
    ("set_reshard_after_forward", False),
    ("set_reshard_after_backward", False),
    ("set_gradient_divide_factor", 3.0),
    ("set_force_sum_reduction_for_comms", True),
    ("set_all_reduce_hook", Tensor.neg_),
    ("set_unshard_in_backward", False),
    ("set_allocate_memory_from_process_group_for_comm", True),
    ("unshard", True),
    ("set_modules_to_forward_prefetch", []),
    ("set_modules_to_backward_prefetch", []),
]


def _without_parameters(api: Any, kind: str, mesh: Any) -> tuple[nn.Module, Any]:
    """A model, and a sharded module in it whose call made no group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for module in {"leaf": model[1:2], "container": (model[0], model[2]), "ignored": ()}[kind]:
        api.fully_shard(module, mesh=mesh)
    api.fully_shard(model, mesh=mesh, ignored_params=set(model.parameters()) if kind == "ignored" else None)
    return model, model[1] if kind == "leaf" else model


@on_ranks(2)
def test_setters_of_modules_without_a_group(rank: int, world_size: int) -> None:
    """As on stock, they only affect the groups of modules below, if they reach those."""
    mesh = rank_mesh((world_size,))
    custom = [("set_custom_reduce_scatter", RankOrderReduceScatter()), ("set_custom_all_gather", CountingAllGather())]
    for kind, (name, value) in itertools.product(("leaf", "container", "ignored"), SETTERS + custom):
        gradients = []
        for api in (stock, shardkit):
            model, module = _without_parameters(api, kind, mesh)
            getattr(module, name)(value)
            model(torch.ones(3, 4) + rank).square().mean().backward()
            grads = [parameter.grad for parameter in model.parameters()]
            gradients.append([one.to_local() if isinstance(one, DTensor) else one for one in grads])
        for expected, seen in zip(*gradients, strict=True):
            assert seen is expected if expected is None else torch.equal(expected, seen), (kind, name)


def _sides() -> nn.Module:
    """One group whose ranks may use one half or the other."""
    return Composed(
        lambda module, x, side: getattr(module, side)(x) * module.frozen,
        left=nn.Linear(3, 3),
        right=nn.Linear(3, 3),
        frozen=nn.Parameter(torch.ones(3), requires_grad=False),
    )


def _sides_loss(step: int) -> Callable[[nn.Module, int], Tensor]:
    """Ranks take turns with the halves."""
    halves = ("right", "left")
    return lambda model, rank: model(batch(rank, 4, 3, seed=step), halves[(rank + step) % 2]).square().mean()


@on_ranks(2)
def test_unused_parameters_are_reduced_as_zeros(rank: int, world_size: int) -> None:
    """Unused parameters count as zero on a rank. Those that no rank can have a gradient of get none."""
    mesh = rank_mesh((world_size,))
    twins = Twins.of(rank, world_size, _sides, lambda model: shardkit.fully_shard(model, mesh=mesh))
    twins.sharded.set_reduce_scatter_unused_params(True)
    for step in range(2):
        twins.step(_sides_loss(step))


@on_ranks(2)
def test_accumulation_that_differs_between_ranks(rank: int, world_size: int) -> None:
    """Ranks that have accumulated different halves in reduce_dtype still reduce the same things together."""
    policy = shardkit.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": rank_mesh((world_size,)), "mp_policy": policy}
    twins = Twins.of(rank, world_size, _sides, lambda model: shardkit.fully_shard(model, **options))
    for step in range(2):
        twins.sharded.set_requires_gradient_sync(step == 1)
        twins.backward(_sides_loss(step))
    for (fqn, parameter), expected in zip(twins.sharded.named_parameters(), twins.whole.parameters(), strict=True):
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=5e-2, atol=5e-3, msg=fqn)


@on_ranks(1, 2)
def test_shards_stay_contiguous_in_channels_last(rank: int, world_size: int) -> None:
    """Gradients are contiguous, and fused optimizers take the strides of a parameter for those of its gradient."""
    convolution = shardkit.fully_shard(nn.Conv2d(3, 6, (3, 2)), mesh=rank_mesh((world_size,)))
    before = convolution.weight.to_local().clone()
    convolution.to(memory_format=torch.channels_last)
    convolution(torch.zeros(1, 3, 4, 4))
    convolution.reshard()
    assert convolution.weight.to_local().is_contiguous()
    assert torch.equal(convolution.weight.to_local(), before)


# -- named mesh axes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_size", "names"), [(3, ("dp",)), (4, ("pods", "nodes"))])
@on_ranks()
def test_replicate_only(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    """DDP: parameters are whole on every rank, gradients averaged, and the step is the same everywhere."""
    shape = (world_size,) if len(names) == 1 else (2, world_size // 2)
    mesh = rank_mesh(shape, names)
    dims = shardkit.DataParallelMeshDims(replicate=names if len(names) > 1 else names[0])
    twins = _twins(rank, world_size, mesh, dp_mesh_dims=dims)
    model = twins.sharded
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(),)
        assert parameter.to_local().shape == parameter.shape
    twins.step(_loss)
    for fqn, parameter in model.named_parameters():
        local = parameter.to_local()
        highest = local.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        assert torch.equal(local, highest), fqn
    model.set_requires_all_reduce(False)  # accumulates without communication
    _loss(model, rank).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_all_reduce(True)
    _loss(model, rank).backward()
    assert all(parameter.grad.placements == (Replicate(),) for parameter in model.parameters())


# Mesh of 4 ranks, data-parallel axes, the ranks that share gradients with rank r, placements.
SLICES = [
    ((1, 2, 2), {"shard": "c"}, ([0, 1], [0, 1], [2, 3], [2, 3]), (Shard(0),)),
    ((1, 2, 2), {"shard": "b"}, ([0, 2], [1, 3], [0, 2], [1, 3]), (Shard(0),)),
    ((1, 2, 2), {"shard": "c", "replicate": "b"}, ([0, 1, 2, 3],) * 4, (Replicate(), Shard(0))),
    ((1, 2, 2), {"shard": "b", "replicate": "c"}, ([0, 1, 2, 3],) * 4, (Replicate(), Shard(0))),
    ((1, 2, 2), {"shard": ("b", "c")}, ([0, 1, 2, 3],) * 4, (Shard(0),)),
    ((2, 1, 2), {"shard": ("b", "c"), "replicate": "a"}, ([0, 1, 2, 3],) * 4, (Replicate(), Shard(0))),
    ((2, 1, 2), {"shard": "c", "replicate": ("a", "b")}, ([0, 1, 2, 3],) * 4, (Replicate(), Shard(0))),
    ((2, 1, 2), {"replicate": "a"}, ([0, 2], [1, 3], [0, 2], [1, 3]), (Replicate(),)),
]


@on_ranks(4)
def test_slices_of_a_mesh_with_three_axes(rank: int, world_size: int) -> None:
    for shape, dims, sharing, placements in SLICES:
        mesh = rank_mesh(shape, ("a", "b", "c"))
        twins = _twins(rank, world_size, mesh, dp_mesh_dims=shardkit.DataParallelMeshDims(**dims))
        for parameter in twins.sharded.parameters():
            assert parameter.placements == placements, (shape, dims)
        _loss(twins.sharded, rank).backward()
        for one in sharing[rank]:
            (_loss(twins.whole, one) / len(sharing[rank])).backward()
        twins.check_gradients()
