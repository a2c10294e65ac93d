"""Compressed communication: the arithmetic on one process, and bit for bit the same between ranks."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardkit.core import CompressionPolicy, MixedPrecisionPolicy, events, fully_shard
from shardkit.core.runtime.collective import C10dTransport
from shardkit.core.runtime.compressed import wire
from shardkit.core.runtime.compressed.transport import CompressedTransport
from shardkit.core.runtime.compressed.wire import AsDtype, Int8Blocks, WireFormat, format_of
from shardkit.core.runtime.sharding import ChunkLayout
from tests.core.runtime.cases import (
    CASES,
    CPU,
    Case,
    chunk_of,
    gather_plan,
    reduce_plan,
    run_gather,
    run_reduce,
    summed,
    whole,
)
from tests.support import networked_mesh, on_ranks, rank_mesh
from tests.support.comms import CountingAllGather, RankOrderReduceScatter
from tests.support.heard import heard
from tests.support.models import Block, Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal, batch, local_gradients

# -- how far an element may be off, and how many bytes it takes --------------------------------------------------------


# Just below fp32's largest number, a block's largest element may round up to infinity.
FLOATS = st.floats(-(2.0**127), 2.0**127, width=32)
BLOCKS = st.integers(1, 9)


def _through(form: WireFormat, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    wire = torch.full((form.nbytes(values.numel()),), 0xA5, dtype=torch.uint8)
    form.write(values, wire)
    arrived = torch.full((values.numel(),), torch.nan, dtype=dtype)
    form.read(wire, arrived)
    return arrived


@given(st.lists(FLOATS, min_size=1, max_size=40), BLOCKS)
def test_int8_is_off_by_half_a_scale_at_most(numbers: list[float], block: int) -> None:
    values = torch.tensor(numbers)
    arrived = _through(Int8Blocks(block), values)
    for start in range(0, len(numbers), block):
        sent, seen = values[start : start + block].double(), arrived[start : start + block].double()
        scale = sent.abs().max() / 127
        # Half a scale and the rounding of fp32; below its normal numbers, everything becomes zero.
        assert ((sent - seen).abs() <= scale * (0.5 + 1e-4) + 1.5e-36).all()
        assert (seen.abs() <= sent.abs().max() * (1 + 1e-6)).all()


@given(st.lists(st.integers(-127, 127), min_size=1, max_size=40), st.integers(-30, 30))
def test_int8_keeps_whole_numbers_of_scales(codes: list[int], exponent: int) -> None:
    values = torch.tensor([127, *codes], dtype=torch.float32) * 2.0**exponent
    assert torch.equal(_through(Int8Blocks(len(codes) + 1), values), values)


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_bf16_is_torch_s_rounding(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    assert torch.equal(_through(AsDtype(torch.bfloat16, lossless=False), values), values.bfloat16().float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_arrive_finite(bad: float) -> None:
    values = torch.ones(12)
    values[5] = bad
    arrived = _through(Int8Blocks(4), values)
    assert not arrived[4:8].isfinite().any()
    assert torch.equal(arrived[:4], values[:4])
    assert torch.equal(arrived[8:], values[8:])


def test_which_items_are_compressed() -> None:
    matrix, vector = ChunkLayout((6, 4), 1, 2), ChunkLayout((24,), 0, 2)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert format_of("int8", 7, matrix, fp32) == Int8Blocks(7)
    assert format_of("int8", 7, matrix, bf16) == Int8Blocks(7)
    assert format_of("bf16", 7, matrix, fp32) == AsDtype(bf16, lossless=False)
    assert format_of("bf16", 7, matrix, bf16) == AsDtype(bf16, lossless=True)
    assert format_of("bf16", 7, matrix, torch.float16) == AsDtype(torch.float16, lossless=True)
    assert format_of("int8", 7, matrix, torch.int64) == AsDtype(torch.int64, lossless=True)
    assert format_of("int8", 7, vector, fp32) == AsDtype(fp32, lossless=True)
    assert format_of(None, 7, matrix, fp32) == AsDtype(fp32, lossless=True)


# -- the programs ------------------------------------------------------------------------------------------------------


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
POLICIES = {
    "int8": CompressionPolicy(gather="int8", reduce="int8", block=32),
    "bf16": CompressionPolicy(gather="bf16", reduce="bf16"),
    "small blocks": CompressionPolicy(gather="int8", reduce="int8", block=5),
}
KINDS = ("c10d_packed", "c10d_direct")


def _over(kind: str, policy: CompressionPolicy) -> Any:
    return CompressedTransport(C10dTransport(dist.group.WORLD, CPU, coalesces=kind == "c10d_direct"), policy)


def rounded(values: Tensor, kind: str | None, policy: CompressionPolicy, dtype: torch.dtype, ndim: int) -> Tensor:
    """A chunk, of a tensor with `ndim` dims, as it arrives after travelling in `dtype`; in fp32 or wider."""
    form = format_of(kind, policy.block, ChunkLayout((1,) * ndim, 0, 1), dtype)
    return _through(form, values.reshape(-1)).view(values.shape)


def _terms(case: Case, dtype: torch.dtype, rank: int, step: int = 0) -> list[Tensor]:
    return [whole(shape, dtype, 1000 * rank + 100 * step + i) for i, shape in enumerate(case.shapes)]


@pytest.mark.parametrize("name", ["int8", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_bf16_gradients_that_are_summed_in_fp32_travel_as_bf16(
    rank: int, world_size: int, kind: str, name: str
) -> None:
    """Each rank sends its peers' rows once, in two bytes an element, and the sum in fp32 is that of the exact terms."""
    over = _over(kind, POLICIES[name])
    case = CASES["small"]  # vectors as well, which no policy rounds
    plan = reduce_plan(case, over, BF16, F32, label="narrow")
    assert plan.transport is over
    assert plan.wire_dtype is BF16
    if name == "bf16":
        terms = [_terms(case, BF16, one) for one in range(world_size)]
        for seen, item, *given in zip(run_reduce(plan, terms[rank], None, None), plan.items, *terms, strict=True):
            chunks = [chunk_of(term, item.layout, rank).float() for term in given]
            assert torch.equal(seen, summed(chunks, F32, None, None))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_wire_bytes(rank: int, world_size: int, kind: str) -> None:
    """The wire bytes of events equal the bytes of the rows, and all reported memory is freed again."""
    policy = CompressionPolicy(gather="int8", reduce="int8", block=100)
    over = _over(kind, policy)
    case = Case(((10, 100), (7,)), (0, 0), (F32, F32))
    with heard() as told:
        gathers = gather_plan(case, over)
        run_gather(gathers, [torch.ones(i.layout.local_shape(rank)) for i in gathers.items])
        reduction = reduce_plan(case, over, F32, F32)
        run_reduce(reduction, _terms(case, F32, rank))
    # Four ranks hold 3, 3, 3, 1 rows of 100: a byte an element and 4 a row; and 2, 2, 2, 1 elements of 4 bytes.
    row = [-(-104 * held // 16) * 16 + 16 for held in (3, 3, 3, 1)]
    (gather,) = [e for e in told if isinstance(e, events.GatherFinished)]
    (reduce,) = [e for e in told if isinstance(e, events.ReduceFinished)]
    assert (gather.bytes, reduce.bytes) == (4028, 4028)
    assert gather.dtype == reduce.dtype == torch.uint8
    assert gather.wire_bytes == 3 * max(row)
    assert reduce.wire_bytes == sum(row) - row[rank]
    left: dict[str, int] = {}
    for event in told:
        if isinstance(event, events.StorageAllocated | events.StorageFreed):
            sign = 1 if isinstance(event, events.StorageAllocated) else -1
            left[event.kind] = left.get(event.kind, 0) + sign * event.bytes
    # The sums are the caller's.
    sums = 4 * reduction.output_numel
    assert left == {"packed": 0, "gradient": 0, "reduce_input": 0, "reduce_output": sums}


@on_ranks(3)
def test_overflow_is_seen_once(rank: int, world_size: int) -> None:
    """Values that are not finite arrive as such, and do not come back with the next gradient."""
    over = _over("c10d_packed", POLICIES["small blocks"])
    case = Case(((world_size, 20),), (0,), (F32,))
    plan = reduce_plan(case, over, F32, F32)
    for bad in (torch.inf, torch.nan):
        gradient = torch.ones(world_size, 20)
        gradient[:, 3] = bad
        (seen,) = run_reduce(plan, [gradient])
        assert not seen[0, 3].isfinite()
        (seen,) = run_reduce(plan, [torch.full((world_size, 20), 2.0)])
        assert torch.equal(seen, torch.full((1, 20), 2.0 * world_size))


# -- fully_shard -------------------------------------------------------------------------------------------------------


def _whole() -> Any:
    """Uneven blocks, vectors and a 0-dim parameter; the same each time."""

    def run(net: Any, x: Tensor) -> Tensor:
        for block in net.blocks:
            x = block(x)
        return net.out(net.norm(x) * net.gain)

    torch.manual_seed(0)
    blocks, norm, gain = nn.ModuleList([Block(7, 13), Block(7, 5)]), nn.LayerNorm(7), nn.Parameter(torch.tensor(1.5))
    return Composed(run, blocks=blocks, norm=norm, gain=gain, out=nn.Linear(7, 3))


def _net(mesh: Any, **options: Any) -> Any:
    model = _whole()
    return shard_each(*model.blocks, model, mesh=mesh, **options)


def _dims(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 and parameter.shape[0] == 5 else None


class Reference:
    """One process that rounds as the ranks' messages would: parameters when gathered, gradients when sent.

    ``shards`` ranks hold the parts of each parameter; there are ``replicas`` such groups.
    """

    def __init__(self, policy: CompressionPolicy, shards: int, replicas: int, mixed: MixedPrecisionPolicy) -> None:
        self.model = _whole()
        self.policy, self.shards, self.replicas, self.mixed = policy, shards, replicas, mixed

    def _layout(self, parameter: Tensor) -> ChunkLayout:
        dim = _dims(nn.Parameter(parameter.detach()))
        return ChunkLayout(tuple(parameter.shape), dim.dim if dim else 0, self.shards)

    def gathered(self) -> nn.Module:
        """The model that every rank computes with."""
        model = _whole()
        dtype = self.mixed.param_dtype or F32
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs)
                if not mine.ndim:
                    continue
                layout = self._layout(mine)
                for shard in range(self.shards):
                    chunk = chunk_of(theirs, layout, shard)
                    kept = chunk.to(dtype) if chunk.ndim < 2 else chunk
                    arrived = rounded(kept, self.policy.gather, self.policy, dtype, mine.ndim)
                    chunk_of(mine, layout, shard).copy_(arrived)
        return model.to(dtype)

    def gradients(self, backward: Callable[[nn.Module, int], None]) -> dict[str, Tensor]:
        """The mean of the gradients that ``backward(model, rank)`` leaves, as it arrives at the owners."""
        given = []
        for rank in range(self.shards * self.replicas):
            model = self.gathered()
            backward(model, rank)
            given.append({fqn: p.grad for fqn, p in model.named_parameters()})
        return {fqn: self._reduced([one[fqn] for one in given]) for fqn in given[0]}

    def _reduced(self, given: Sequence[Tensor]) -> Tensor:
        if not given[0].ndim:
            return sum((one.float() for one in given[1:]), given[0].float()) / len(given)
        total = torch.zeros(given[0].shape)
        layout = self._layout(given[0])
        for owner in range(self.shards):
            sums = []
            for replica in range(self.replicas):
                terms = []
                for shard in range(self.shards):
                    rank = replica * self.shards + shard
                    chunk = chunk_of(given[rank], layout, owner)
                    terms.append(chunk.float() if shard == owner else self._sent(chunk))
                sums.append(summed(terms, F32, None, self.shards))
            chunk_of(total, layout, owner).copy_(sum(sums[1:], sums[0]) / self.replicas)
        return total

    def _sent(self, chunk: Tensor) -> Tensor:
        return rounded(chunk, self.policy.reduce, self.policy, chunk.dtype, chunk.ndim)


def _trains_as_one_process(
    rank: int, world_size: int, replicas: int, param_dtype: torch.dtype | None, name: str
) -> None:
    policy = POLICIES[name]
    mixed = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=F32)
    hsdp = replicas > 1
    mesh = networked_mesh((replicas, world_size // replicas), ("r", "s")) if hsdp else networked_mesh((world_size,))
    reference = Reference(policy, world_size // replicas, replicas, mixed)
    model = _net(mesh, mp_policy=mixed, shard_placement_fn=_dims, compression_policy=policy)
    for step in range(3):
        output = model(batch(rank, 4, 7, seed=step))
        assert torch.equal(output, reference.gathered()(batch(rank, 4, 7, seed=step).to(param_dtype or F32)))
        model.zero_grad()
        output.float().square().mean().backward()

        def backward(model: nn.Module, rank: int, step: int = step) -> None:
            model(batch(rank, 4, 7, seed=step).to(param_dtype or F32)).float().square().mean().backward()

        expected = reference.gradients(backward)
        for (fqn, parameter), twin in zip(model.named_parameters(), reference.model.parameters(), strict=True):
            seen = parameter.grad.full_tensor()
            if not seen.ndim:  # an all-reduce, whose order is the backend's
                torch.testing.assert_close(seen, expected[fqn])
                expected[fqn] = seen
            assert torch.equal(seen, expected[fqn]), f"gradient of {fqn} in step {step}"
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
                twin -= 0.1 * expected[fqn]


@pytest.mark.daily(world_size=[3, 4])
@pytest.mark.parametrize(
    ("world_size", "replicas", "param_dtype", "name"),
    [
        (2, 1, None, "small blocks"),
        (2, 1, BF16, "int8"),
        (3, 1, None, "int8"),
        (3, 1, BF16, "small blocks"),
        (3, 1, BF16, "bf16"),
        (4, 2, None, "bf16"),
        (4, 2, BF16, "int8"),
    ],
)
@on_ranks()
def test_training_against_the_same_arithmetic_in_one_process(
    rank: int, world_size: int, replicas: int, param_dtype: torch.dtype | None, name: str
) -> None:
    _trains_as_one_process(rank, world_size, replicas, param_dtype, name)


@on_ranks(4)
def test_chunks_are_rounded_in_parts(rank: int, world_size: int) -> None:
    """Few chunks are rounded at once, so that every run of ranks takes several goes."""
    with mock.patch.object(wire, "_AT_ONCE", 40):
        _trains_as_one_process(rank, world_size, 1, None, "int8")


def _gradients(model: Any, rank: int, micro_batches: int = 1) -> list[Tensor]:
    model.zero_grad()
    for micro in range(micro_batches):
        model.set_requires_gradient_sync(micro == micro_batches - 1)
        model(batch(rank, 4, 7, seed=micro)).square().mean().backward()
    return local_gradients(model)


@on_ranks(2)
def test_accumulation(rank: int, world_size: int) -> None:
    """Without sync nothing is rounded: the sum of micro-batches is, once."""
    mesh = networked_mesh((world_size,))
    with heard(events.ReduceStarted) as reductions:
        seen = _gradients(_net(mesh, compression_policy=CompressionPolicy(reduce="int8", block=32)), rank, 3)
    assert 0 < len(reductions) == len({one.fqn for one in reductions})
    exact = _gradients(_net(mesh), rank, 3)
    for one, other in zip(seen, exact, strict=True):
        largest = other.abs().max() if other.numel() else torch.tensor(1.0)
        torch.testing.assert_close(one, other, rtol=0, atol=float(largest) * world_size / 50 + 1e-3)
    assert any(not torch.equal(one, other) for one, other in zip(seen, exact, strict=True))


@on_ranks(2)
def test_shared_memory_compresses_nothing(rank: int, world_size: int) -> None:
    """Where ranks share memory nothing is on the wire, and nothing is rounded."""
    mesh = rank_mesh((world_size,))
    seen = _gradients(_net(mesh, compression_policy=POLICIES["small blocks"]), rank)
    assert_equal(seen, _gradients(_net(mesh), rank))


@on_ranks(4)
def test_reshard_to_neighbours(rank: int, world_size: int) -> None:
    """A smaller group keeps values that are rounded already, so backward gathers the values that forward used."""
    mesh, policy = networked_mesh((world_size,)), POLICIES["int8"]
    whole_group = _gradients(_net(mesh, compression_policy=policy, reshard_after_forward=True), rank)
    neighbours = _gradients(_net(mesh, compression_policy=policy, reshard_after_forward=2), rank)
    assert_equal(neighbours, whole_group)


@on_ranks(2)
def test_what_is_compressed(rank: int, world_size: int) -> None:
    """Each side is compressed by itself, and a group of nothing but vectors is not at all."""
    mesh = networked_mesh((world_size,))
    for policy, dtypes in (
        (CompressionPolicy(gather="int8"), {"gather": torch.uint8, "reduce": F32}),
        (CompressionPolicy(reduce="bf16"), {"gather": F32, "reduce": torch.uint8}),
    ):
        model = _net(mesh, compression_policy=policy)
        with heard(events.GatherStarted) as gathers, heard(events.ReduceStarted) as reductions:
            _gradients(model, rank)
        assert {one.dtype for one in gathers} == {dtypes["gather"]}
        assert {one.dtype for one in reductions} == {dtypes["reduce"]}
    norm = fully_shard(nn.LayerNorm(64), mesh=mesh, compression_policy=POLICIES["int8"])
    with heard(events.GatherStarted, events.ReduceStarted) as told:
        norm(torch.ones(2, 64)).sum().backward()
    assert {one.dtype for one in told} == {F32}


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r'gather must be "int8", "bf16" or None, got \'int4\''):
        CompressionPolicy(gather="int4")
    with pytest.raises(ValueError, match=r"block must be a positive number of elements, got 0"):
        CompressionPolicy(reduce="int8", block=0)
    with pytest.raises(TypeError, match=r"compression_policy must be a CompressionPolicy, got str"):
        fully_shard(nn.Linear(2, 2), compression_policy="int8")
    model = fully_shard(nn.Linear(4, 4), mesh=rank_mesh((world_size,)), compression_policy=POLICIES["int8"])
    for comm, setter in (
        (CountingAllGather(), model.set_custom_all_gather),
        (RankOrderReduceScatter(), model.set_custom_reduce_scatter),
        (True, model.set_allocate_memory_from_process_group_for_comm),
    ):
        with pytest.raises(ValueError, match=r"'weight' has a CompressionPolicy.*without compression_policy"):
            setter(comm)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    fully_shard(tied[0], mesh=rank_mesh((world_size,)), compression_policy=POLICIES["int8"])
    with pytest.raises(ValueError, match=r"'weight' is tied.*CompressionPolicy.*has .* None\)"):
        fully_shard(tied, mesh=rank_mesh((world_size,)))
