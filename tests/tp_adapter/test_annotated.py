"""Plain parameters that spmd_types annotates on axes of model parallelism: trained like DTensors on the whole mesh."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.core import DataParallelMeshDims, MixedPrecisionPolicy, full_state_dict, fully_shard
from tests.support import on_ranks, rank_mesh

pytest.importorskip("spmd_types")

KINDS = {"column": "S0", "row": "S1", "norm": "R", "gain": "R", "bias": "I"}
MESHES = {
    "FSDP": (("shard", "tp"), (2, 2)),
    "HSDP": (("replicate", "shard", "tp"), (2, 1, 2)),
    "tp first": (("tp", "shard"), (2, 2)),
    "one rank of tp": (("shard", "tp"), (4, 1)),
}
ODD, EVEN = 3, 4


class Parts(nn.Module):
    """`column` and `row` are parts of this rank of `tp`; of the others it has all, and `bias` sees the same on each."""

    def __init__(self, tp: int, size: int) -> None:
        super().__init__()
        shapes = {"column": (size, 5), "row": (size + 2, 2), "norm": (5,), "gain": (1,), "bias": (size,)}
        for number, (name, shape) in enumerate(shapes.items()):
            part = 100 * tp if KINDS[name].startswith("S") else 0
            generator = torch.Generator().manual_seed(number + part)
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = ((x * self.norm) @ self.column.t())[:, :2] @ self.row.t()
        return (y * self.gain).square().sum() + (x[:, : len(self.bias)] * self.bias).square().sum()


def batch(data: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(data))


def whole_gradients(size: int, ranks: int, tps: int) -> dict[str, torch.Tensor]:
    """The mean over the data-parallel ranks; parts are joined, sums are made over `tp`."""
    found: dict[str, list[list[torch.Tensor]]] = {name: [[] for _ in range(tps)] for name in KINDS}
    for tp in range(tps):
        for data in range(ranks // tps):
            model = Parts(tp, size)
            model(batch(data)).backward()
            for name, parameter in model.named_parameters():
                found[name][tp].append(parameter.grad)
    means = {name: [torch.stack(each).mean(0) for each in by_tp] for name, by_tp in found.items()}
    join = {"S0": torch.cat, "S1": lambda each: torch.cat(each, 1), "R": sum, "I": lambda each: each[0]}
    return {name: join[KINDS[name]](each) for name, each in means.items()}


def annotated(mesh: DeviceMesh, size: int, kinds: dict[str, str]) -> Parts:
    import spmd_types as spmd

    model = Parts(mesh["tp"].get_local_rank(), size)
    types = {"S0": spmd.S(0), "S1": spmd.S(1), "R": spmd.R, "I": spmd.I, "V": spmd.V, "P": spmd.P}
    with spmd.set_current_mesh(mesh):
        for name, kind in kinds.items():
            spmd.assert_type(getattr(model, name), {"tp": types[kind]})
    return model


def sharded(api: Any, mesh: DeviceMesh, size: int, **options: Any) -> Any:
    import spmd_types as spmd

    kind = DataParallelMeshDims if api is fully_shard else stock.DataParallelMeshDims
    dims = kind(shard="shard", replicate="replicate" if "replicate" in mesh.mesh_dim_names else None)
    with spmd.set_current_mesh(mesh):
        return api(annotated(mesh, size, KINDS), mesh=mesh, dp_mesh_dims=dims, **options)


@pytest.mark.parametrize(
    ("case", "size", "reduce_dtype"),
    [("FSDP", ODD, torch.float32), ("HSDP", EVEN, None), ("tp first", ODD, None), ("one rank of tp", EVEN, None)],
)
@on_ranks(4)
def test_trains_as_whole_tensors(
    rank: int, world_size: int, case: str, size: int, reduce_dtype: torch.dtype | None
) -> None:
    names, sizes = MESHES[case]
    mesh = rank_mesh(sizes, names)
    data = sum(place for place, name in zip(mesh.get_coordinate(), names, strict=True) if name != "tp")
    expected = whole_gradients(size, world_size, mesh["tp"].size())
    models = [sharded(fully_shard, mesh, size, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))]
    if torch.__version__ >= (2, 15) and case in ("FSDP", "HSDP") and size == EVEN:  # stock, which knows them since then
        models.append(sharded(stock.fully_shard, mesh, size))
    for model in models:
        model.unshard()
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter and parameter.shape == getattr(Parts(0, size), name).shape
            assert model is not models[0] or mesh["tp"].size() == 1 or len(parameter._local_type) == 2, name
        model.reshard()
        for _ in range(2):
            model.zero_grad()
            model(batch(data)).backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=name)
            assert tuple(parameter.placements) == tuple(models[-1].get_parameter(name).placements)
            assert parameter.device_mesh == models[-1].get_parameter(name).device_mesh
    values = full_state_dict(models[0])
    join = {"S0": torch.cat, "S1": lambda each: torch.cat(each, 1)}
    for name, kind in KINDS.items() if rank == 0 else ():
        each = [getattr(Parts(tp, size), name).detach() for tp in range(mesh["tp"].size())]
        assert torch.equal(values[name], join[kind](each) if kind in join else each[0]), name


@on_ranks(4)
def test_what_has_no_placement_is_refused(rank: int, world_size: int) -> None:
    mesh = rank_mesh((2, 2), ("shard", "tp"))
    dims = DataParallelMeshDims(shard="shard")
    for kind in "VP":
        with pytest.raises(NotImplementedError, match=f"'norm' with .*{kind} on the axis 'tp'.*use one of these"):
            fully_shard(annotated(mesh, EVEN, KINDS | {"norm": kind}), mesh=mesh, dp_mesh_dims=dims)
    import spmd_types as spmd

    model = annotated(mesh, EVEN, {})
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(model.bias, {"shard": spmd.R})
    with pytest.raises(ValueError, match=r"'bias' on .*, but not on the axis 'tp'"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model = annotated(mesh, EVEN, KINDS)
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(model.norm, {"shard": spmd.I})
    with pytest.raises(ValueError, match=r"'norm' with .*I on the data-parallel axis .*; expected .*R"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
