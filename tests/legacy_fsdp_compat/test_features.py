"""FSDP1's features one by one, against stock where stock runs on CPU, against a single process where it does not."""

import functools
import sys
import types
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from shardkit.core import fully_shard
from tests.core.api.overflow import Layers, finds_an_overflow
from tests.legacy_fsdp_compat.both import (
    CPU,
    OURS,
    STOCK,
    Block,
    Model,
    Setting,
    api,
    assert_same_tensors,
    batch,
    build,
    loss_of,
    train,
    whole_gradients,
    whole_state,
    wrap,
)
from tests.support import on_ranks, rank_mesh, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def alone(world_size: int, steps: int = 3) -> dict[str, Any]:
    """The same training in one process, without any FSDP."""
    model = build()
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(world_size)) / world_size).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# -- mixed precision ---------------------------------------------------------------------------------------------------


class Sees(nn.Module):
    """Keeps the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        self.seen.append(extra.dtype)
        return self.linear(x.to(self.linear.weight.dtype))


class Passes(nn.Module):
    """Gives the unit below it an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.out = Sees(), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.below(x, torch.ones(1)).to(self.out.weight.dtype))


@on_ranks(2)
def test_which_inputs_are_cast(rank: int, world_size: int) -> None:
    seen: dict[str, list[torch.dtype]] = {}
    for engine in (STOCK, OURS):
        names = api(engine)
        seen[engine] = []
        for cast in (False, True):
            mixed = names.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
            policy = names.ModuleWrapPolicy({Sees})
            model = wrap(engine, Setting(), Passes(), mixed_precision=mixed, auto_wrap_policy=policy)
            model(torch.ones(2, 4)).sum().backward()
            seen[engine] += model.below.seen
    assert seen[OURS] == seen[STOCK] == [torch.float32, torch.bfloat16]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@on_ranks(2)
def test_batch_norm_is_wrapped_alone_in_full_precision(rank: int, world_size: int) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        names = api(engine)
        torch.manual_seed(0)
        mixed = names.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        policy = functools.partial(names.size_based_auto_wrap_policy, min_num_params=10_000)
        model = wrap(engine, Setting(), Norms(), mixed_precision=mixed, auto_wrap_policy=policy)
        assert isinstance(model.norm, names.FSDP)
        assert not isinstance(model.first, names.FSDP)
        losses = train(model, sgd(model), rank, range(2))
        assert model.norm.running_mean.dtype == torch.float32
        seen[engine] = losses
    torch.testing.assert_close(seen[OURS], seen[STOCK], rtol=2e-2, atol=1e-2)


@on_ranks(2)
def test_full_precision_in_eval(rank: int, world_size: int) -> None:
    import os

    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    mixed = api(OURS).MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model, plain = wrap(OURS, Setting(), mixed_precision=mixed), build()
    inputs = batch(rank, 0)[0]
    model.eval()
    torch.testing.assert_close(model(inputs), plain(inputs), **TOLERANCE)
    model.train()
    assert model(inputs).dtype == torch.bfloat16
    # Gradients that wait for a reduction outlive an evaluation in between.
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    model.eval()
    with torch.no_grad():
        model(inputs)
    assert model.blocks[0].scale.dtype == torch.float32
    model.train()
    loss_of(model, rank, 1).backward()
    assert model.blocks[0].scale.dtype == torch.bfloat16
    twice = whole_gradients(OURS, model)["inp.weight"]
    for step in (0, 1):
        (sum(loss_of(plain, one, step) for one in range(world_size)) / world_size).backward()
    torch.testing.assert_close(twice, plain.inp.weight.grad, rtol=5e-2, atol=5e-2)


