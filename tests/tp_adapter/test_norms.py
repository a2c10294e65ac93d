"""The norm of all gradients of a 2-D model, and clipping by it, are those of the whole model."""

import pytest
import torch

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.twins import assert_close
from tests.tp_adapter.models import NAMES, SPECS, build, shard


@pytest.mark.parametrize(
    ("model", "shape", "norm_type"),
    [
        ("language", (2, 2), 2.0),
        ("tied", (1, 2, 2), 2.0),
        ("tied", (2, 2), float("inf")),
        ("uneven_language", (1, 4), float("inf")),
        ("uneven_language", (2, 2), 2.0),
        ("uneven", (2, 2), 2.0),
        ("packed", (2, 2), 2.0),
        ("grouped", (2, 2), 2.0),
    ],
    ids=str,
)
@on_ranks(4)
def test_norms(rank: int, world_size: int, model: str, shape: tuple[int, ...], norm_type: float) -> None:
    whole, sharded, spec = build(model), build(model), SPECS[model]
    mesh = rank_mesh(shape, NAMES[len(shape)])
    data = mesh["dp"] if len(shape) == 2 else mesh["dp_replicate", "dp_shard"]
    spec.parallelize(sharded, mesh["tp"])
    shard(sharded, shardkit, data)
    ranks = data.mesh.flatten().tolist()
    for seed in range(len(ranks)):
        (spec.loss(whole, seed) / len(ranks)).backward()
    spec.loss(sharded, ranks.index(rank)).backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1, norm_type)
    assert expected > 0.1, "nothing would be clipped"
    seen = shardkit.clip_grad_norm_(sharded.parameters(), 0.1, norm_type)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=0.0)
    theirs = dict(whole.named_parameters())
    for fqn, parameter in sharded.named_parameters():
        assert_close(parameter.grad, theirs[fqn].grad, f"clipped gradient of {fqn}")
