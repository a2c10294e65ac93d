"""Bad input: each error names the parameter, module or group, the value seen and what to do."""

import copy
import os
import re
import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardkit.core import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from shardkit.core.runtime.shared.meeting import neighbours_of
from tests.core.parameters.installed_adapters import installed_adapters
from tests.support import on_ranks, rank_mesh
from tests.support.meshes import impatient_mesh
from tests.support.models import MLP, Composed
from tests.support.sharding import shard_children, shard_each


def _mlp(mesh: DeviceMesh | None = None) -> Any:
    model = MLP()
    return shard_each(*model.blocks, model, mesh=mesh)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 5)).sum().backward()


# -- arguments of fully_shard ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_meshes(rank: int, world_size: int) -> None:
    named = rank_mesh((2, 1), ("dp", "tp"))
    for error, message, mesh, dims in (
        (ValueError, r"3-D.*dp_mesh_dims", rank_mesh((1, 2, 1), ("a", "b", "c")), None),
        (ValueError, r"needs axis names.*mesh_dim_names", rank_mesh((1, 2)), None),
        (ValueError, r"\['data'\].*\('dp', 'tp'\)", named, DataParallelMeshDims("data")),
        (ValueError, r"\['replica'\].*\('dp', 'tp'\)", named, DataParallelMeshDims("dp", "replica")),
        (ValueError, "names an axis twice", named, DataParallelMeshDims("dp", "dp")),
        (ValueError, "the mesh has no axis names", rank_mesh((2,)), DataParallelMeshDims("dp")),
        (TypeError, r"DataParallelMeshDims.*str", named, "dp"),
        (TypeError, r"mesh must be a DeviceMesh.*ProcessGroup", dist.group.WORLD, None),
    ):
        with pytest.raises(error, match=message):
            fully_shard(nn.Linear(3, 3), mesh=mesh, dp_mesh_dims=dims)
    for names in (("dp_shard", "cp"), ("dp_shard", "dp_replicate"), ("fsdp", "tp"), ("dp", "tp")):
        hsdp = rank_mesh((1, 2), names)
        with pytest.warns(UserWarning, match=rf"replicates parameters over '{names[0]}' and shards.*dp_mesh_dims="):
            fully_shard(nn.Linear(3, 3), mesh=hsdp)
    with warnings.catch_warnings(action="error"):
        fully_shard(nn.Linear(3, 3), mesh=hsdp, dp_mesh_dims=DataParallelMeshDims(replicate="dp", shard="tp"))
        for names in (("dp_replicate", "dp_shard"), ("outer", "inner")):
            fully_shard(nn.Linear(3, 3), mesh=rank_mesh((1, 2), names))
    others = DeviceMesh("cpu", [1 - rank])
    with pytest.raises(ValueError, match=rf"rank {rank} is not in the mesh DeviceMesh.*; pass a mesh that contains"):
        fully_shard(nn.Linear(3, 3), mesh=others)


@on_ranks(2)
def test_modules(rank: int, world_size: int) -> None:
    once = fully_shard(nn.Linear(3, 3))
    for error, message, modules in (
        (ValueError, r"ModuleList.*no forward", nn.ModuleList([nn.Linear(3, 3)])),
        (ValueError, r"ModuleDict.*no forward", nn.ModuleDict({"a": nn.Linear(3, 3)})),
        (ValueError, "empty list", []),
        (TypeError, "takes a module or a list of modules, got str", ["model"]),
        (TypeError, "takes a module or a list of modules, got int", 7),
        (ValueError, r"already called on this FSDPLinear.*sharded once", once),
        (ValueError, r"already called on this FSDPLinear", [nn.Linear(3, 3), once]),
    ):
        with pytest.raises(error, match=message):
            fully_shard(modules)
    with pytest.raises(RuntimeError, match=r"FSDPLinear cannot be deep-copied.*state_dict"):
        copy.deepcopy(once)
    with pytest.raises(RuntimeError, match="cannot be deep-copied"):
        copy.deepcopy(nn.ModuleDict({"inside": once}))
    tensor_parallel = nn.Sequential(nn.Linear(4, 4))
    placed = distribute_tensor(torch.ones(4, 4), rank_mesh((2,)), [Replicate()])
    tensor_parallel[0].weight = nn.Parameter(placed)
    with (
        installed_adapters(None),
        pytest.raises(TypeError, match=r"'0\.weight' is already a DTensor.*shardkit-tp-adapter"),
    ):
        fully_shard(tensor_parallel)
    # A refused module is left as it was, so that the call can be made again once the input is repaired.
    assert type(tensor_parallel) is nn.Sequential
    assert type(tensor_parallel[0].bias) is nn.Parameter
    assert not isinstance(tensor_parallel[0].bias, DTensor)