# -- features that stock lacks on CPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_cpu_offload_and_rank0_only(rank: int, world_size: int, strategy: str) -> None:
    names = api(OURS)
    model = wrap(OURS, Setting(strategy), cpu_offload=names.CPUOffload(offload_params=True))
    train(model, sgd(model), rank, range(3))
    config = names.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with names.FSDP.state_dict_type(model, names.StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if rank:
        assert state == {}
        return
    assert_same_tensors(alone(world_size), state, **TOLERANCE)


# -- process groups ----------------------------------------------------------------------------------------------------


def hybrid(rank: int, world_size: int, by: str, strategy: str) -> None:
    names = api(OURS)
    if by == "mesh":
        arguments = {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    elif by == "unnamed mesh":
        arguments = {"device_mesh": init_device_mesh("cpu", (2, 2))}
    else:
        shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        arguments = {"process_group": (shard, replicate)}
    model = wrap(OURS, Setting(strategy), **arguments)
    assert (model.world_size, model.rank) == (2, rank % 2)
    assert model.sharding_strategy is names.ShardingStrategy[strategy]
    train(model, sgd(model), rank, range(3))
    assert_same_tensors(alone(world_size), whole_state(OURS, model), **TOLERANCE)
    with names.FSDP.state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT):
        value = model.state_dict()["inp.weight"]
    assert isinstance(value, DTensor) == ("mesh" in by)


@pytest.mark.parametrize(
    ("by", "strategy"), [("groups", "HYBRID_SHARD"), ("mesh", "_HYBRID_SHARD_ZERO2"), ("unnamed mesh", "HYBRID_SHARD")]
)
def test_hybrid_sharding(by: str, strategy: str):
    run_ranks(4, hybrid, by, strategy)


@on_ranks(2)
def test_errors_of_the_constructor(rank: int, world_size: int) -> None:
    names = api(OURS)
    hybrid = names.ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="pass one of them"):
        names.FSDP(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(ValueError, match="needs process_group"):
        names.FSDP(nn.Linear(2, 2), sharding_strategy=hybrid)
    with pytest.raises(ValueError, match="2-D"):
        names.FSDP(nn.Linear(2, 2), sharding_strategy=hybrid, device_mesh=mesh)
    with pytest.raises(ValueError, match="shard group, replicate group"):
        names.FSDP(nn.Linear(2, 2), sharding_strategy=hybrid, process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match="wraps a module"):
        names.FSDP([nn.Linear(2, 2)])
    half = nn.Linear(2, 2)
    half.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="uniform requires_grad"):
        names.FSDP(half, use_orig_params=False)
    with pytest.raises(ValueError, match="wrap by hand or by policy"):
        names.FSDP(nn.Sequential(names.FSDP(nn.Linear(2, 2))), auto_wrap_policy=names.always_wrap_policy)
    model = names.FSDP(nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="summon_full_params"):
        model._flat_param  # noqa: B018
    assert not hasattr(model, "_flat_param")
    assert getattr(model, "_handle", None) is None


# -- gradients ---------------------------------------------------------------------------------------------------------


COMPRESSING = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


