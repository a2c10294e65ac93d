"""State dicts: the DTensors that stock gives, interchangeable both ways; test_placements.py saves and loads them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardkit.core as shardkit
from tests.support import on_ranks
from tests.support.meshes import data_mesh
from tests.support.models import MODELS, Composed
from tests.support.sharding import shard_each
from tests.support.trace import Trace, assert_same


def _build(api: Any, model: str, mesh: DeviceMesh, seed: int = 0, meta: bool = False) -> nn.Module:
    """`meta`: built there, sharded, and given memory."""
    torch.manual_seed(seed)
    spec = MODELS[model]
    with torch.device("meta" if meta else "cpu"):
        module = spec.build()
    shard_each(*spec.blocks(module), module, api=api, mesh=mesh)
    return module.to_empty(device="cpu") if meta else module


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, foreach=True)


def _loss(model: nn.Module, name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)  # the same data on all ranks: stock's sums have no order then
    return MODELS[name].loss(model(*MODELS[name].inputs(generator)))


def _train(model: nn.Module, name: str, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = _loss(model, name, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trace(tree: Any) -> Trace:
    trace = Trace()
    trace.add_tree("state", tree)
    return trace


def _look(trace: Trace, label: str, module: nn.Module) -> None:
    state = module.state_dict()
    trace.add(f"{label}: keys", list(state))
    for fqn, tensor in state.items():
        trace.add(f"{label}: {fqn}", tensor)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))


@pytest.mark.parametrize(
    ("world_size", "kind", "model"),
    [
        (1, "fsdp", "mlp"),
        (2, "fsdp", "mixed_dtypes"),
        (3, "fsdp", "transformer"),
        (4, "fsdp", "frozen"),
        (4, "hsdp", "mlp"),
    ],
)
@on_ranks()
def test_state_dict_is_that_of_stock(rank: int, world_size: int, kind: str, model: str) -> None:
    """Keys, their order, placements, local shapes, values: fresh, within a step, after it, after evaluation."""
    traces = []
    for api in (stock, shardkit):
        trace = Trace()
        module = _build(api, model, data_mesh(kind == "hsdp"))
        _look(trace, "fresh", module)
        loss = _loss(module, model, 0)
        _look(trace, "between forward and backward", module)
        loss.backward()
        _look(trace, "after backward", module)
        module.eval()
        with torch.no_grad():
            _loss(module, model, 1)
        _look(trace, "after evaluation", module)
        module.unshard()
        _look(trace, "unsharded", module)
        traces.append(trace)
    assert_same(*traces)


@on_ranks(2)
def test_a_state_dict_within_forward_changes_nothing(rank: int, world_size: int) -> None:
    """A state dict that a hook takes while modules run (as averaging may) frees nothing that they still read."""
    losses = []
    for take in (False, True):
        module = _build(shardkit, "mlp", data_mesh(hsdp=False))
        for inner in module.modules():
            if take:
                inner.register_forward_pre_hook(lambda *unused, root=module: root.state_dict() and None)
        loss = _loss(module, "mlp", 0)
        loss.backward()
        losses.append((loss.item(), [parameter.grad.to_local() for parameter in module.parameters()]))
    assert losses[0][0] == losses[1][0]
    assert all(torch.equal(one, other) for one, other in zip(losses[0][1], losses[1][1], strict=True))


FULL = StateDictOptions(full_state_dict=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "offload": {"cpu_offload": True},
    "ignore_frozen": {"ignore_frozen_params": True, "strict": False},
    "not_strict": {"strict": False},
    "flatten": {"flatten_optimizer_state_dict": True},
    # Not full_state_dict with flatten_optimizer_state_dict: torch 2.13 writes it but cannot read it back, with stock's
    # fully_shard either (KeyError: 'param_groups.0.params.0').
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


HELPER_CASES = [
    *((2, "fsdp", "mlp", name) for name in OPTIONS),
    *((1, "fsdp", "mlp", name) for name in ("default", "full", "broadcast")),
    *((3, "fsdp", "frozen", name) for name in ("default", "full", "broadcast", "ignore_frozen")),
    *((4, "hsdp", "mlp", name) for name in ("default", "broadcast")),
]


@pytest.mark.daily(world_size=[2, 4])
@pytest.mark.parametrize(("world_size", "kind", "model", "option"), HELPER_CASES)
@on_ranks(timeout=120.0)
def test_helpers_with_options(rank: int, world_size: int, kind: str, model: str, option: str) -> None:
    """Get with every option, compare with stock; set into a fresh model of either engine, compare again; train on."""
    mesh, options = data_mesh(kind == "hsdp"), OPTIONS[option]
    getting = StateDictOptions(**{name: value for name, value in options.items() if name != "broadcast_from_rank0"})
    setting = StateDictOptions(**options)
    traces: dict[str, Trace] = {}
    states: dict[str, Any] = {}
    for name, api in (("stock", stock), ("shardkit", shardkit)):
        module = _build(api, model, mesh, seed=1)
        optimizer = _optimizer(module)
        _train(module, model, optimizer, range(2))
        states[name] = get_state_dict(module, optimizer, options=getting)
        assert_same(_trace(states[name][0]), _trace(get_model_state_dict(module, options=getting)))
        assert_same(_trace(states[name][1]), _trace(get_optimizer_state_dict(module, optimizer, options=getting)))
        traces[name] = _trace(states[name])
        traces[name].add("keys", [list(states[name][0]), list(states[name][1])])
    assert_same(traces["stock"], traces["shardkit"])
    trained = {}
    for name, api, source in (("stock", stock, "shardkit"), ("shardkit", shardkit, "stock")):
        module = _build(
            api, model, mesh, seed=1 if options.get("ignore_frozen_params") else 2, meta=option == "broadcast"
        )
        optimizer = _optimizer(module)
        model_state, optimizer_state = map(dict, states[source])
        if options.get("broadcast_from_rank0"):  # set_state_dict would take the empty dicts of other ranks for a wish
            model_state, optimizer_state = ({}, {}) if rank else (model_state, optimizer_state)
            set_model_state_dict(module, model_state, options=setting)
            set_optimizer_state_dict(module, optimizer, optimizer_state, options=setting)
        else:
            set_state_dict(
                module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=setting
            )
        losses = _train(module, model, optimizer, range(5, 7))
        trained[name] = _trace([losses, get_state_dict(module, optimizer)])
    assert_same(trained["stock"], trained["shardkit"])


@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(2)
def test_full_state_dict_of_0_dim_parameters(rank: int, world_size: int, broadcast: bool) -> None:
    """Stock's FSDP2 has no 0-dim parameters, and torch's helpers hand them over as they are: whole and plain."""
    kept = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        scale = nn.Parameter(torch.rand(()))
        module = Composed(lambda m, x: m.linear(x) * m.scale, linear=nn.Linear(3, 5), scale=scale)
        shardkit.fully_shard(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        if kept:
            weights, moments = copy.deepcopy(kept[0]) if rank == 0 or not broadcast else ({}, {})
            setting = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            set_model_state_dict(module, weights, options=setting)
            set_optimizer_state_dict(module, optimizer, moments, options=setting)
        else:
            module(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        kept.append(copy.deepcopy(get_state_dict(module, optimizer, options=FULL)))
    assert_same(_trace(kept[0][0]), _trace(kept[1][0]))
    assert_same(_trace(kept[0][1]), _trace(kept[1][1]))


@on_ranks(2)
def test_loading_in_place(rank: int, world_size: int) -> None:
    """DCP reads the very parameters, so loading in place changes the next forward without set_state_dict."""
    module = _build(shardkit, "mlp", data_mesh(hsdp=False))
    first = _loss(module, "mlp", 0).item()
    saved = copy.deepcopy(get_model_state_dict(module))
    _train(module, "mlp", _optimizer(module), range(2))
    assert _loss(module, "mlp", 0).item() != first
    with torch.no_grad():
        for fqn, tensor in get_model_state_dict(module).items():
            tensor.copy_(saved[fqn])
    assert _loss(module, "mlp", 0).item() == first