def _nested() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@on_ranks(2)
def test_inner_modules_come_too_late(rank: int, world_size: int) -> None:
    text = r"parameter '{}' of this \w+ is already in the group of a module around it.* inner modules first"
    model = fully_shard(_nested())
    for modules in (model[1], [nn.ReLU(), model[1]]):
        with pytest.raises(ValueError, match=text.format(r"1\.0\.weight")):
            fully_shard(modules)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=text.format(r"1\.0\.weight")):
        fully_shard(model[1][0])
    assert [type(module).__name__ for module in model] == ["Linear", "Sequential"]
    two_calls = _nested()
    for module in (two_calls[1], two_calls):
        fully_shard(module)
    with pytest.raises(ValueError, match=text.format(r"0\.weight")):
        fully_shard(two_calls[1][0])


@on_ranks(2)
def test_inner_modules_that_may_come_later(rank: int, world_size: int) -> None:
    """No call around them has taken their parameters: ignored, added later, none, or taken by a call beside them."""
    ignored = _nested()
    fully_shard(ignored, ignored_params=set(ignored[0].parameters()))
    added = fully_shard(_nested())
    added[0] = nn.Linear(4, 4)
    for model in (ignored, added):
        fully_shard(model[0])
        model(torch.ones(2, 4)).sum().backward()
        assert isinstance(model[0].weight.grad, DTensor)
    fully_shard(added[1][1])
    adapter = fully_shard(_nested())
    adapter[0] = nn.Sequential(adapter[0], nn.Linear(4, 4))
    fully_shard(adapter[0])
    adapter(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(layer.weight.grad, DTensor) for layer in adapter[0])
    for beside in ([nn.Linear(4, 4), nn.Linear(4, 4)], [nn.ReLU(), nn.ReLU()]):
        shared = nn.Linear(4, 4)
        blocks = nn.Sequential(*(nn.Sequential(shared, one) for one in beside))
        for block in (*blocks, blocks):
            fully_shard(block)
        blocks(torch.ones(2, 4)).sum().backward()
        assert isinstance(shared.weight.grad, DTensor)


@on_ranks(4)
def test_policies(rank: int, world_size: int) -> None:
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        with pytest.raises(ValueError, match=rf"{name} must be a floating-point dtype.*int32"):
            MixedPrecisionPolicy(**{name: torch.int32})
    with pytest.raises(ValueError, match=r"param_dtype.*bfloat16"):
        MixedPrecisionPolicy(param_dtype="bfloat16")
    with pytest.raises(ValueError, match="at least one of shard and replicate"):
        DataParallelMeshDims()
    reshard = "reshard_after_forward"
    for error, message, options in (
        (
            TypeError,
            "mp_policy must be a MixedPrecisionPolicy, got torch.bfloat16; pass",
            {"mp_policy": torch.bfloat16},
        ),
        (TypeError, "offload_policy must be an OffloadPolicy, got True; pass", {"offload_policy": True}),
        *((ValueError, f"{reshard}.*must divide the 4 ranks", {reshard: size}) for size in (3, 8)),
        *((ValueError, f"{reshard}.*must divide", {reshard: size}) for size in (0, -1)),
        (ValueError, f"{reshard}.*a bool, an int", {reshard: "yes"}),
        (
            ValueError,
            r"S(hard)?\((dim=)?2\).*'weight' of shape \(2, 2\).*between -2 and 1",
            {"shard_placement_fn": lambda parameter: Shard(2)},
        ),
        (
            TypeError,
            r"returned 0 for parameter 'weight'; expected Shard\(dim\), .* or None",
            {"shard_placement_fn": lambda parameter: 0},
        ),
    ):
        with pytest.raises(error, match=message):
            fully_shard(nn.Linear(2, 2), **options)


