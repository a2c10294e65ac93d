"""Gradient norms and clipping against one process that holds every gradient whole."""

import math
import re
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.clip import clip_grad_norm_, grad_norm
from tests.support import on_ranks, rank_mesh


def full_grads():
    """Uneven, tiny, 0-dim, 2-dim and low-precision gradients, as one process would hold them."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"rows": (7, 5), "short": (2, 3), "scalar": (), "columns": (4, 9), "plain": (6,)}
    grads = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    grads["half"] = torch.randn(33, 3, generator=generator).bfloat16()
    return grads


def make_parameter(full, grad, mesh=None, placements=None):
    def place(tensor):
        return tensor if mesh is None else distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    parameter = nn.Parameter(place(full))
    parameter.grad = place(grad)
    return parameter


def sharded_parameters(mesh, grads):
    """The parameters on a mesh whose last axis shards and whose other axes replicate."""
    replicated = [Replicate()] * (mesh.ndim - 1)
    shards = {"rows": Shard(0), "short": Shard(0), "half": Shard(0), "scalar": Replicate(), "columns": Shard(1)}
    parameters = {
        name: make_parameter(torch.zeros_like(grads[name]), grads[name].clone(), mesh, [*replicated, placement])
        for name, placement in shards.items()
    }
    parameters["plain"] = make_parameter(torch.zeros_like(grads["plain"]), grads["plain"].clone())
    return parameters


def expected_norm(grads, norm_type):
    values = torch.cat([grad.double().flatten() for grad in grads])
    return torch.linalg.vector_norm(values, norm_type).item()


@contextmanager
def counted_reductions():
    """The ranks of each all-reduce issued inside."""
    calls = []
    original = dist.all_reduce

    def counting(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        calls.append(tuple(dist.get_process_group_ranks(group)))
        return original(tensor, op, group, async_op)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = original


@pytest.mark.parametrize(
    ("world_size", "norm_type"),
    [(1, 2.0), (2, 2.0), (3, 2.0), (4, 2.0), (2, 1), (3, 0.5), (2, 3.0), (1, math.inf), (4, math.inf)],
)
@on_ranks()
def test_norm_and_scale(rank, world_size, norm_type):
    mesh = rank_mesh((world_size,), ("shard",))
    grads = full_grads()
    parameters = sharded_parameters(mesh, grads)
    with counted_reductions() as calls, warnings.catch_warnings(action="error"):
        norm = clip_grad_norm_(parameters.values(), 0.5, norm_type)
    assert calls == ([] if world_size == 1 else [tuple(range(world_size))])
    assert type(norm) is torch.Tensor
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    want = expected_norm(list(grads.values()), norm_type)
    assert norm.item() == pytest.approx(want, rel=1e-6)
    factor = (0.5 / (norm + 1e-6)).clamp(max=1.0)
    for name, parameter in parameters.items():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert torch.equal(grad, grads[name] * factor.to(grads[name].dtype) if name != "half" else grads[name] * factor)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, norm.item())
    assert len(set(everyone)) == 1


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_plain_gradients_of_each_rank(rank, world_size, norm_type):
    """Experts, of which each rank has its own: only this rank's are in its norm."""
    parameters = sharded_parameters(rank_mesh((world_size,), ("shard",)), full_grads())
    parameters["plain"].grad += 10 * rank
    text = r"plain parameters \(plain, .*gradients differ.*DTensor\.from_local"
    with pytest.warns(UserWarning, match=text) if rank == 0 or norm_type == 2 else nullcontext():  # it has the maximum
        clip_grad_norm_(parameters.items(), 0.5, norm_type)
    with warnings.catch_warnings(action="error"):  # once, as the host waits for the comparison
        clip_grad_norm_(parameters.items(), 0.5, norm_type)


@on_ranks(4)
def test_two_axes_and_several_meshes(rank, world_size):
    """HSDP, both axes sharded, strided, and two meshes with the same ranks in one call."""
    two_axes = rank_mesh((2, 2), ("outer", "inner"))
    flat = rank_mesh((4,), ("shard",))
    twin = rank_mesh((2, 2), ("replicate", "shard"))
    generator = torch.Generator().manual_seed(5)
    full = torch.randn(10, 6, generator=generator)
    layouts = [
        (two_axes, [Replicate(), Shard(0)]),
        (two_axes, [Shard(0), Shard(1)]),
        (two_axes, [Shard(0), Shard(0)]),
        (two_axes, [_StridedShard(0, split_factor=2), Shard(0)]),
        (two_axes, [Shard(1), Replicate()]),
        (two_axes, [Replicate(), Replicate()]),
        (flat, [Shard(0)]),
        (twin, [Replicate(), Shard(0)]),
    ]
    # Every gradient another scale: one that is counted twice or missed shows.
    grads = [full * (3.0**index) for index in range(len(layouts))]
    for norm_type in (2.0, 1.0, math.inf):
        for keep in (*([index] for index in range(len(layouts))), range(len(layouts))):
            parameters = [make_parameter(full, grads[index], *layouts[index]) for index in keep]
            with counted_reductions() as calls:
                norm = grad_norm(parameters, norm_type)
            assert norm.item() == pytest.approx(expected_norm([grads[index] for index in keep], norm_type), rel=1e-6)
            assert len(calls) == len(set(calls))
    assert len(calls) == 3  # outer, inner (shared with the twin mesh), all four ranks


