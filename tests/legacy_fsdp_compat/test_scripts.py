"""Training, and things that FSDP1 scripts do and stock lets them do: the same numbers, names and types."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.optim import _NamedOptimizer

from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    OURS,
    STOCK,
    TOLERANCE,
    Block,
    Setting,
    assert_same_tensors,
    backward_alone,
    batch,
    build,
    loss_of,
    train,
)
from tests.support import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@on_ranks(2)
def test_optimizer_that_has_stepped_before_the_model_was_wrapped(rank: int, world_size: int) -> None:
    """Existing state is cut like the parameters. Stock's steps raise, so the reference is one process."""
    alone, original = build(), build()
    expected, optimizer = OPTIMIZERS["adam"](alone.parameters()), OPTIMIZERS["adam"](original.parameters())
    for model, its in ((alone, expected), (original, optimizer)):
        model(batch(0, 9)[0]).sum().backward()
        its.step()
        its.zero_grad()
    model = OURS.wrapped(Setting(), original)
    state = copy.deepcopy(OURS.api.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"])
    train(model, optimizer, rank, range(2))
    for step in range(2):
        expected.zero_grad()
        backward_alone(alone, world_size, step)
        expected.step()
    names = [name for name, _ in alone.named_parameters()]
    seen = OURS.state(model)
    assert_same_tensors(dict(alone.named_parameters()), {name: seen[name] for name in names}, **TOLERANCE)
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


@on_ranks(1)
def test_scaled_losses_keep_their_dtype(rank: int, world_size: int) -> None:
    seen = []
    for kind in (sharded_grad_scaler.ShardedGradScaler, OURS.api.ShardedGradScaler):
        scaler = kind("cpu", 4.0)
        half, other = torch.tensor(1.5, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
        scaled = [scaler.scale(half), *scaler.scale([half, other]), *scaler.scale((torch.tensor(2.0),))]
        assert isinstance(scaler.scale((half,)), tuple)
        assert next(iter(scaler.scale(iter([half])))).dtype == torch.float16
        with pytest.raises(ValueError, match="outputs must be"):
            scaler.scale(3)
        seen.append([(value.dtype, value.tolist()) for value in scaled])
    assert seen[0] == seen[1]


@on_ranks(2)
def test_units_that_were_used_before(rank: int, world_size: int) -> None:
    """These calls do not make a unit a root: a module may still be wrapped around it."""
    for use in ("summon_full_params", "state_dict", "apply", "optim_state_dict"):
        fsdp = OURS.api.FSDP
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


@on_ranks(1)
def test_deepcopy_is_refused(rank: int, world_size: int) -> None:
    model = OURS.wrapped(Setting())
    with pytest.raises(RuntimeError, match="cannot be deep-copied"):
        copy.deepcopy(model)


class Nested(nn.Module):
    """Takes and returns dicts and lists; its first input may need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 5), Block(3), nn.Linear(5, 1)

    def forward(self, inputs: dict[str, Any], *, scale: list[float]) -> dict[str, list[torch.Tensor]]:
        hidden = self.block(self.first(inputs["x"][0]))
        return {"out": [self.last(hidden) * scale[0], hidden]}


@on_ranks(2)
def test_nested_inputs_and_groups_of_parameters(rank: int, world_size: int) -> None:
    """Without prefetching, with hyper-parameters by kind of parameter, and an input that sometimes needs a gradient."""
    seen = {}
    for engine in (STOCK, OURS):
        torch.manual_seed(0)
        policy = engine.api.ModuleWrapPolicy({Block})
        model = engine.wrapped(Setting(), Nested(), auto_wrap_policy=policy, backward_prefetch=None)
        named = dict(model.named_parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0, "lr": 0.05},
                {"params": [p for name, p in named.items() if "bias" not in name], "weight_decay": 0.3, "lr": 0.01},
            ],
            eps=1e-3,
        )
        gradients = []
        for step in range(3):
            x = batch(rank, step)[0].requires_grad_(step % 2 == 0)
            out, hidden = model({"x": [x], "unused": None}, scale=[2.0])["out"]
            (out.sum() + hidden.square().sum()).backward()
            gradients.append(torch.zeros_like(x) if x.grad is None else x.grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        seen[engine] = {"gradients": torch.stack(gradients), **engine.state(model)}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


@on_ranks(2)
def test_loading_into_another_wrapping(rank: int, world_size: int) -> None:
    """Full states go from any wrapping into any other, with a frozen parameter among them."""
    names = OURS.api
    frozen = build()
    frozen.blocks[1].up.weight.requires_grad_(False)
    model = OURS.wrapped(Setting(), frozen)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, rank, range(2))
    state, optim = OURS.state(model), names.FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    expected = train(model, optimizer, rank, range(2, 4))
    for setting in (Setting(policy=False), Setting("NO_SHARD"), Setting("SHARD_GRAD_OP", policy=False)):
        other = build(1)
        other.blocks[1].up.weight.requires_grad_(False)
        other = OURS.wrapped(setting, other)
        its_optimizer = OPTIMIZERS["adam"](other.parameters())
        other.load_state_dict(state)
        its_optimizer.load_state_dict(names.FSDP.optim_state_dict_to_load(other, its_optimizer, optim))
        torch.testing.assert_close(train(other, its_optimizer, rank, range(2, 4)), expected, **TOLERANCE)


@on_ranks(2)
def test_mixed_state_dict_types(rank: int, world_size: int) -> None:
    """Types of parts, contexts inside contexts: the same kinds of values as stock's, and the same settings after."""
    seen = {}
    for engine in (STOCK, OURS):
        names = engine.api
        fsdp, kinds = names.FSDP, names.StateDictType
        model = engine.wrapped(Setting())
        with fsdp.state_dict_type(model, kinds.SHARDED_STATE_DICT):
            outer = {name: type(value).__name__ for name, value in model.state_dict().items()}
            with fsdp.state_dict_type(model, kinds.LOCAL_STATE_DICT):
                inner = {name: type(value).__name__ for name, value in model.state_dict().items()}
            assert fsdp.get_state_dict_type(model).state_dict_type is kinds.SHARDED_STATE_DICT
        before = fsdp.set_state_dict_type(model.blocks[0], kinds.SHARDED_STATE_DICT)
        assert before.state_dict_type is kinds.FULL_STATE_DICT
        with pytest.raises(AssertionError):
            fsdp.get_state_dict_type(model)
        part = {name: type(value).__name__ for name, value in model.blocks[0].state_dict().items()}
        mixed = {name: type(value).__name__ for name, value in model.state_dict().items()}
        with pytest.raises(AssertionError, match=r"state.dict.type"):
            fsdp.set_state_dict_type(model, kinds.FULL_STATE_DICT)
        seen[engine] = outer, set(inner.items()), part, mixed
    assert seen[OURS] == seen[STOCK]


@on_ranks(2)
def test_clipping_of_replicated_gradients(rank: int, world_size: int) -> None:
    norms = {}
    for engine in (STOCK, OURS):
        model = engine.wrapped(Setting("NO_SHARD"))
        loss_of(model, rank, 0).backward()
        norms[engine] = {"norm": model.clip_grad_norm_(0.1), **engine.gradients(model)}
    assert_same_tensors(norms[STOCK], norms[OURS], **TOLERANCE)
    pairs = [dist.new_group([one]) for one in range(world_size)]
    groups = (dist.group.WORLD, pairs[rank])
    model = OURS.wrapped(Setting("HYBRID_SHARD"), process_group=groups)
    loss_of(model, rank, 0).backward()
    torch.testing.assert_close(model.clip_grad_norm_(0.1), norms[STOCK]["norm"], **TOLERANCE)


# Any two of the four factors meet in every way; one rank, and four, of which some have empty shards.
SETTINGS = [
    (Setting("FULL_SHARD", True, "adamw"), 2),
    (Setting("FULL_SHARD", False, "sgd"), 3),
    (Setting("SHARD_GRAD_OP", True, "sgd"), 3),
    (Setting("SHARD_GRAD_OP", False, "adamw"), 2),
    (Setting("NO_SHARD", True, "sgd"), 2),
    (Setting("NO_SHARD", False, "adamw"), 3),
    (Setting(optimizer="momentum"), 1),
    (Setting(optimizer="momentum"), 4),
]


@pytest.mark.parametrize(("setting", "world_size"), SETTINGS, ids=str)
@on_ranks()
def test_training_is_that_of_stock(rank: int, world_size: int, setting: Setting) -> None:
    runs = {}
    for engine in (STOCK, OURS):
        model = engine.wrapped(setting)
        optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
        losses = train(model, optimizer, rank, range(3))
        loss_of(model, rank, 99).backward()
        gradients = engine.gradients(model) if setting.use_orig_params else None
        runs[engine] = (losses, engine.state(model), gradients)
    torch.testing.assert_close(runs[OURS][0], runs[STOCK][0], **TOLERANCE)
    assert_same_tensors(runs[STOCK][1], runs[OURS][1], **TOLERANCE)
    if setting.use_orig_params:
        assert_same_tensors(runs[STOCK][2], runs[OURS][2], **TOLERANCE)