@on_ranks(2)
def test_settings(rank: int, world_size: int) -> None:
    model = _mlp()
    for error, message, setter, *values in (
        (ValueError, "prefetch depth must be an int >= 0", model.set_prefetch_depth, -1, 1.0, True, None),
        (ValueError, "divide factor must be a positive number", model.set_gradient_divide_factor, 0, -2.0),
        (TypeError, "max_input_buffers must be an int", model.set_reduce_scatter_max_input_buffers, 1.5),
        (ValueError, "max_input_buffers must be at least 1", model.set_reduce_scatter_max_input_buffers, 0),
        (ValueError, "takes a bool", model.set_reshard_after_forward, 2),
        (NotImplementedError, "NCCL", model.set_symm_mem_for_comm, "MPI"),
    ):
        for value in values:
            with pytest.raises(error, match=message):
                setter(value)
    for method in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
        for error, message, value in (
            (ValueError, "a Linear in place 1 of its list, expected", [model.blocks[0], model.inp]),
            (TypeError, r"'blocks\.0', expected a list of modules", "blocks.0"),
            (TypeError, "a FSDPBlock, expected a list", model.blocks[0]),
            (ValueError, "'0' in place 1 of its list", [model.blocks[0], "0"]),
        ):
            with pytest.raises(error, match=f"{method.__name__} got {message}"):
                method(value)
    for name, setting in (
        ("set_requires_gradient_sync", "requires_gradient_sync"),
        ("set_requires_all_reduce", "requires_all_reduce"),
        ("set_is_last_backward", "is_last_backward"),
        ("set_force_sum_reduction_for_comms", "enable"),
        ("set_reduce_scatter_unused_params", "reduce_scatter_unused_params"),
        ("set_reshard_after_backward", "reshard_after_backward"),
        ("set_keep_unsharded_storage", "keep"),
        ("set_unshard_in_backward", "unshard_in_backward"),
    ):
        with pytest.raises(ValueError, match=rf"^{setting}='last', expected True or False; pass"):
            getattr(model, name)("last")
    model.set_requires_gradient_sync(np.bool_(True))
    model.set_is_last_backward(torch.tensor(True))
    model.set_reshard_after_backward(1)
    with pytest.raises(ValueError, match=r"FSDPMLP has no method 'generate'"):
        register_fsdp_forward_method(model, "generate")
    register_fsdp_forward_method(nn.Linear(2, 2), "generate")  # no-op, as in stock
    _step(model)
    with pytest.raises(RuntimeError, match=r"on the root, 'blocks\.1' is below it"):
        model.blocks[1].reset_iter_state()


@on_ranks(2)
def test_prefetch_depth_below_the_root(rank: int, world_size: int) -> None:
    model = _mlp()
    model.blocks[1].set_prefetch_depth(2)
    with pytest.raises(RuntimeError, match=r"set_prefetch_depth.*'blocks\.1'.*root FSDPMLP.*call it there"):
        _step(model)
    model.set_prefetch_depth(2)
    _step(model)


@on_ranks(2)
def test_tied_parameters_with_different_policies(rank: int, world_size: int) -> None:
    for options in (
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        {"mesh": rank_mesh((2, 1), ("replicate", "shard"))},
    ):
        for first, second in ((options, {}), ({}, options)):
            model = Composed(None, first=nn.Linear(4, 4, bias=False), second=nn.Linear(4, 4, bias=False))
            model.second.weight = model.first.weight
            fully_shard(model.first, **first)
            with pytest.raises(ValueError, match=r"'weight' is tied to one that an earlier.*Give both calls the same"):
                fully_shard(model.second, **second)
            assert type(model.second) is nn.Linear


# -- errors of the first forward ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_parameters_on_the_meta_device(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = MLP()
    shard_each(*model.blocks, model)
    with pytest.raises(RuntimeError, match=r"'inp\.weight' is still on the meta device.*materialize"):
        _step(model)
    model.reset_iter_state()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.5)
    _step(model)
    assert all(p.grad is not None for p in model.parameters())
    assert not any(group.is_unsharded for module in model.modules() for group in getattr(module, "_groups", list)())

    model.blocks[1].to("meta")
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.scale' is still on the meta device"):
        _step(model)


