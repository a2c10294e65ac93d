"""Training and FSDP1's features one by one, against stock where it runs on CPU, else against a single process."""

import copy
import functools
import sys
import types
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.tensor import DTensor

from shardkit.core import fully_shard
from tests.core.api.overflow import finds_an_overflow, layers
from tests.legacy_fsdp_compat import both
from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    OURS,
    STOCK,
    TOLERANCE,
    Block,
    Setting,
    assert_same_tensors,
    batch,
    build,
    loss_of,
    train,
)
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.models import Composed

pytestmark = pytest.mark.filterwarnings("ignore")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


class Below(nn.Linear):
    """Takes an input beside the first."""

    def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        self.seen = extra.dtype
        return super().forward(x.to(self.weight.dtype))


@on_ranks(2)
def test_which_inputs_are_cast(rank: int, world_size: int) -> None:
    """Of a unit below the root, which gives it an input of its own."""
    for engine in (STOCK, OURS):
        names = engine.api
        for cast, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            mixed = names.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
            model = Composed(
                lambda m, x: m.out(m.below(x, torch.ones(1)).to(m.out.weight.dtype)),
                below=Below(4, 4),
                out=nn.Linear(4, 1),
            )
            policy = names.ModuleWrapPolicy({Below})
            model = engine.wrapped(Setting(), model, mixed_precision=mixed, auto_wrap_policy=policy)
            model(torch.ones(2, 4)).sum().backward()
            assert model.below.seen == dtype


@on_ranks(2)
def test_batch_norm_is_wrapped_alone_in_full_precision(rank: int, world_size: int) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        torch.manual_seed(0)
        names = engine.api
        norms = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        mixed = names.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        policy = functools.partial(names.size_based_auto_wrap_policy, min_num_params=10_000)
        model = engine.wrapped(Setting(), norms, mixed_precision=mixed, auto_wrap_policy=policy)
        assert [isinstance(one, names.FSDP) for one in model] == [False, True, False]
        seen[engine] = train(model, sgd(model), rank, range(2))
        assert model[1].running_mean.dtype == torch.float32
    torch.testing.assert_close(seen[OURS], seen[STOCK], rtol=2e-2, atol=1e-2)


@on_ranks(2)
def test_complex_gradients_keep_their_dtype(rank: int, world_size: int) -> None:
    mixed = OURS.api.MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = Composed(lambda module, x: (x * module.filter).abs().sum(), filter=nn.Parameter(torch.full((4,), 3 + 4j)))
    model = OURS.api.FullyShardedDataParallel(model, device_id=CPU, mixed_precision=mixed)
    model(torch.ones(4)).backward()
    (parameter,) = model.parameters()
    torch.testing.assert_close(DTensor.full_tensor(parameter.grad), torch.full((4,), 0.6 + 0.8j))