@on_ranks(2, 3)
def test_rank_without_gradients_takes_part(rank, world_size):
    mesh = rank_mesh((world_size,), ("shard",))
    parameters = [make_parameter(torch.zeros(8), torch.ones(8), mesh, [Shard(0)]) for _ in range(2)]
    if rank == 0:
        for parameter in parameters:
            parameter.grad = None
    norm = clip_grad_norm_(parameters, 1.0)
    held = 8 - (-(-8 // world_size))
    assert norm.item() == pytest.approx(math.sqrt(2 * held))
    assert all(parameter.grad is None for parameter in parameters) == (rank == 0)


@pytest.mark.parametrize("max_norm", [-1, -0.5, float("nan")])
def test_a_bound_that_is_no_norm(max_norm):
    """A negative bound would turn every gradient around."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match=f"max_norm={max_norm}, expected a number from 0 on, or inf; pass inf"):
        clip_grad_norm_([weight], max_norm)
    assert clip_grad_norm_([weight], float("inf")).item() == pytest.approx(math.sqrt(2))
    assert torch.equal(weight.grad, torch.ones(2))


@on_ranks(2)
def test_ties_and_odd_inputs(rank, world_size):
    mesh = rank_mesh((world_size,), ("shard",))
    tied = make_parameter(torch.zeros(6), torch.full((6,), 2.0), mesh, [Shard(0)])
    norm = clip_grad_norm_([tied, tied], 1.0)
    assert norm.item() == pytest.approx(math.sqrt(24))
    torch.testing.assert_close(tied.grad.full_tensor(), torch.full((6,), 2.0 / math.sqrt(24)))
    assert grad_norm([]).item() == 0.0
    single = make_parameter(torch.zeros(3), torch.ones(3))
    assert grad_norm(single).item() == pytest.approx(math.sqrt(3))
    assert grad_norm(iter([("name", single)])).item() == pytest.approx(math.sqrt(3))
    single.grad = None
    assert grad_norm(single).item() == 0.0
    for norm_type in (0, -1, -math.inf, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            grad_norm(tied, norm_type)
    double = make_parameter(torch.zeros(3).double(), torch.ones(3).double(), mesh, [Shard(0)])
    assert grad_norm([double, tied]).dtype == torch.float64
    wide = make_parameter(torch.zeros(4, dtype=torch.complex64), torch.full((4,), 3 + 4j), mesh, [Shard(0)])
    assert grad_norm(wide).item() == pytest.approx(10.0)


@on_ranks(2)
def test_precision(rank, world_size):
    """4097 ones in bf16 sum to 4096 in bf16, and squares of 1e25 overflow fp32: neither may happen."""
    mesh = rank_mesh((world_size,), ("shard",))
    ones = torch.ones(4097, dtype=torch.bfloat16)
    assert grad_norm(make_parameter(ones, ones, mesh, [Shard(0)]), 1.0).item() == 4097.0
    large = torch.full((2,), 1e19)
    parameters = [make_parameter(large, large, mesh, [Shard(0)]) for _ in range(4)]
    assert grad_norm(parameters).item() == pytest.approx(math.sqrt(8) * 1e19)


@pytest.mark.parametrize(
    ("world_size", "norm_type", "bad"),
    [
        (1, 1.0, math.inf),
        (2, 1.0, math.nan),
        (3, 2.0, math.inf),
        (2, 2.0, math.nan),
        (2, math.inf, math.inf),
        (3, math.inf, math.nan),
    ],
)
@on_ranks()
def test_nonfinite_names_the_gradient_on_every_rank(rank, world_size, norm_type, bad):
    mesh = rank_mesh((world_size,), ("shard",))
    grads = {"a.weight": torch.ones(5), "b.weight": torch.ones(5), "c.weight": torch.ones(1)}
    grads["b.weight"][4] = bad  # on the last rank that holds any
    named = [(name, make_parameter(grad, grad, mesh, [Shard(0)])) for name, grad in grads.items()]
    norm = grad_norm(named, norm_type)
    assert norm.isnan() if math.isnan(bad) else norm == math.inf
    with pytest.raises(RuntimeError, match=re.escape("with nan or inf: b.weight. ")):
        clip_grad_norm_(named, 1.0, norm_type, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"parameters\[1\] of shape \(5,\)"):
        grad_norm([parameter for _, parameter in named], norm_type, error_if_nonfinite=True)
    huge = [make_parameter(torch.zeros(2), torch.full((2,), 3e38), mesh, [Shard(0)]) for _ in range(4)]
    if norm_type == 1.0:
        with pytest.raises(RuntimeError, match="the norm overflowed"):
            grad_norm(huge, norm_type, error_if_nonfinite=True)


@on_ranks(2)
def test_gradient_placed_unlike_its_parameter(rank, world_size):
    mesh = rank_mesh((world_size,), ("shard",))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"norm.weight: the gradient has placements .*Partial.*redistribute"):
        clip_grad_norm_([("norm.weight", parameter)], 1.0)
    parameter.grad = parameter.grad.redistribute(mesh, parameter.placements)
    assert grad_norm(parameter).item() == pytest.approx(2.0 * world_size)
