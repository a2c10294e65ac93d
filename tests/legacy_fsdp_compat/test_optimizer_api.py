"""The optimizer methods of FSDP1's API: every form of state, there and back, with odd optimizers."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _NamedOptimizer
from torch.distributed.tensor import DTensor, Replicate

from tests.legacy_fsdp_compat.both import (
    OPTIMIZERS,
    OURS,
    STOCK,
    TOLERANCE,
    Engine,
    Setting,
    alone,
    assert_same_tensors,
    backward_alone,
    batch,
    build,
    loss_of,
    named_parameters,
    train,
)
from tests.support import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


ADAM = Setting(optimizer="adam")


@on_ranks(2)
def test_groups_keep_their_hyper_parameters(rank: int, world_size: int) -> None:
    """Groups with hyper-parameters of their own, an empty one, parameters without state, and some left out."""
    names = OURS.api
    model = OURS.wrapped(Setting())
    named = dict(named_parameters(model))
    weights = [p for name, p in named.items() if name.endswith("weight") and "out" not in name]
    biases = [p for name, p in named.items() if name.endswith("bias") and "out" not in name]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}])
    optimizer.add_param_group({"params": [], "lr": 0.5, "betas": (0.1, 0.2), "schedule": [1, 2]})
    for parameter in biases:
        parameter.requires_grad_(False)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    state = names.FSDP.optim_state_dict(model, optimizer)
    saved = state["param_groups"]
    assert [group["lr"] for group in saved] == [0.02, 1e-3, 0.5]
    assert saved[2]["params"] == []
    assert saved[2]["betas"] == (0.1, 0.2)
    optimizer.param_groups[2]["schedule"].append(3)
    assert saved[2]["schedule"] == [1, 2], "training goes on while a state dict is written"
    assert "inp.bias" in saved[1]["params"]
    assert "inp.bias" not in state["state"]
    assert not any(name.startswith("out") for group in saved for name in group["params"])
    before = copy.deepcopy(state)
    loaded = names.FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    assert state.keys() == before.keys()
    assert [len(group["params"]) for group in loaded["param_groups"]] == [len(weights), len(biases), 0]
    optimizer.param_groups[2]["schedule"].append(4)
    assert state["param_groups"][2]["schedule"] == [1, 2], "and after it was loaded"
    again = names.FSDP.optim_state_dict(model, optimizer)
    for name, values in state["state"].items():
        assert_same_tensors(values, again["state"][name], rtol=0, atol=0)
    state["param_groups"][0]["params"].append("out.weight")
    with pytest.raises(ValueError, match=r"'out\.weight', which is not in the optimizer"):
        names.FSDP.optim_state_dict_to_load(model, optimizer, state)
    state["param_groups"][0]["params"][-1] = "nowhere"
    with pytest.raises(ValueError, match="'nowhere', which is not in the model"):
        names.FSDP.optim_state_dict_to_load(model, optimizer, state)
    state["param_groups"][0]["params"].pop()
    state["state"]["inp.weight"]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'inp.weight: exp_avg' has shape \(2, 2\), the parameter has \(5, 4\)"):
        names.FSDP.optim_state_dict_to_load(model, optimizer, state)
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(ValueError, match="not in the model"):
        names.FSDP.optim_state_dict(model, foreign)


@on_ranks(2)
def test_rekey_optim_state_dict(rank: int, world_size: int) -> None:
    """A full state by name goes into a model without FSDP, and comes back."""
    names = OURS.api
    model, optimizer = OURS.start(ADAM, 0)
    train(model, optimizer, rank, range(2))
    full = names.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain = build()
    plain_optimizer = OPTIMIZERS["adam"](plain.parameters())

    def rekeyed(state: Any, kind: str, engine: Engine = OURS, **by: Any) -> dict[str, Any]:
        kinds = engine.api.OptimStateKeyType
        by = by or {"optim": plain_optimizer}
        return engine.api.FSDP.rekey_optim_state_dict(state, kinds[kind], plain, **by)

    plain_optimizer.load_state_dict(rekeyed(full, "PARAM_ID"))
    assert torch.equal(plain_optimizer.state[plain.inp.weight]["exp_avg"], full["state"]["inp.weight"]["exp_avg"])
    named, of_stock = (rekeyed(plain_optimizer.state_dict(), "PARAM_NAME", engine) for engine in (OURS, STOCK))
    assert set(named["state"]) == set(full["state"])
    assert named["param_groups"] == of_stock["param_groups"]
    assert rekeyed(named, "PARAM_NAME") is named
    by_input, of_stock = (
        rekeyed(full, "PARAM_ID", engine, optim_input=list(plain.parameters())) for engine in (OURS, STOCK)
    )
    assert by_input["param_groups"] == of_stock["param_groups"]
    assert set(by_input["state"]) == set(of_stock["state"])
    for state, text in (({"nowhere": {}}, "nowhere"), ({"a": {}, 1: {}}, "names or numbers")):
        with pytest.raises(ValueError, match=text):
            rekeyed({"state": state, "param_groups": []}, "PARAM_ID")
    empty = {"state": {}, "param_groups": full["param_groups"]}  # of an optimizer that keeps nothing
    assert rekeyed(empty, "PARAM_NAME") is empty
    assert rekeyed(empty, "PARAM_ID")["param_groups"][0]["params"] == list(range(len(full["state"])))
    with pytest.raises(ValueError, match="needs the key 'state'"):
        names.FSDP.scatter_full_optim_state_dict(None, model, optim=optimizer)


@on_ranks(2)
def test_rank0_only_and_disagreement(rank: int, world_size: int) -> None:
    names = OURS.api
    model, optimizer = OURS.start(ADAM, 0)
    train(model, optimizer, rank, range(2))
    config = names.FullOptimStateDictConfig(rank0_only=True)
    with names.FSDP.state_dict_type(
        model, names.StateDictType.FULL_STATE_DICT, names.FullStateDictConfig(rank0_only=True), config
    ):
        state = names.FSDP.optim_state_dict(model, optimizer)
        assert (state == {}) == (rank != 0)
        before = {id(p): values["exp_avg"].to_local().clone() for p, values in optimizer.state.items()}
        optimizer.load_state_dict(names.FSDP.optim_state_dict_to_load(model, optimizer, state))
    assert all(torch.equal(values["exp_avg"].to_local(), before[id(p)]) for p, values in optimizer.state.items())
    if rank == 1:
        del optimizer.state[next(iter(optimizer.state))]
    with pytest.raises(RuntimeError, match=r"'inp.weight' is .* on rank 0 and None on rank 1"):
        names.FSDP.optim_state_dict(model, optimizer)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_parameters_without_state(rank: int, world_size: int, use_orig_params: bool) -> None:
    """A flat parameter has state as a whole: zeros for the parameters without state."""
    names = OURS.api
    model, optimizer = OURS.start(replace(ADAM, use_orig_params=use_orig_params), 0)
    train(model, optimizer, rank, range(2))
    for name, parameter in named_parameters(model):
        if name in ("inp.bias", "blocks.1.up.weight", "blocks.1.up.bias", "blocks.1.down.weight", "blocks.1.down.bias"):
            del optimizer.state[parameter]
    for values in optimizer.state.values():
        values["exp_avg_sq"] = values["exp_avg_sq"].double()
    state = names.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert "inp.bias" in state["param_groups"][0]["params"]
    assert "blocks.1.up.weight" not in state["state"], "of the whole unit there is none"
    if use_orig_params:
        assert "inp.bias" not in state["state"]
        return
    expected = {"step": torch.tensor(2.0), "exp_avg": torch.zeros(5), "exp_avg_sq": torch.zeros(5).double()}
    assert_same_tensors(expected, state["state"]["inp.bias"], rtol=0, atol=0)


class Factored(torch.optim.Optimizer):
    """Keeps a row and a column of a matrix, as Adafactor does; torch's own does not step on sharded DTensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, squares = self.state[parameter], parameter.grad * parameter.grad
            kept = {"row_var": -1, "col_var": -2} if parameter.ndim == 2 else {}
            for name, dim in kept.items():
                total = squares.sum(dim, keepdim=True)
                if isinstance(total, DTensor):
                    total = total.redistribute(placements=[Replicate()])
                state[name] = state[name] + total if name in state else total
                total = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
                parameter.sub_(parameter.grad, alpha=0.1 / (1 + total.sum().item()))


