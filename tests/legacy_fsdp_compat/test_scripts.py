"""Things that FSDP1 scripts do and stock lets them do: the same numbers, names and types as with stock."""

import copy

import pytest
import torch
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.optim import _NamedOptimizer

from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    OURS,
    Setting,
    api,
    assert_same_tensors,
    batch,
    build,
    loss_of,
    train,
    whole_state,
    wrap,
)
from tests.support import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


# -- optimizers --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_optimizer_that_has_stepped_before_the_model_was_wrapped(rank: int, world_size: int) -> None:
    """Existing state is cut like the parameters. Stock's steps raise, so the reference is one process."""
    alone, original = build(), build()
    expected, optimizer = OPTIMIZERS["adam"](alone.parameters()), OPTIMIZERS["adam"](original.parameters())
    for model, its in ((alone, expected), (original, optimizer)):
        model(batch(0, 9)[0]).sum().backward()
        its.step()
        its.zero_grad()
    model = wrap(OURS, Setting(), original)
    state = copy.deepcopy(api(OURS).FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    train(model, optimizer, rank, range(2))
    for step in range(2):
        expected.zero_grad()
        (sum(loss_of(alone, one, step) for one in range(world_size)) / world_size).backward()
        expected.step()
    names = [name for name, _ in alone.named_parameters()]
    seen = whole_state(OURS, model)
    assert_same_tensors(dict(alone.named_parameters()), {name: seen[name] for name in names}, **TOLERANCE)
    assert list(state) == names


@pytest.mark.parametrize("in_groups", [False, True])
@on_ranks(2)
def test_optimizer_that_goes_by_names(rank: int, world_size: int, in_groups: bool) -> None:
    """Its keys are the names of `named_parameters()`. Stock's own conversion raises KeyError for them."""
    fsdp, kinds = api(OURS).FSDP, api(OURS).StateDictType
    model = wrap(OURS, Setting())
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


# -- arguments ---------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_scaled_losses_keep_their_dtype(rank: int, world_size: int) -> None:
    seen = []
    for kind in (sharded_grad_scaler.ShardedGradScaler, api(OURS).ShardedGradScaler):
        scaler = kind("cpu", 4.0)
        half, other = torch.tensor(1.5, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
        scaled = [scaler.scale(half), *scaler.scale([half, other]), *scaler.scale((torch.tensor(2.0),))]
        assert isinstance(scaler.scale((half,)), tuple)
        assert next(iter(scaler.scale(iter([half])))).dtype == torch.float16
        with pytest.raises(ValueError, match="outputs must be"):
            scaler.scale(3)
        seen.append([(value.dtype, value.tolist()) for value in scaled])
    assert seen[0] == seen[1]


# -- wrapping again ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_units_that_were_used_before(rank: int, world_size: int) -> None:
    """These calls do not make a unit a root: a module may still be wrapped around it."""
    for use in ("summon_full_params", "state_dict", "apply", "optim_state_dict"):
        fsdp = api(OURS).FSDP
        model = build()
        unit = model.blocks[0] = fsdp(model.blocks[0], use_orig_params=True, device_id=CPU)
        if use == "summon_full_params":
            with fsdp.summon_full_params(unit):
                pass
        elif use == "optim_state_dict":
            fsdp.optim_state_dict(unit, torch.optim.SGD(unit.parameters(), lr=0.1))
        else:
            getattr(unit, use)(*([lambda module: None] if use == "apply" else []))
        root = fsdp(model, use_orig_params=True, device_id=CPU)
        loss_of(root, rank, 0).backward()
        assert root.check_is_root()
        assert not unit.check_is_root()


# -- attributes that scripts read --------------------------------------------------------------------------------------


@on_ranks(1)
def test_deepcopy_is_refused(rank: int, world_size: int) -> None:
    model = wrap(OURS, Setting())
    with pytest.raises(RuntimeError, match="cannot be deep-copied"):
        copy.deepcopy(model)