def comm_hook(rank: int, world_size: int, strategy: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch's compressing hooks tell the allocator which stream used a tensor, also on a CPU, which has none.
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    seen = {}
    for engine in (STOCK, OURS):
        names = api(engine)
        model = wrap(engine, Setting(strategy))
        state, hook = default_hooks.LowPrecisionState(dist.group.WORLD), COMPRESSING[kind]
        with pytest.raises((AssertionError, ValueError)):
            model.register_comm_hook(state, "not callable")
        model.register_comm_hook(state, hook)
        with pytest.raises(AssertionError, match="already registered"):
            model.register_comm_hook(state, hook)
        losses = train(model, sgd(model), rank, range(3))
        seen[engine] = {"losses": torch.tensor(losses), **whole_state(engine, model)}
        assert isinstance(model, names.FSDP)
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


@pytest.mark.parametrize(("kind", "strategy"), [("fp16", "FULL_SHARD"), ("bf16", "NO_SHARD")])
@on_ranks(2)
def test_compressing_communication_hooks(rank: int, world_size: int, strategy: str, kind: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        comm_hook(rank, world_size, strategy, kind, monkeypatch)


def replicas_first(world_size: int) -> Any:
    model = Layers()
    fully_shard(model.embed, mesh=rank_mesh((world_size, 1), ("replicate", "shard")))
    return fully_shard(model)


def test_grad_scaler_looks_at_all_ranks():
    """At more than those over which the first gradient is sharded, as torch's does."""
    run_ranks(2, finds_an_overflow, replicas_first, api(OURS).ShardedGradScaler, {"fused": True})


class Scaled(nn.Module):
    """A 0-dim parameter beside one that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


@on_ranks(2)
def test_a_communication_hook_beside_a_scalar(rank: int, world_size: int) -> None:
    """A hook for shards cannot reduce the 0-dim parameter, so it is averaged as without a hook."""
    gradients = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = api(OURS).FSDP(Scaled(), use_orig_params=True, device_id=CPU)
        if hooked:
            model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
        model(batch(rank, 0)[0]).square().mean().backward()
        gradients.append(whole_gradients(OURS, model))
    assert_same_tensors(*gradients, **TOLERANCE)


# -- whole parameters --------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill_and_fail(model: nn.Module) -> None:
    with api(OURS).FSDP.summon_full_params(model):
        model.inp.weight.fill_(5.0)
        raise ZeroDivisionError


def summon(rank: int, world_size: int) -> None:
    names = api(OURS)
    model = wrap(OURS, Setting())
    with names.FSDP.summon_full_params(model):
        with torch.no_grad():
            model.inp.weight.fill_(3.0)
        model.out.bias = nn.Parameter(torch.full((1,), 7.0))
        with pytest.raises(AssertionError, match="inside another"), names.FSDP.summon_full_params(model):
            pass
    state = whole_state(OURS, model)
    assert torch.all(state["inp.weight"] == 3.0)
    assert torch.all(state["out.bias"] == 7.0)
    with names.FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=True):
        assert isinstance(model.inp.weight, DTensor) == (rank != 0)
        assert ("inp.weight" in model.state_dict()) == (rank == 0)
    with pytest.raises(NotImplementedError), names.FSDP.summon_full_params(model, rank0_only=True):
        pass
    loss_of(model, rank, 0).backward()
    with names.FSDP.summon_full_params(model, with_grads=True):
        model.inp.weight.grad.fill_(2.0)
    assert torch.all(model.inp.weight.grad.to_local() == 2.0)
    with names.FSDP.summon_full_params(model, with_grads=True):
        model.inp.weight.grad = None
    assert model.inp.weight.grad is None
    with pytest.raises(RuntimeError, match="change values, not shapes"), names.FSDP.summon_full_params(model):
        model.inp.weight = nn.Parameter(torch.zeros(2, 2))
    assert isinstance(model.inp.weight, DTensor)
    with pytest.raises(ZeroDivisionError):
        fill_and_fail(model)
    assert isinstance(model.inp.weight, DTensor)
    assert torch.all(model.inp.weight.to_local() == 3.0), "values of a block that raised were written back"
    with names.FSDP.summon_full_params(model):
        model.inp.weight.requires_grad_(False)
    assert not model.inp.weight.requires_grad
    model.inp.weight.requires_grad_(True)
    train(model, sgd(model), rank, range(1))


def test_summon_full_params():
    run_ranks(3, summon)


# -- construction ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_is_ignored_is_not_synced(rank: int, world_size: int) -> None:
    model = build()
    with torch.no_grad():
        model.inp.bias.fill_(rank)
        model.out.bias.fill_(rank)
    model = wrap(OURS, Setting(), model, sync_module_states=True, ignored_states=[model.out.bias])
    assert torch.all(model.out.bias == rank), "an ignored parameter was synchronised"
    assert torch.all(model.inp.bias.to_local() == 0)


@on_ranks(2)
def test_values_of_rank_0_for_modules_on_the_meta_device(rank: int, world_size: int) -> None:
    """Rank 0 alone has values."""

    def build_small() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))

    with torch.device("meta" if rank else "cpu"):
        model = build_small()
    names = api(OURS)
    model = names.FSDP(model, auto_wrap_policy=names.ModuleWrapPolicy({nn.Sequential}), sync_module_states=True)
    assert_same_tensors(dict(build_small().state_dict()), whole_state(OURS, model), rtol=0, atol=0)


@on_ranks(1)
def test_torchdistx_is_refused(rank: int, world_size: int) -> None:
    """A stand-in for the package, which does not run on this torch, says which tensors it has deferred."""
    model = build()
    torchdistx = types.ModuleType("torchdistx.fake")
    torchdistx.is_fake = lambda tensor: tensor is model.inp.weight
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "torchdistx.fake", torchdistx)
        with pytest.raises(RuntimeError, match=r"'inp' \(Linear\) was deferred by torchdistX.*materialize_module"):
            wrap(OURS, Setting(), model)
        wrap(OURS, Setting(), build())


@on_ranks(2)
def test_policies_and_enums_of_stock(rank: int, world_size: int) -> None:
    ours, theirs = api(OURS), api(STOCK)
    mixed = wrap(OURS, Setting(), auto_wrap_policy=theirs.ModuleWrapPolicy({Block}))
    assert len(ours.FSDP.fsdp_modules(mixed)) == 3
    wrap(OURS, Setting(), sharding_strategy=theirs.ShardingStrategy.NO_SHARD, mixed_precision=theirs.MixedPrecision())
    linear = nn.Linear(2, 2)
    assert ours.wrap(linear) is linear
    with ours.enable_wrap(wrapper_cls=ours.FSDP, use_orig_params=True):
        assert ours.wrap(linear, use_orig_params=False)._use_orig_params is False
        assert ours.wrap(nn.Linear(2, 2))._use_orig_params is True


@on_ranks(2)
def test_names_through_activation_checkpoint_wrappers(rank: int, world_size: int) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        model = build()
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])
        model = wrap(engine, Setting(), model)
        losses = train(model, sgd(model), rank, range(2))
        assert isinstance(model.module, Model)
        state = whole_state(engine, model)
        model.load_state_dict(state)
        seen[engine] = {"losses": torch.tensor(losses), **whole_state(engine, model)}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)
    assert "blocks.0.up.weight" in seen[OURS]
    assert model.inp is model.module.inp
    assert api(OURS).FSDP(nn.Sequential(nn.Linear(2, 2)))[0].in_features == 2


@on_ranks(2)
def test_errors_of_loading(rank: int, world_size: int) -> None:
    names = api(OURS)
    model = wrap(OURS, Setting())
    state = whole_state(OURS, model)
    short = dict(state)
    del short["inp.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"inp.weight"'):
        model.load_state_dict(short)
    result = model.load_state_dict({**short, "nowhere": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["inp.weight"]
    assert result.unexpected_keys == ["nowhere"]
    with pytest.raises(RuntimeError, match=r"'inp.weight' has shape \(2, 2\), the model expects \(5, 4\)"):
        model.load_state_dict({**state, "inp.weight": torch.ones(2, 2)})
    with names.FSDP.state_dict_type(model, names.StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
    with pytest.raises(RuntimeError, match="SHARDED_STATE_DICT"):
        model.load_state_dict(sharded)
    with (
        names.FSDP.state_dict_type(model, names.StateDictType.LOCAL_STATE_DICT),
        pytest.raises(RuntimeError, match="no '_flat_param'"),
    ):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="needs a FullStateDictConfig"):
        names.FSDP.set_state_dict_type(model, names.StateDictType.FULL_STATE_DICT, names.LocalStateDictConfig())
    assert names.FSDP.get_state_dict_type(model).state_dict_type is names.StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)


# -- order, moves, experts ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts: every rank runs both of them, in its own order if `reversed` is set."""

    def __init__(self, fsdp: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList(fsdp(nn.Linear(4, 1), use_orig_params=True, device_id=CPU) for _ in range(2))
        self.reversed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(x), dim=-1)
        order = [1, 0] if self.reversed else [0, 1]
        return sum(weights[:, one : one + 1] * self.experts[one](x) for one in order)


@on_ranks(2, isolated=True)
def test_another_order_of_execution_is_reported(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    fsdp = api(OURS).FSDP
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        model = fsdp(Experts(fsdp), use_orig_params=True)
        train(model, sgd(model), rank, range(1))
        model.module.reversed = rank == 1
        with pytest.raises(RuntimeError, match=r"experts\.[01]") as caught:
            train(model, sgd(model), rank, range(1))
        assert "_fsdp_wrapped_module" not in str(caught.value)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


# -- ties, calls inside contexts, groups that come and go --------------------------------------------------------------


class TiedUnits(nn.Module):
    """The embedding is a unit of its own, and its weight is the root's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mid(self.emb(tokens))))


@on_ranks(2)
def test_a_parameter_tied_across_units(rank: int, world_size: int) -> None:
    names = api(OURS)

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = wrap(OURS, Setting(), TiedUnits(), auto_wrap_policy=names.ModuleWrapPolicy({nn.Embedding}))
        return model, torch.optim.Adam(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, rank]])).square().sum().backward()
        optimizer.step()

    model, optimizer = start(0)
    step(model, optimizer)
    expected = whole_state(OURS, model)
    assert list(expected) == list(TiedUnits().state_dict())
    for kind in ("FULL", "SHARDED", "LOCAL"):
        with names.FSDP.state_dict_type(model, names.StateDictType[f"{kind}_STATE_DICT"]):
            state, optim = model.state_dict(), names.FSDP.optim_state_dict(model, optimizer)
        assert not any(isinstance(value, DTensor) for value in state.values()), kind
        other, its_optimizer = start(1)
        with names.FSDP.state_dict_type(other, names.StateDictType[f"{kind}_STATE_DICT"]):
            other.load_state_dict(state)
            its_optimizer.load_state_dict(names.FSDP.optim_state_dict_to_load(other, its_optimizer, optim))
        assert other.head.weight is other.emb.weight
        assert_same_tensors(expected, whole_state(OURS, other), rtol=0, atol=0)
        step(other, its_optimizer)
        again, its_optimizer = start(0)
        step(again, its_optimizer)
        step(again, its_optimizer)
        assert_same_tensors(whole_state(OURS, again), whole_state(OURS, other), **TOLERANCE)


@on_ranks(2)
def test_calls_inside_summon_full_params(rank: int, world_size: int) -> None:
    """A method of the wrapped module, such as for generating text, runs before and after the first forward."""
    inputs = batch(rank, 0)[0]
    expected = build()(inputs)
    for recurse in (False, True):
        seen = {}
        for engine in (STOCK, OURS):
            names, model = api(engine), wrap(engine, Setting())
            for _ in range(2):
                with names.FSDP.summon_full_params(model, recurse=recurse, writeback=False), torch.no_grad():
                    torch.testing.assert_close(model.module.forward(inputs), expected, **TOLERANCE)
                    if recurse:
                        torch.testing.assert_close(model(inputs), expected, **TOLERANCE)
                train(model, sgd(model), rank, range(1))
                with torch.no_grad():
                    expected_now = model(inputs)
                assert not torch.equal(expected_now, expected)
                model.load_state_dict(build().state_dict())
            seen[engine] = train(model, sgd(model), rank, range(2))
        torch.testing.assert_close(seen[OURS], seen[STOCK], **TOLERANCE)


@on_ranks(2)
def test_loading_files_of_which_one_is_wrong(rank: int, world_size: int) -> None:
    """One rank's file belongs to another run: every rank raises, and none waits for it."""
    names = api(OURS)
    model = wrap(OURS, Setting())
    with names.FSDP.state_dict_type(model, names.StateDictType.LOCAL_STATE_DICT):
        state = model.state_dict()
        if rank == 1:
            state["blocks.0._flat_param"] = state["_flat_param"]
        with pytest.raises(RuntimeError, match=r"rank 1 of the shard group: 'blocks.0._flat_param' has"):
            model.load_state_dict(state)


@on_ranks(2)
def test_gradients_that_wait_are_not_summoned(rank: int, world_size: int) -> None:
    """There are no whole gradients yet; stock raises AssertionError."""
    fsdp = api(OURS).FSDP
    model = wrap(OURS, Setting())
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    with (
        pytest.raises(RuntimeError, match=r"a gradient of parameter '.*inp\.weight' waits for its reduction"),
        fsdp.summon_full_params(model, with_grads=True),
    ):
        pass
    with fsdp.summon_full_params(model):
        pass


@on_ranks(2)
def test_parameters_that_are_written_behind_its_back_are_refused(rank: int, world_size: int) -> None:
    """Other rows of the page's table show the error of forward."""
    fsdp = api(OURS).FSDP
    model: Any = wrap(OURS, Setting(policy=False), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    for use in (model.state_dict, fsdp.summon_full_params(model).__enter__):
        with pytest.raises(RuntimeError, match=r"data of parameter 'weight' was replaced"):
            use()
    model = wrap(OURS, Setting(policy=False), nn.Linear(8, 8))
    model.module.weight = nn.Parameter(torch.ones(3, 2))
    for use in (model.state_dict, fsdp.summon_full_params(model).__enter__):
        with pytest.raises(ValueError, match="parameter 'weight' was replaced by a plain tensor"):
            use()
    assert model.module.weight.shape == (3, 2), "the user's parameter is not thrown away"