@on_ranks(2)
def test_full_precision_in_eval(rank: int, world_size: int) -> None:
    import os

    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    mixed = OURS.api.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model, plain = OURS.wrapped(Setting(), mixed_precision=mixed), build()
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
    twice = OURS.gradients(model)["inp.weight"]
    for step in (0, 1):
        both.backward_alone(plain, world_size, step)
    torch.testing.assert_close(twice, plain.inp.weight.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_cpu_offload_and_rank0_only(rank: int, world_size: int, strategy: str) -> None:
    names = OURS.api
    model = OURS.wrapped(Setting(strategy), cpu_offload=names.CPUOffload(offload_params=True))
    train(model, sgd(model), rank, range(3))
    config = names.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with names.FSDP.state_dict_type(model, names.StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if rank:
        assert state == {}
        return
    assert_same_tensors(both.alone(world_size)[0].state_dict(), state, **TOLERANCE)


@pytest.mark.parametrize(
    ("by", "strategy"), [("groups", "HYBRID_SHARD"), ("mesh", "_HYBRID_SHARD_ZERO2"), ("unnamed mesh", "HYBRID_SHARD")]
)
@on_ranks(4)
def test_hybrid_sharding(rank: int, world_size: int, by: str, strategy: str) -> None:
    arguments: dict[str, Any]
    if by == "groups":
        shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        arguments = {"process_group": (shard, replicate)}
    else:
        axes = ("replicate", "shard") if by == "mesh" else None
        arguments = {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)}
    model = OURS.wrapped(Setting(strategy), **arguments)
    assert (model.world_size, model.rank) == (2, rank % 2)
    assert model.sharding_strategy is OURS.api.ShardingStrategy[strategy]
    train(model, sgd(model), rank, range(3))
    assert_same_tensors(both.alone(world_size)[0].state_dict(), OURS.state(model), **TOLERANCE)
    with OURS.of_type("SHARDED", model):
        value = model.state_dict()["inp.weight"]
    assert isinstance(value, DTensor) == ("mesh" in by)


@on_ranks(2)
def test_errors_of_the_constructor(rank: int, world_size: int) -> None:
    names = OURS.api
    hybrid = names.ShardingStrategy.HYBRID_SHARD
    mesh = init_device_mesh("cpu", (2,))
    for message, arguments in (
        ("pass one of them", {"process_group": dist.group.WORLD, "device_mesh": mesh}),
        ("needs process_group", {"sharding_strategy": hybrid}),
        ("2-D", {"sharding_strategy": hybrid, "device_mesh": mesh}),
        ("shard group, replicate group", {"sharding_strategy": hybrid, "process_group": dist.group.WORLD}),
    ):
        with pytest.raises(ValueError, match=message):
            names.FSDP(nn.Linear(2, 2), **arguments)
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


@pytest.mark.parametrize(
    ("hook", "strategy"),
    [(default_hooks.fp16_compress_hook, "FULL_SHARD"), (default_hooks.bf16_compress_hook, "NO_SHARD")],
)
@on_ranks(2)
def test_compressing_communication_hooks(rank: int, world_size: int, strategy: str, hook: Any) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        model = engine.wrapped(Setting(strategy))
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        with pytest.raises((AssertionError, ValueError)):
            model.register_comm_hook(state, "not callable")
        model.register_comm_hook(state, hook)
        with pytest.raises(AssertionError, match="already registered"):
            model.register_comm_hook(state, hook)
        # torch's compressing hooks tell the allocator which stream used a tensor, also on a CPU, which has none.
        with mock.patch.object(torch.Tensor, "record_stream"):
            losses = train(model, sgd(model), rank, range(3))
        seen[engine] = {"losses": torch.tensor(losses), **engine.state(model)}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


def replicas_first(world_size: int) -> Any:
    model = layers()
    fully_shard(model.embed, mesh=rank_mesh((world_size, 1), ("replicate", "shard")))
    return fully_shard(model)


def test_grad_scaler_looks_at_all_ranks():
    """At more than those over which the first gradient is sharded, as torch's does."""
    run_ranks(2, finds_an_overflow, replicas_first, OURS.api.ShardedGradScaler, {"fused": True})


@on_ranks(2)
def test_a_communication_hook_beside_a_scalar(rank: int, world_size: int) -> None:
    """A hook for shards cannot reduce the 0-dim parameter, so it is averaged as without a hook."""
    gradients = []
    for hooked in (False, True):
        torch.manual_seed(0)
        gain = nn.Parameter(torch.tensor(2.0))
        scaled = Composed(lambda m, x: m.inner(x) * m.gain, inner=nn.Linear(4, 4), gain=gain)
        model = OURS.api.FSDP(scaled, use_orig_params=True, device_id=CPU)
        if hooked:
            model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
        model(batch(rank, 0)[0]).square().mean().backward()
        gradients.append(OURS.gradients(model))
    assert_same_tensors(*gradients, **TOLERANCE)


@torch.no_grad()
def fill_and_fail(model: nn.Module) -> None:
    with OURS.api.FSDP.summon_full_params(model):
        model.inp.weight.fill_(5.0)
        raise ZeroDivisionError


@on_ranks(3)
def test_summon_full_params(rank: int, world_size: int) -> None:
    names = OURS.api
    model = OURS.wrapped(Setting())
    with names.FSDP.summon_full_params(model):
        with torch.no_grad():
            model.inp.weight.fill_(3.0)
        model.out.bias = nn.Parameter(torch.full((1,), 7.0))
        with pytest.raises(AssertionError, match="inside another"), names.FSDP.summon_full_params(model):
            pass
    state = OURS.state(model)
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


@on_ranks(2)
def test_what_is_ignored_is_not_synced(rank: int, world_size: int) -> None:
    model = build()
    with torch.no_grad():
        model.inp.bias.fill_(rank)
        model.out.bias.fill_(rank)
    model = OURS.wrapped(Setting(), model, sync_module_states=True, ignored_states=[model.out.bias])
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
    names = OURS.api
    model = names.FSDP(model, auto_wrap_policy=names.ModuleWrapPolicy({nn.Sequential}), sync_module_states=True)
    assert_same_tensors(dict(build_small().state_dict()), OURS.state(model), rtol=0, atol=0)


@on_ranks(1)
def test_torchdistx_is_refused(rank: int, world_size: int) -> None:
    """A stand-in for the package, which does not run on this torch, says which tensors it has deferred."""
    model = build()
    torchdistx = types.ModuleType("torchdistx.fake")
    torchdistx.is_fake = lambda tensor: tensor is model.inp.weight
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "torchdistx.fake", torchdistx)
        with pytest.raises(RuntimeError, match=r"'inp' \(Linear\) was deferred by torchdistX.*materialize_module"):
            OURS.wrapped(Setting(), model)
        OURS.wrapped(Setting(), build())


