"""Lists of shapes that the runtime's tests gather and reduce, and single-process answers for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from shardkit.core.runtime.choice import transport_for
from shardkit.core.runtime.collective import C10dTransport, CustomTransport
from shardkit.core.runtime.lanes import Program, make_lane
from shardkit.core.runtime.plan import (
    GatherItem,
    GatherPlan,
    Mean,
    ReduceItem,
    ReducePlan,
    Transport,
    plan_gather,
    plan_reduce,
)
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.runtime.shared.segment import shared_copies
from shardkit.core.runtime.shared.transport import SharedTransport

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Shapes, dims to cut and dtypes; one entry for each item.

    An item in `owners` lies on that rank (of those there are, counted round); one in `units` is cut at multiples.
    """

    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    owners: Mapping[int, int] = field(default_factory=dict)
    units: Mapping[int, int] = field(default_factory=dict)

    def layouts(self, world_size: int) -> list[ChunkLayout]:
        return [
            ChunkLayout(
                shape,
                dim,
                world_size,
                unit=self.units.get(i, 1),
                owner=self.owners[i] % world_size if i in self.owners else None,
            )
            for i, (shape, dim) in enumerate(zip(self.shapes, self.dims, strict=True))
        ]


def case(*items: tuple[tuple[int, ...], int, torch.dtype]) -> Case:
    shapes, dims, dtypes = zip(*items, strict=True)
    return Case(shapes, dims, dtypes)


F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

CASES: dict[str, Case] = {
    "large_even": case(((240, 200), 0, F32), ((480, 128), 0, F32)),
    "large_uneven": case(((241, 250), 0, F32), ((7, 30000), 0, F32), ((250001,), 0, F32)),
    "small": case(((12, 3), 0, F32), ((24,), 0, F32), ((5, 2), 0, F32)),
    "empty_chunks": case(((2, 50000), 0, F32), ((1, 3), 0, F32), ((1,), 0, F32), ((0, 4), 0, F32)),
    "only_empty": case(((0, 4), 0, F32), ((3, 0), 0, F32)),
    "other_dims": case(((6, 10), 1, F32), ((300, 401), 1, F32), ((2, 3, 7), 2, F32), ((4, 5, 3), 1, F32)),
    "mixed_dims": case(((241, 250), 0, F32), ((13,), 0, F32), ((9, 5), 1, F32), ((3, 2, 1), 2, F32)),
    "mixed_dtypes": case(
        ((241, 250), 0, F32),
        ((241, 250), 0, BF16),
        ((7,), 0, F16),
        ((5, 3), 1, F64),
        ((3,), 0, torch.uint8),
        ((9,), 0, F32),
    ),
    "bfloat16": case(((241, 250), 0, BF16), ((11,), 0, BF16), ((3, 9), 1, BF16)),
    "owned": replace(
        case(((241, 250), 0, F32), ((13,), 0, F32), ((240, 200), 0, F32), ((9, 5), 1, F32), ((3, 2), 0, F32)),
        owners={0: 1, 1: 2, 2: 3, 4: 1},
    ),
    "blocks": replace(
        case(((241, 250), 0, F32), ((60250,), 0, F32), ((9, 5), 0, F32), ((7,), 0, F32), ((3, 400), 1, F32)),
        units={0: 64, 1: 256, 2: 4, 3: 16, 4: 128},
    ),
    "float8": case(((400, 300), 0, torch.float8_e4m3fn), ((11,), 0, torch.float8_e4m3fn)),
}


class _StockComm(DefaultAllGather):
    def __call__(self, **arguments: Any) -> dist.Work | None:
        return (DefaultReduceScatter() if "op" in arguments else super().__call__)(**arguments)


def transport(kind: str) -> Transport:
    """The transport under test over the default group."""
    group = dist.group.WORLD
    if kind in ("shared", "lent"):
        shared = transport_for(group, CPU)
        assert isinstance(shared, SharedTransport) or group.size() == 1
        return shared
    if kind == "custom":
        return CustomTransport(group, CPU, _StockComm())
    return C10dTransport(group, CPU, coalesces=kind == "c10d_direct")


def placed(kind: str, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The shards where `kind` looks for them: "lent" ones lie in shared memory, all others do not."""
    return shared_copies(sources) if kind == "lent" else list(sources)


def whole(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A reproducible tensor that every rank can make."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).mul_(8).to(dtype)


def chunk_of(tensor: torch.Tensor, layout: ChunkLayout, rank: int) -> torch.Tensor:
    return tensor.narrow(layout.dim, layout.offset(rank), layout.length(rank))


def gather_plan(case: Case, over: Transport, label: str = "blocks.0") -> GatherPlan:
    layouts = case.layouts(over.world_size)
    items = [
        GatherItem(f"{label}.w{i}", layout, dtype)
        for i, (layout, dtype) in enumerate(zip(layouts, case.dtypes, strict=True))
    ]
    return plan_gather(items, over, label, over.rank)


def flats_for(plan: GatherPlan) -> list[torch.Tensor]:
    """Poisoned flats, so that elements show that a gather does not write."""
    return [torch.full((item.layout.flat_numel,), 77, dtype=torch.float32).to(item.dtype) for item in plan.items]


def run_gather(plan: GatherPlan, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    flats = flats_for(plan)
    make_lane(CPU, "all-gather").start(plan.transport.gather(plan, sources, flats), plan.label).wait()
    return [flat[: item.layout.numel].view(item.layout.shape) for flat, item in zip(flats, plan.items, strict=True)]


def reduce_plan(
    case: Case, over: Transport, grad_dtype: torch.dtype, reduce_dtype: torch.dtype, label: str = "blocks.0"
) -> ReducePlan:
    items = [ReduceItem(f"{label}.w{i}", layout) for i, layout in enumerate(case.layouts(over.world_size))]
    return plan_reduce(items, over, label, over.rank, grad_dtype, reduce_dtype)


def run_reduce(
    plan: ReducePlan,
    grads: Sequence[torch.Tensor],
    predivide: float | None = None,
    postdivide: float | None = None,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[torch.Tensor]:
    outputs: list[torch.Tensor] = []

    def program() -> Program:
        outputs.append((yield from plan.transport.reduce(plan, list(grads), Mean(op, predivide, postdivide))))

    make_lane(CPU, "reduce-scatter").start(program(), plan.label).wait()
    return plan.output_views(outputs[0])


def summed(
    terms: Sequence[torch.Tensor], reduce_dtype: torch.dtype, predivide: float | None, postdivide: float | None
) -> torch.Tensor:
    """The definition: every term in `reduce_dtype`, divided, added in rank order, the sum divided."""
    divided = [term.to(reduce_dtype) if predivide is None else term.to(reduce_dtype) / predivide for term in terms]
    total = divided[0].clone()
    for term in divided[1:]:
        total += term
    return total if postdivide is None else total / postdivide
