"""`full_tensor()` of a sharded parameter is the tensor that it was made of, for every cut of it."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardkit.core import fully_shard
from shardkit.core.mesh import data_parallel_mesh
from shardkit.tp_adapter import SubBlocks, declare_sub_blocks
from shardkit.tp_adapter.adapter import adapter
from tests.support import rank_mesh, run_ranks

NAMES = {2: ("dp", "tp"), 3: ("dp_replicate", "dp_shard", "tp")}
MESHES = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(2, 2), (1, 2, 2), (2, 1, 2)]}
SHAPES = [(1,), (3,), (9,), (8, 3), (1, 6), (5, 7), (0, 3), (2, 4, 3)]


class Holder(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        local = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        return (local * x).sum()


def slices(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    mesh = rank_mesh(shape, NAMES[len(shape)])
    return (mesh["dp"] if len(shape) == 2 else mesh["dp_replicate", "dp_shard"]), mesh["tp"]


def check(rank: int, world_size: int) -> int:
    """Shard, compare the rank's part, gather, compare; then the same with forward, backward and the gradient."""
    count = 0
    for mesh_shape, shape in itertools.product(MESHES[world_size], SHAPES):
        data, tensor = slices(mesh_shape)
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        tp_placements = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placement, dim in itertools.product(tp_placements, range(len(shape))):
            holder = Holder(distribute_tensor(whole, tensor, [placement]))
            local = holder.weight.to_local().clone()
            fully_shard(holder, mesh=data, shard_placement_fn=lambda _, dim=dim: Shard(dim))
            what = f"{shape} {placement} cut on {dim} over {mesh_shape}"
            sharded = holder.weight
            chunks = local.chunk(data.size(-1), dim)
            mine = data.get_local_rank(data.ndim - 1)
            expected = chunks[mine] if mine < len(chunks) else local.narrow(dim, 0, 0)
            assert torch.equal(sharded.to_local().reshape(-1), expected.reshape(-1)), what
            assert torch.equal(sharded.detach().full_tensor(), whole), what
            holder(2.0).backward()
            assert torch.equal(holder.weight.grad.full_tensor(), torch.full_like(whole, 2.0)), what
            assert holder.weight.grad.placements == sharded.placements, what
            count += 1
    return count


@pytest.mark.daily(world_size=[3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_cut(world_size: int):
    counts = run_ranks(world_size, check, timeout=300.0)
    assert set(counts) == {len(MESHES[world_size]) * sum(len(s) * (len(s) + 1) for s in SHAPES)}


# -- more ranks than there are processes: torch's LocalTensorMode keeps the tensors of all ranks in one ----------------


@dataclass(frozen=True)
class Cut:
    """A parameter of `parts` logical tensors, cut on `model_dim` over tp and on `data_dim` over dp."""

    dp: int
    tp: int
    shape: tuple[int, ...]
    parts: int = 1
    model_dim: int = 0
    data_dim: int = 0
    replicas: int = 1

    def held(self, whole: torch.Tensor, dp: int, tp: int) -> torch.Tensor:
        """The part of the rank at (dp, tp), by torch.chunk alone."""
        parts = [_chunk(part, self.model_dim, self.tp, tp) for part in whole.chunk(self.parts, self.model_dim)]
        return _chunk(torch.cat(parts, self.model_dim), self.data_dim, self.dp, dp).clone()


def _chunk(whole: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    chunks = whole.chunk(count, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def check_gathering(cut: Cut) -> bool:
    """Gathers the parameter, its double and its state dict's entry on every rank; whether axes were reordered."""
    names = ("dp_replicate", "dp", "tp")
    mesh = init_device_mesh("cpu", (cut.replicas, cut.dp, cut.tp), mesh_dim_names=names)
    data = mesh["dp"] if cut.replicas == 1 else mesh["dp_replicate", "dp"]
    whole = torch.arange(math.prod(cut.shape), dtype=torch.float32).view(cut.shape)
    holder = Holder(torch.zeros(1))
    local = replace(cut, dp=1, data_dim=0).held(whole, 0, 0)
    holder.weight = nn.Parameter(
        DTensor.from_local(
            local, mesh["tp"], [Shard(cut.model_dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    )
    if cut.parts > 1:
        declare_sub_blocks(holder, "weight", SubBlocks(tuple(f"part{i}" for i in range(cut.parts)), cut.model_dim))
    form = adapter.form(holder.weight, "weight", data_parallel_mesh(data, None), cut.data_dim, [(holder, "weight")])
    ranks = dict(zip(mesh.mesh.flatten().tolist(), itertools.product(*map(range, mesh.mesh.shape)), strict=True))
    with LocalTensorMode(len(ranks)):
        held = LocalTensor({rank: cut.held(whole, dp, tp) for rank, (_, dp, tp) in ranks.items()})
        sharded = replace(form, boxes=None).sharded(held)
        results = {"itself": (sharded, whole), "detached": (sharded.detach(), whole)}
        if cut.replicas == 1:
            results["doubled"] = (sharded * 2, whole * 2)
        for what, (tensor, expected) in results.items():
            full = tensor.full_tensor()
            seen = full._local_tensors if isinstance(full, LocalTensor) else {0: full}
            assert all(torch.equal(one, expected) for one in seen.values()), f"{cut}: {what}"
    return form.mesh.mesh_dim_names.index("tp") < form.mesh.mesh_dim_names.index("dp")


FUSED = [
    Cut(4, 2, (16, 2), 2),
    Cut(4, 2, (6, 2), 3),
    Cut(2, 4, (16, 2), 2),
    Cut(3, 2, (18,), 3),
    Cut(2, 3, (2, 12), 2, model_dim=1, data_dim=1),
    Cut(2, 3, (5, 12), 2, model_dim=1, data_dim=0),
    Cut(1, 4, (8, 3), 2),
    Cut(2, 2, (6,), 3, replicas=2),
]
UNEVEN = [Cut(4, 2, (length, 2)) for length in (9, 17, 25)] + [Cut(3, 2, (length,)) for length in (7, 13)]


def gathering(rank: int, world_size: int, cuts: list[Cut]) -> list[bool]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    reordered = []
    for cut in cuts:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cut.replicas * cut.dp * cut.tp)
        reordered.append(check_gathering(cut))
    return reordered


@pytest.mark.parametrize("cuts", [FUSED, UNEVEN], ids=["fused", "uneven"])
def test_many_ranks(cuts: list[Cut]):
    (reordered,) = run_ranks(1, gathering, cuts, isolated=True)
    assert all(reordered) if cuts is UNEVEN else sum(reordered) >= 4