def _differing(how: str, odd: bool) -> nn.Module:
    """A model with one difference on the odd rank."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 8 if how == "shape" and odd else 6)
    if how == "dtype" and odd:
        second = second.double()
    if how == "frozen" and odd:
        second.weight.requires_grad_(False)
    if how == "missing" and odd:
        second.bias = None
    model: nn.Module = nn.Sequential(first, second)
    if how == "order":
        layers = {"layer0": first, "layer1": second}
        names = sorted(layers, reverse=odd)
        model = Composed(lambda module, x: module.layer1(module.layer0(x)), **{name: layers[name] for name in names})
    if how == "sharded":
        shard_each(*(first,) if odd else (first, second))
    if how == "grouped":
        shard_each(*([first, second],) if odd else (first, second))
    on_last = how == "dim" and odd
    return fully_shard(model, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1) if on_last else None)


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("shape", r"rank 0 has '1\.weight' of shape \(6, 6\).*rank 2 has '1\.weight' of shape \(8, 6\)"),
        ("dtype", r"rank 0 has '1\.weight'.*float32.*rank 2 has '1\.weight'.*float64"),
        ("dim", r"rank 0 has '0\.weight'.*sharded on dim 0.*rank 2 has '0\.weight'.*sharded on dim 1"),
        ("frozen", r"requires_grad=True, .*rank 2 has '1\.weight'.*requires_grad=False"),
        ("missing", r"rank 0 has '1\.bias'.*rank 2 has no further parameter"),
        ("order", r"rank 0 has 'layer0\.weight'.*rank 2 has 'layer1\.weight'"),
        ("sharded", r"rank 0 has '0\.weight'.*begins with '0\.weight', rank 2 has '1\.weight'.*in the root's group"),
        ("grouped", r"'1\.weight'.*that begins with '1\.weight', rank 2 has '1\.weight'.*that begins with '0\.weight'"),
    ],
)
@on_ranks(3)
def test_ranks_that_disagree(rank: int, world_size: int, how: str, seen: str) -> None:
    model = _differing(how, odd=rank == world_size - 1)
    with pytest.raises(RuntimeError, match=seen) as caught:
        model(torch.ones(2, 6))
    assert "Every rank must build the same model and call fully_shard on the same modules" in str(caught.value)


@on_ranks(4)
def test_all_ranks_of_a_2d_mesh_hear_of_a_difference(rank: int, world_size: int) -> None:
    """The first axis of the mesh shows rank 3's difference to rank 2, the second one to rank 1; rank 0 sees neither."""
    hsdp = rank_mesh((2, 2), ("replicate", "shard"))
    for mesh, last, message in (
        (
            hsdp,
            nn.Linear(6, 8 if rank == 3 else 6),
            r"'1\.weight' of shape \(6, 6\).*rank 3 has '1\.weight' of shape \(8, 6\)",
        ),
        (None, nn.Linear(6, 6, bias=rank < 2), r"rank 2 has no further parameter \(2 of 4 ranks differ from rank 0\)"),
    ):
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(6, 6), last), mesh=mesh)
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(2, 6))