@on_ranks(2)
def test_policies_and_enums_of_stock(rank: int, world_size: int) -> None:
    ours, theirs = OURS.api, STOCK.api
    mixed = OURS.wrapped(Setting(), auto_wrap_policy=theirs.ModuleWrapPolicy({both.Block}))
    assert len(ours.FSDP.fsdp_modules(mixed)) == 3
    OURS.wrapped(Setting(), sharding_strategy=theirs.ShardingStrategy.NO_SHARD, mixed_precision=theirs.MixedPrecision())
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
        model = engine.wrapped(Setting(), model)
        losses = train(model, sgd(model), rank, range(2))
        assert isinstance(model.module, both.Model)
        state = engine.state(model)
        model.load_state_dict(state)
        seen[engine] = {"losses": torch.tensor(losses), **engine.state(model)}
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)
    assert "blocks.0.up.weight" in seen[OURS]
    assert model.inp is model.module.inp
    assert OURS.api.FSDP(nn.Sequential(nn.Linear(2, 2)))[0].in_features == 2


@on_ranks(2)
def test_errors_of_loading(rank: int, world_size: int) -> None:
    names = OURS.api
    model = OURS.wrapped(Setting())
    state = OURS.state(model)
    short = dict(state)
    del short["inp.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"inp.weight"'):
        model.load_state_dict(short)
    result = model.load_state_dict({**short, "nowhere": torch.ones(1)}, strict=False)
    assert result.missing_keys == ["inp.weight"]
    assert result.unexpected_keys == ["nowhere"]
    with pytest.raises(RuntimeError, match=r"'inp.weight' has shape \(2, 2\), the model expects \(5, 4\)"):
        model.load_state_dict({**state, "inp.weight": torch.ones(2, 2)})
    with OURS.of_type("SHARDED", model):
        sharded = model.state_dict()
    with pytest.raises(RuntimeError, match="SHARDED_STATE_DICT"):
        model.load_state_dict(sharded)
    with OURS.of_type("LOCAL", model), pytest.raises(RuntimeError, match="no '_flat_param'"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="needs a FullStateDictConfig"):
        names.FSDP.set_state_dict_type(model, names.StateDictType.FULL_STATE_DICT, names.LocalStateDictConfig())
    assert names.FSDP.get_state_dict_type(model).state_dict_type is names.StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)


@on_ranks(2, isolated=True)
def test_another_order_of_execution_is_reported(rank: int, world_size: int) -> None:
    """Every rank runs both experts of a mixture, in its own order if `order` says so."""
    torch.manual_seed(0)
    fsdp = OURS.api.FSDP
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = fsdp(
        Composed(
            lambda m, x: sum(torch.softmax(m.gate(x), -1)[:, one : one + 1] * m.experts[one](x) for one in m.order),
            gate=nn.Linear(4, 2),
            experts=nn.ModuleList(fsdp(nn.Linear(4, 1), use_orig_params=True, device_id=CPU) for _ in range(2)),
            order=[0, 1],
        ),
        use_orig_params=True,
    )
    train(model, sgd(model), rank, range(1))
    model.module.order = [rank, 1 - rank]
    with pytest.raises(RuntimeError, match=r"experts\.[01]") as caught:
        train(model, sgd(model), rank, range(1))
    assert "_fsdp_wrapped_module" not in str(caught.value)