@pytest.mark.parametrize(("use_orig_params", "kind"), [(True, "FULL"), (False, "SHARDED")])
@on_ranks(2)
def test_factored_state(rank: int, world_size: int, use_orig_params: bool, kind: str) -> None:
    """State of another shape than its parameter is whole in every state dict, and is loaded as it was."""
    names = OURS.api
    setting = Setting(use_orig_params=use_orig_params)
    model = OURS.wrapped(setting)
    optimizer = Factored(model.parameters())
    train(model, optimizer, rank, range(2))
    weights = OURS.state(model)
    with OURS.of_type(kind, model):
        state = names.FSDP.optim_state_dict(model, optimizer)
    full = names.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    found = {key: tuple(one.shape) for key, one in state["state"]["inp.weight"].items()}
    assert found == {"row_var": (5, 1), "col_var": (1, 4)}
    # Of the last layer, one row of five, the column has the shape of the parameter, but is not cut like it.
    assert tuple(full["state"]["out.weight"]["col_var"].shape) == (1, 5)
    losses = train(model, optimizer, rank, range(2, 4))
    again = OURS.wrapped(setting, build(1))
    again.load_state_dict(weights)
    loaded = Factored(again.parameters())
    with OURS.of_type(kind, again):
        loaded.load_state_dict(names.FSDP.optim_state_dict_to_load(again, loaded, state))
        state["state"]["inp.weight"]["row_var"] = torch.zeros(4, 1)
        with pytest.raises(ValueError, match=r"'inp.weight: row_var' has shape \(4, 1\)"):
            names.FSDP.optim_state_dict_to_load(again, loaded, state)
    filters = names.FSDP(nn.Conv1d(4, 3, 5), use_orig_params=use_orig_params)
    of_filters = {"state": {"weight": {"sum": torch.zeros(1, 4, 5)}}, "param_groups": []}
    with pytest.raises(ValueError, match=r"'weight: sum' has shape \(1, 4, 5\)"):  # no row or column of a matrix
        names.FSDP.optim_state_dict_to_load(filters, torch.optim.Adam(filters.parameters()), of_filters)
    torch.testing.assert_close(train(again, loaded, rank, range(2, 4)), losses, rtol=0, atol=0)
    plain, its = alone(world_size, 2, Factored)
    expected = {name: its.state[one] for name, one in plain.named_parameters() if one in its.state}
    assert full["state"].keys() == expected.keys()
    for name, values in expected.items():
        assert_same_tensors(values, full["state"][name], **TOLERANCE)