@on_ranks(2)
def test_forward_that_skips_the_root(rank: int, world_size: int) -> None:
    model = _mlp()
    model.blocks[1](torch.ones(2, 7))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'blocks\.1' ran forward.*outermost sharded module"):
            _step(model)

    grouped = Composed(lambda module, x: module.b(module.a(x)), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    fully_shard([grouped.a, grouped.b])
    fully_shard(grouped)
    with pytest.raises(RuntimeError, match=r"\['FSDPLinear', 'FSDPLinear'\].*contains them all"):
        grouped.a(torch.ones(1, 2))
    # Nothing is left over from the refused forward.
    grouped(torch.ones(1, 2)).sum().backward()
    assert isinstance(grouped.a.weight, DTensor)
    assert grouped.b.weight.grad is not None


@on_ranks(2)
def test_optimizer_built_too_early(rank: int, world_size: int) -> None:
    model = MLP()
    original = model.inp.weight
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_each(*model.blocks, model)
    _step(model)
    with pytest.raises(RuntimeError, match=r"SGD holds a plain tensor for parameter 'inp\.weight'.*after fully_shard"):
        early.step()
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.inp.weight.to_local().clone()
    late.step()
    assert not torch.equal(before, model.inp.weight.to_local()) or before.numel() == 0

    late.add_param_group({"params": [original]})
    with pytest.raises(RuntimeError, match=r"'inp\.weight'"):
        late.step()

    out = model(torch.ones(2, 5))  # the root's parameters are unsharded until backward
    during = torch.optim.SGD(model.parameters(), lr=0.1)
    out.sum().backward()
    with pytest.raises(RuntimeError, match=r"'inp\.weight'"):
        during.step()


@on_ranks(2)
def test_optimizer_of_parameters_that_a_load_has_replaced(rank: int, world_size: int) -> None:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model)
    optimizer.step()
    # Replaced for a while only: the next step is as before.
    with torch.no_grad():
        others = {name: one.detach().clone() for name, one in model.named_parameters()}
        torch.func.functional_call(model, others, (torch.ones(2, 5),))
    optimizer.step()
    _step(model)
    optimizer.step()

    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    _step(model)
    with pytest.raises(RuntimeError, match=r"'inp\.weight'.*that load_state_dict\(assign=True\) has replaced"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


# -- state dicts -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_state_dicts(rank: int, world_size: int) -> None:
    model = _mlp()
    good = model.state_dict()

    missing = {fqn: value for fqn, value in good.items() if fqn != "blocks.1.scale"}
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"blocks\.1\.scale"'):
        model.load_state_dict(missing)
    result = model.load_state_dict({**missing, "blocks.1.shift": torch.ones(2)}, strict=False)
    assert result == (["blocks.1.scale"], ["blocks.1.shift"])

    misshapen = {**good, "blocks.0.up.weight": distribute_tensor(torch.ones(4, 7), rank_mesh((2,)), [Shard(0)])}
    with pytest.raises(RuntimeError, match=r"(?s)size mismatch for blocks\.0\.up\.weight.*\[4, 7\].*\[13, 7\]"):
        model.load_state_dict(misshapen)

    plain = {**good, "blocks.0.up.weight": torch.ones(13, 7), "out.bias": torch.ones(1)}
    for assign in (False, True):
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(plain, assign=assign)
        for fqn in ("blocks.0.up.weight", "out.bias"):
            assert re.search(rf"'{fqn}' is a plain tensor.*load_full_state_dict", str(caught.value)), caught.value

    elsewhere = {**good, "inp.weight": distribute_tensor(torch.ones(7, 5), rank_mesh((2,)), [Shard(1)])}
    model.load_state_dict(elsewhere)  # DTensor redistributes
    assert torch.equal(model.inp.weight.full_tensor(), torch.ones(7, 5))
    refused = r"'inp\.weight' was replaced by a DTensor.*dim=1.*expected.*dim=0"
    with pytest.raises(ValueError, match=refused):
        model.load_state_dict(elsewhere, assign=True)
    with pytest.raises(ValueError, match=refused):
        _step(model)
    model.reset_iter_state()
    model.load_state_dict(good, assign=True)
    _step(model)
    assert model.inp.weight.grad is not None


@on_ranks(2)
def test_parameter_replaced_by_a_plain_one(rank: int, world_size: int) -> None:
    model = _mlp()
    original = model.blocks[2].scale
    model.blocks[2].scale = nn.Parameter(torch.ones(7))
    with pytest.raises(ValueError, match=r"'blocks\.2\.scale' was replaced by a plain tensor of shape \(7,\).*DTensor"):
        _step(model)
    model.reset_iter_state()
    model.blocks[2].scale = original
    _step(model)
    assert original.grad is not None

    longer = distribute_tensor(torch.ones(9), rank_mesh((2,)), [Shard(0)])
    model.blocks[2].scale = nn.Parameter(longer)
    with pytest.raises(ValueError, match=r"'blocks\.2\.scale' was replaced by.* \(9,\).*expected shape \(7,\)"):
        _step(model)
    model.reset_iter_state()
    cut_otherwise = DTensor.from_local(torch.ones(2), rank_mesh((2,)), [Shard(0)], shape=(7,), stride=(1,))
    model.blocks[2].scale = nn.Parameter(cut_otherwise)
    length = original.to_local().numel()
    with pytest.raises(ValueError, match=rf"'blocks\.2\.scale' has a local shard.*\(2,\).*expected \({length},\)"):
        _step(model)
    model.reset_iter_state()
    model.blocks[2].scale = original

    # While the root's parameters are unsharded an assignment must not be lost either.
    model(torch.ones(2, 5))
    model.out.bias = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"'out\.bias' was replaced by a plain tensor"):
        _step(model)


# -- communication -----------------------------------------------------------------------------------------------------


def _branches(mesh: DeviceMesh | None = None) -> Any:
    def run(module: Any, x: Tensor, order: str) -> Tensor:
        for name in order.split():
            x = getattr(module, name)(x)
        return x

    return shard_children(Composed(run, left=nn.Linear(4, 4), right=nn.Linear(4, 4)), mesh=mesh)


@on_ranks(2)
def test_another_order_is_reported(rank: int, world_size: int) -> None:
    os.environ["SHARDKIT_DEBUG"] = "order"
    model = _branches()
    model.set_prefetch_depth(0)
    model(torch.ones(2, 4), "left right").sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4), "left right" if rank else "right left")
    text = str(caught.value)
    assert re.search(r"rank 0: .*all-gather of 'right'(\n|$)", text), text
    assert re.search(r"rank 1: .*all-gather of 'left'(\n|$)", text), text
    assert "same modules in the same order" in text
    assert "reduce-scatter of 'left." in text