@on_ranks(2)
def test_a_parameter_tied_across_units(rank: int, world_size: int) -> None:
    """The embedding is a unit of its own, and its weight is the root's, too."""

    def start(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = OURS.wrapped(Setting(), both.Tied(), auto_wrap_policy=OURS.api.ModuleWrapPolicy({nn.Embedding}))
        return model, torch.optim.Adam(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.tensor([[1, 2, rank]])).square().sum().backward()
        optimizer.step()

    model, optimizer = start(0)
    step(model, optimizer)
    expected = OURS.state(model)
    assert list(expected) == list(both.Tied().state_dict())
    states = {kind: OURS.state_of(kind, model, optimizer) for kind in ("FULL", "SHARDED", "LOCAL")}
    step(model, optimizer)
    for kind, state in states.items():
        assert not any(isinstance(value, DTensor) for value in state["model"].values()), kind
        other, its_optimizer = start(1)
        OURS.load_state(kind, other, its_optimizer, state)
        assert other.head.weight is other.emb.weight
        assert_same_tensors(expected, OURS.state(other), rtol=0, atol=0)
        step(other, its_optimizer)
        assert_same_tensors(OURS.state(model), OURS.state(other), **TOLERANCE)


@on_ranks(2)
def test_calls_inside_summon_full_params(rank: int, world_size: int) -> None:
    """A method of the wrapped module, such as for generating text, runs before and after the first forward."""
    inputs = batch(rank, 0)[0]
    expected = build()(inputs)
    for recurse in (False, True):
        seen = {}
        for engine in (STOCK, OURS):
            names, model = engine.api, engine.wrapped(Setting())
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
    model = OURS.wrapped(Setting())
    with OURS.of_type("LOCAL", model):
        state = model.state_dict()
        if rank == 1:
            state["blocks.0._flat_param"] = state["_flat_param"]
        with pytest.raises(RuntimeError, match=r"rank 1 of the shard group: 'blocks.0._flat_param' has"):
            model.load_state_dict(state)


@on_ranks(2)
def test_gradients_that_wait_are_not_summoned(rank: int, world_size: int) -> None:
    """There are no whole gradients yet; stock raises AssertionError."""
    fsdp = OURS.api.FSDP
    model = OURS.wrapped(Setting())
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
    fsdp = OURS.api.FSDP
    model: Any = OURS.wrapped(Setting(policy=False), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    for use in (model.state_dict, fsdp.summon_full_params(model).__enter__):
        with pytest.raises(RuntimeError, match=r"data of parameter 'weight' was replaced"):
            use()
    model = OURS.wrapped(Setting(policy=False), nn.Linear(8, 8))
    model.module.weight = nn.Parameter(torch.ones(3, 2))
    for use in (model.state_dict, fsdp.summon_full_params(model).__enter__):
        with pytest.raises(ValueError, match="parameter 'weight' was replaced by a plain tensor"):
            use()
    assert model.module.weight.shape == (3, 2), "the user's parameter is not thrown away"


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


def nested(model: Any, inputs: dict[str, Any], *, scale: list[float]) -> dict[str, list[torch.Tensor]]:
    """Takes and returns dicts and lists; its first input may need a gradient."""
    hidden = model.block(model.first(inputs["x"][0]))
    return {"out": [model.last(hidden) * scale[0], hidden]}


@on_ranks(2)
def test_nested_inputs_and_groups_of_parameters(rank: int, world_size: int) -> None:
    """Without prefetching, with hyper-parameters by kind of parameter, and an input that sometimes needs a gradient."""
    seen = {}
    for engine in (STOCK, OURS):
        torch.manual_seed(0)
        policy = engine.api.ModuleWrapPolicy({Block})
        model = Composed(nested, first=nn.Linear(4, 5), block=Block(3), last=nn.Linear(5, 1))
        model = engine.wrapped(Setting(), model, auto_wrap_policy=policy, backward_prefetch=None)
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
        model, optimizer = engine.start(setting, 0)
        losses = train(model, optimizer, rank, range(3))
        loss_of(model, rank, 99).backward()
        gradients = engine.gradients(model) if setting.use_orig_params else {}
        runs[engine] = {"losses": torch.tensor(losses), "weights": engine.state(model), "gradients": gradients}
    torch.testing.assert_close(runs[OURS], runs[STOCK], **TOLERANCE)