@on_ranks(2)
def test_optimizer_that_has_stepped_before_the_model_was_wrapped(rank: int, world_size: int) -> None:
    """Existing state is cut like the parameters. Stock's steps raise, so the reference is one process."""
    plain, original = build(), build()
    expected, optimizer = OPTIMIZERS["adam"](plain.parameters()), OPTIMIZERS["adam"](original.parameters())
    for model, its in ((plain, expected), (original, optimizer)):
        model(batch(0, 9)[0]).sum().backward()
        its.step()
        its.zero_grad()
    model = OURS.wrapped(Setting(), original)
    state = copy.deepcopy(OURS.api.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    train(model, optimizer, rank, range(2))
    for step in range(2):
        expected.zero_grad()
        backward_alone(plain, world_size, step)
        expected.step()
    names = [name for name, _ in plain.named_parameters()]
    seen = OURS.state(model)
    assert_same_tensors(dict(plain.named_parameters()), {name: seen[name] for name in names}, **TOLERANCE)
    assert list(state) == names


@pytest.mark.parametrize("in_groups", [False, True])
@on_ranks(2)
def test_optimizer_that_goes_by_names(rank: int, world_size: int, in_groups: bool) -> None:
    """Its keys are the names of `named_parameters()`. Stock's own conversion raises KeyError for them."""
    fsdp, kinds = OURS.api.FSDP, OURS.api.StateDictType
    model = OURS.wrapped(Setting())
    groups = [{"params": list(model.parameters())}] if in_groups else None
    optimizer = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, module=model, lr=0.05)
    plain = torch.optim.Adam(model.parameters(), lr=0.05)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    with fsdp.state_dict_type(model, kinds.SHARDED_STATE_DICT):
        state = fsdp.optim_state_dict(model, optimizer)
        assert next(iter(state["state"])) == "inp.weight"
        before = {name: value["exp_avg"].to_local().clone() for name, value in optimizer.state_dict()["state"].items()}
        loadable = fsdp.optim_state_dict_to_load(model, optimizer, state, is_named_optimizer=True)
        for one in optimizer.state.values():
            one["exp_avg"].zero_()
        optimizer.load_state_dict(loadable)
        after = {name: value["exp_avg"].to_local() for name, value in optimizer.state_dict()["state"].items()}
        assert_same_tensors(before, after, rtol=0, atol=0)
        plain.load_state_dict(fsdp.optim_state_dict_to_load(model, plain, state))
        assert_same_tensors(
            {str(index): value for index, value in enumerate(before.values())},
            {str(index): value["exp_avg"].to_local() for index, value in enumerate(plain.state.values())},
        )