@pytest.mark.parametrize(
    ("debug", "order", "message"),
    [
        ("order", "left right", r"reached all-gather of 'left.*a peer did not reach.*newest last: "),
        ("", "right", r"^right: all-gather.*(waiting for its peers|launching)"),
    ],
)
@on_ranks(2, isolated=True)
def test_a_wait_for_a_rank_that_never_comes(rank: int, world_size: int, debug: str, order: str, message: str) -> None:
    os.environ["SHARDKIT_DEBUG"] = debug
    mesh = impatient_mesh()
    model = _branches(mesh)
    model(torch.ones(2, 4), "left right").sum().backward()
    if rank == 0:
        neighbours = neighbours_of(mesh.get_group())
        assert neighbours is not None
        neighbours._timeout = 0.2  # the peer has come wherever it has to
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), mesh.get_group())
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(2, 4), order)


def _mixture() -> Any:
    """Experts of one shape in one group; ranks choose."""

    def run(module: Any, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        return sum((torch.tanh(module.experts[index](x)) for index in chosen), x)

    return Composed(run, experts=nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3)))


@on_ranks(2, isolated=True)
def test_ranks_that_choose_other_experts_are_told(rank: int, world_size: int) -> None:
    """In shared memory gradients of one expert are not taken for another's of the same size."""
    model = fully_shard(_mixture(), mesh=impatient_mesh())
    with pytest.raises(RuntimeError, match=r"^FSDPComposed: reduce-scatter") as caught:
        model(torch.ones(2, 4), (rank,)).sum().backward()
    text = str(caught.value)
    assert "same modules in the same order" in text or "'experts.0.weight' and" in text or "losed" in text, text
    assert "set_reduce_scatter_unused_params(True)" in text


@on_ranks(4, isolated=True)
def test_replicas_that_choose_other_experts_are_told(rank: int, world_size: int) -> None:
    """No other check sees that one expert's gradient is added to another's of the same size."""
    os.environ["SHARDKIT_DEBUG"] = "order"
    model = fully_shard(_mixture(), mesh=rank_mesh((2, 2), ("replicate", "shard")))
    model(torch.ones(2, 4), (2,)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4), (rank // 2,)).sum().backward()
    for other in range(2):
        text = rf"rank {2 * other + rank % 2}: .*all-reduce of 'experts\.{other}\.weight'\n"
        assert re.search(text, str(caught.value)), caught.value


@on_ranks(2)
def test_a_weight_kept_from_before_sharding(rank: int, world_size: int) -> None:
    """Forward computes with a reference to the weight, or with a view of it, that sharding does not replace."""
    for keep in (lambda weight: weight, torch.t):
        linear = nn.Linear(4, 4)
        kept = keep(linear.weight)
        layer = Composed(lambda module, x, kept=kept: x @ kept, linear=linear)
        model = fully_shard(nn.Sequential(layer, nn.Linear(4, 4)))
        with pytest.raises(
            RuntimeError, match=r"plain tensor that was parameter '0\.linear\.weight' before fully_shard"
        ):
            model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("steps_before", [0, 1])
@on_ranks(2)
def test_a_module_that_came_after_sharding(rank: int, world_size: int, steps_before: int) -> None:
    ignored = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), ignored, nn.Linear(4, 4))
    fully_shard(model, ignored_params=set(ignored.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps_before):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    model[2] = nn.Linear(4, 2)
    model(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"this SGD trains parameter '2\.weight', which was added to FSDPSequential"):
        optimizer.step()
    fully_shard(model[2])
    torch.optim.SGD(model[0].parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_gradient_hook_that_returns_no_dtensor(rank: int, world_size: int) -> None:
    model = _mlp()
    next(model.parameters()).register_hook(lambda gradient: gradient.to_local())
    with pytest.raises(
        RuntimeError, match=r"a gradient hook of parameter '[a-z.]+' returned Tensor .*expected a DTensor"
    ):
        _step(model)


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_a_sparse_gradient(rank: int, world_size: int, sync: bool) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    model.set_requires_gradient_sync(sync)
    ids = torch.arange(3)
    if not sync:
        model(ids).sum().backward()
        model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"gradient of parameter '0\.weight' is sparse .*sparse=False"):
        model(ids).sum().backward()
