"""Trained and clipped as one process does it; fused weights are whole and in order in every state."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import shardkit.core as shardkit
from shardkit.tp_adapter import SubBlocks, logical_state_dict
from tests.support import on_ranks, rank_mesh
from tests.support.twins import Twins, assert_close
from tests.tp_adapter.models import HEADS, NAMES, PROJECTIONS, SPECS, axes, build, shard
from tests.tp_adapter.trainee import Trainee


@pytest.mark.daily(shape=[(2, 2), (1, 2, 2)])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (2, 2)) for name in ("language", "uneven_language", "fused", "packed", "grouped")),
        *((name, (4, 1)) for name in ("packed", "grouped")),
        *((name, (1, 2, 2)) for name in ("fused", "grouped")),
    ],
    ids=str,
)
@on_ranks(4)
def test_trains_like_one_process(rank: int, world_size: int, name: str, shape: tuple[int, ...]) -> None:
    whole, model, spec = build(name), build(name), SPECS[name]
    data, tensor = axes(shape)
    spec.parallelize(model, tensor)
    shard(model, shardkit, data)
    ranks = data.mesh.flatten().tolist()
    twins = Twins(model, whole, ranks.index(rank), len(ranks))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (whole, model)]
    theirs = dict(whole.named_parameters())
    for step in range(2):
        twins.backward(lambda one, place, step=step: spec.loss(one, 10 * step + place))
        twins.check_gradients()
        norm_type = 2.0 if step else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01, norm_type)
        assert norm > 0.01, "nothing would be clipped"
        torch.testing.assert_close(
            shardkit.clip_grad_norm_(model.parameters(), 0.01, norm_type), norm, rtol=1e-5, atol=0
        )
        twins.check_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.check_parameters()
    full = shardkit.full_state_dict(model, rank0_only=False)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    momenta = get_optimizer_state_dict(model, optimizers[1], options=StateDictOptions(full_state_dict=True))["state"]
    for fqn, tensor in whole.state_dict().items():
        assert_close(full[fqn], tensor, fqn)
        assert torch.equal(gathered[fqn], full[fqn]), fqn
        assert_close(momenta[fqn]["momentum_buffer"], optimizers[0].state[theirs[fqn]]["momentum_buffer"], fqn)
    for assign in (False, True):
        full = {fqn: tensor + 1 for fqn, tensor in full.items()}
        shardkit.load_full_state_dict(model, full, assign=assign)
        loaded = shardkit.full_state_dict(model, rank0_only=False)
        assert not [fqn for fqn in full if not torch.equal(loaded[fqn], full[fqn])], assign


@on_ranks(1)
def test_a_taken_name_is_refused(rank: int, world_size: int) -> None:
    trainee = Trainee.of("fused", (1, 1), 1)
    state = trainee.model.state_dict()
    state["blocks.0.up.weight"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"'blocks\.0\.gate_up\.weight' would be saved as 'blocks\.0\.up\.weight'"):
        logical_state_dict(trainee.model, state)


@on_ranks(2)
def test_replaced_parameters_stay_fused(rank: int, world_size: int) -> None:
    """Parameters stay fused if a call replaces their tensors, before fully_shard and after it."""
    mesh, spec = rank_mesh((1, 2), NAMES[2]), SPECS["fused"]
    rows = [(rank * 4, 0), (8 + rank * 4, 0)]
    steps = {
        "to": lambda model: model.to(torch.float64),
        "to_empty": lambda model: model.to_empty(device="cpu"),
        "assign": lambda model: model.load_state_dict(dict(model.state_dict()), assign=True),
    }
    for what, step in steps.items():
        model = build("fused")
        spec.parallelize(model, mesh["tp"])
        step(model)
        shard(model, shardkit, mesh["dp"])
        weight = model.state_dict()["blocks.0.gate_up.weight"]
        assert [tuple(chunk.offsets) for chunk in weight.__create_chunk_list__()] == rows, what
        step(model)
        assert "blocks.0.gate.weight" in logical_state_dict(model, model.state_dict()), what
    with torch.device("meta"):
        model = spec.build()
    spec.parallelize(model, mesh["tp"])
    shard(model, shardkit, mesh["dp"])
    shardkit.materialize(model)
    spec.loss(model, 1).backward()
    weight = model.state_dict()["blocks.0.gate_up.weight"]
    assert [tuple(chunk.offsets) for chunk in weight.__create_chunk_list__()] == rows
    assert "blocks.0.gate.weight" in logical_state_dict(model, model.state_dict())


@on_ranks(1)
def test_every_kind_of_state_dict(rank: int, world_size: int) -> None:
    trainee = Trainee.of("packed", (1, 1), 1)
    model, whole = trainee.model, {name: one.full_tensor() for name, one in trainee.model.state_dict().items()}
    full = logical_state_dict(model, whole)
    assert torch.equal(torch.cat([full[f"{name}.weight"] for name in "qkv"]), whole["qkv.weight"])
    assert full["k.weight"].data_ptr() == whole["qkv.weight"][4:].data_ptr(), "a view"
    assert torch.equal(full["out.weight"], whole["out.weight"])
    flat = get_optimizer_state_dict(
        model, trainee.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    logical = logical_state_dict(model, flat)
    assert logical["state.k.weight.exp_avg"].shape == (4, 6)
    assert logical["state.v.bias.step"] is flat["state.qkv.bias.step"]
    assert logical["param_groups.q.weight.lr"] == flat["param_groups.qkv.weight.lr"]
    assert not [name for name in logical if "qkv" in name]
    with pytest.raises(ValueError, match=r"'state\.qkv\.weight\.row' has shape \(12,\).*\(12, 6\).*'q', 'k', 'v'"):
        logical_state_dict(model, {"state.qkv.weight.row": torch.zeros(12)})
    # Names with wrappers, as a plain state dict has them, and a second name of the same parameter.
    layer, wrapper, twin = model.qkv, torch.nn.Module(), torch.nn.Module()
    model.qkv, wrapper._orig_mod, twin.qkv = wrapper, layer, torch.nn.Module()
    model.twin, twin.qkv.weight = twin, layer.weight
    assert "qkv._orig_mod.weight" in model.state_dict()
    logical = logical_state_dict(model, model.state_dict())
    assert {"k.weight", "k.bias", "twin.v.weight", "out.weight"} < logical.keys()
    assert not [name for name in logical if "qkv" in name]


@on_ranks(4)
def test_assigned_tensors_are_gathered_right(rank: int, world_size: int) -> None:
    """Assigned tensors get the order of cuts of the placements, both at once and after they were used."""
    trainee = Trainee.of("packed", (2, 2), 1)
    model = trainee.model
    before = model.qkv.weight.detach().full_tensor()
    for step in range(2):
        state = {
            name: DTensor.from_local(
                value.to_local() + 1, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
            )
            for name, value in model.state_dict().items()
        }
        model.load_state_dict(state, assign=True)
        if step:
            SPECS["packed"].loss(model, 1).backward()
            assert model.qkv.weight.grad.full_tensor().shape == before.shape
        model.reshard()
        for weight in (model.qkv.weight, model.state_dict()["qkv.weight"]):
            assert torch.equal(weight.detach().full_tensor(), before + 1 + step)
    # With the axes as the user has them, the same placements would say something else.
    mesh = rank_mesh((2, 2), NAMES[2])
    assert model.qkv.weight.device_mesh.mesh_dim_names == ("tp", "dp")
    weight = state["qkv.weight"]
    state["qkv.weight"] = DTensor.from_local(
        weight.to_local(), mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    with pytest.raises(ValueError, match=r"'qkv\.weight' was replaced .* .*dp=2, tp=2.*; expe.*tp=2, dp=2"):
        model.load_state_dict(state, assign=True)


@on_ranks(2)
def test_a_stack_that_is_not_yet_sharded_is_refused(rank: int, world_size: int) -> None:
    """Before fully_shard a stack's placements are those of computing: they would be saved as other rows."""
    mesh, model = rank_mesh((1, 2), NAMES[2]), build("fused")
    SPECS["fused"].parallelize(model, mesh["tp"])
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.gate_up\.weight' has placements \(Shard\(dim=0\),\).*fully_shard"
    ):
        logical_state_dict(model, model.state_dict())
    shard(model, shardkit, mesh["dp"])
    assert "blocks.0.gate.weight" in logical_state_dict(model, model.state_dict())
    # The ranks' parts are whole groups, so the placements describe them.
    model = build("grouped")
    whole = model.state_dict()["blocks.0.qkv_proj.weight"].clone()
    SPECS["grouped"].parallelize(model, mesh["tp"])
    state = logical_state_dict(model, model.state_dict())
    rows = SubBlocks(PROJECTIONS, sizes=HEADS.sizes).split(whole)[0].chunk(2)[rank]
    assert torch.equal(state["blocks.0.q_proj.weight"].packed(), rows)
