"""Parameters that spmd_types annotates, as torchtitan does: taken where they are whole, refused where they are not."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.core import fully_shard
from tests.support import on_ranks

pytest.importorskip("spmd_types")

AXES = ("replicate", "shard", "tp")


def _mesh(shape: tuple[int, int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES)


def _annotated(mesh: DeviceMesh, kinds: dict[str, str]) -> nn.Module:
    import spmd_types as spmd

    letters = {"R": spmd.R, "I": spmd.I, "P": spmd.P, "V": spmd.V, "S": spmd.S(0)}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(model[0].weight, {name: letters[kind] for name, kind in kinds.items()})
    return model


@pytest.mark.parametrize(
    ("world_size", "shape", "kinds"),
    [
        (2, (1, 2, 1), {"shard": "R"}),
        (2, (1, 2, 1), {"shard": "R", "tp": "V"}),  # an axis of one rank
        (4, (2, 2, 1), {"replicate": "R", "shard": "R"}),
        (4, (1, 2, 2), {"shard": "R", "tp": "I"}),
    ],
)
@on_ranks()
def test_whole_parameters_are_taken(
    rank: int, world_size: int, shape: tuple[int, int, int], kinds: dict[str, str]
) -> None:
    mesh = _mesh(shape)
    model, plain = _annotated(mesh, kinds), _annotated(mesh, {})
    axes = mesh["replicate", "shard"] if shape[0] > 1 else mesh["shard"]
    x = torch.arange(8.0).view(2, 4)
    for one in (model, plain):
        fully_shard(one, mesh=axes)
        one(x).square().sum().backward()
    for seen, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(seen.grad.full_tensor(), expected.grad.full_tensor())


@pytest.mark.parametrize(
    ("shape", "kinds", "message"),
    [
        ((1, 1, 2), {"tp": "S"}, r".*V on the mesh axis .*; expected .*I"),
        ((1, 1, 2), {"tp": "R"}, r".*R on the mesh axis .*; expected .*I"),  # its gradients would have to be summed
        ((1, 2, 1), {"shard": "V"}, r".*V on the mesh axis .*; expected .*R"),
        ((2, 1, 1), {"replicate": "R"}, r".*R on the mesh axis .*; expected .*I"),  # not an axis of this call
    ],
)
@on_ranks(2)
def test_parts_are_refused(
    rank: int, world_size: int, shape: tuple[int, int, int], kinds: dict[str, str], message: str
) -> None:
    mesh = _mesh(shape)
    model = _annotated(mesh, kinds)
    with pytest.raises(NotImplementedError, match=rf"annotates parameter '0.weight' with {message}"):
        fully_shard(model, mesh=mesh["shard"])
    assert type(model) is nn.Sequential and type(model[0].weight) is nn.Parameter
