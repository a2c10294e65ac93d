"""Tensor subclasses that bring their own all-gather, torchao's and others, against stock and the mathematics."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.heard import heard
from tests.support.meshes import data_mesh
from tests.support.models import Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal
from tests.support.wire_weights import BFloat16OnTheWire, SameOnTheWire, WireWeight


class Int8OnTheWire(WireWeight):
    """The 5-argument form. One scale for each row travels along; the unsharded weight is memory of its own."""

    calls: ClassVar[list[tuple[Any, ...]]] = []

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        self.calls.append((mesh, outer_size, outer_stride, type(module), mp_policy.param_dtype))
        scale = self._inner.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
        return ((self._inner / scale).round().to(torch.int8), scale), {"device": self._inner.device.type}

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        assert metadata == {"device": "cpu"}
        data, scale = gathered
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # autograd has saved it
                out.copy_(data.to(param_dtype) * scale.to(param_dtype))
            return None
        weight = data.to(param_dtype) * scale.to(param_dtype)
        return weight, (weight, data, scale)


def _wired(wire: type[WireWeight]) -> nn.Sequential:
    """Wrapped weights beside plain biases; every first dim divides by 1, 2 and 4."""
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)]
    for linear in layers[:3:2]:
        linear.weight = nn.Parameter(wire(linear.weight.detach().clone()))
    return nn.Sequential(*layers)


def _quantized(config: str, **options: Any) -> nn.Sequential:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)])
    training = pytest.importorskip("torchao.prototype.quantized_training")
    pytest.importorskip("torchao.quantization").quantize_(model, getattr(training, config)(**options))
    return model


def _low_rank() -> nn.Sequential:
    """QLoRA: frozen nf4 weights, and two small matrices each that train."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

    def run(layer: Any, x: Tensor) -> Tensor:
        return torch.tanh(nf4.linear_nf4(x, layer.weight) + F.linear(F.linear(x, layer.down), layer.up))

    def layer() -> nn.Module:
        weight = nn.Parameter(nf4.to_nf4(torch.randn(256, 256) / 16), requires_grad=False)
        down, up = (nn.Parameter(torch.randn(shape) / 16) for shape in ((4, 256), (256, 4)))
        return Composed(run, weight=weight, down=down, up=up)

    return nn.Sequential(layer(), layer(), layer())


TORCHAO: dict[str, Callable[[], nn.Sequential]] = {
    "torchao int8": partial(_quantized, "int8_weight_only_quantized_training"),
    "torchao int8 mixed precision": partial(_quantized, "int8_mixed_precision_training", module_swap=False),
    "torchao nf4": _low_rank,
}
MODELS = TORCHAO | {
    "bfloat16": partial(_wired, BFloat16OnTheWire),
    "int8": partial(_wired, Int8OnTheWire),
    "same": partial(_wired, SameOnTheWire),
}


def _train(api: Any, rank: int, kind: str, **options: Any) -> dict[str, Any]:
    if kind == "bfloat16":
        options["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    torch.manual_seed(0)
    model = MODELS[kind]()
    blocks = [module for module in model if [*module.parameters()]]
    shard_each(*blocks[:-1], model, api=api, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    width = next(model.parameters()).shape[1]
    trace: dict[str, Any] = {}
    torch.manual_seed(rank)  # torchao's int8 rounds its updates stochastically
    for step in range(4):
        loss = model(torch.randn(24, width)).square().mean()
        trace[f"step {step}: loss"] = loss.detach()
        loss.backward()
        for fqn, parameter in model.named_parameters():
            if parameter.requires_grad:
                trace |= _plain(f"step {step}: gradient of {fqn}", parameter.grad.to_local())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trace[f"step {step}: evaluated"] = model(torch.ones(2, width))
    for module in (*blocks[:-1], model):
        module.reshard()
    for fqn, parameter in model.named_parameters():
        trace |= _plain(fqn, parameter.to_local())
    assert trace["step 0: loss"] != trace["step 3: loss"]
    return trace


def _plain(name: str, tensor: Any) -> dict[str, Any]:
    if type(tensor) is Tensor:
        return {name: tensor.detach().clone()}
    inner, _ = tensor.__tensor_flatten__()
    return {f"{name}.{one}": getattr(tensor, one).clone() for one in inner} | {f"type of {name}": type(tensor)}


def columns(parameter: Tensor) -> Shard:
    return Shard(parameter.ndim - 1)


@pytest.mark.parametrize(
    ("world_size", "kind", "options"),
    [
        # On a single rank stock hands on one of the hook's tensors only, so int8 and its scales cannot be compared.
        (1, "bfloat16", {"reshard_after_forward": True}),
        (1, "same", {"reshard_after_forward": False}),
        (2, "bfloat16", {"reshard_after_forward": False}),
        (2, "int8", {"reshard_after_forward": True}),
        (2, "int8", {"reshard_after_forward": False}),
        (2, "same", {"reshard_after_forward": True}),
        (4, "int8", {"hsdp": True}),  # the mesh that the hook gets is the shard axis
        (2, "same", {"shard_placement_fn": columns}),  # stock cannot join the scales of int8 on columns
        (4, "bfloat16", {"hsdp": True, "shard_placement_fn": columns}),
        *((2, kind, {}) for kind in TORCHAO),
        (2, "torchao int8 mixed precision", {"reshard_after_forward": False, "shard_placement_fn": columns}),
    ],
)
@on_ranks()
def test_training_like_stock(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    mesh = data_mesh(options.pop("hsdp", False))
    assert_equal(*(_train(api, rank, kind, mesh=mesh, **options) for api in (shardkit, stock)))


@on_ranks(4)
def test_arguments_of_the_hooks(rank: int, world_size: int) -> None:
    BFloat16OnTheWire.calls.clear()
    Int8OnTheWire.calls.clear()
    mesh = rank_mesh((2, 2), ("replicate", "shard"))
    policy = shardkit.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for wire in (BFloat16OnTheWire, Int8OnTheWire):
        linear = nn.Linear(8, 16, bias=False)
        linear.weight = nn.Parameter(wire(linear.weight.detach()))
        shardkit.fully_shard(linear, mesh=mesh, mp_policy=policy)
        linear.unshard()
        unsharded = linear.weight
        assert unsharded.dtype == torch.bfloat16
        assert unsharded.shape == (16, 8)
        linear.reshard()
        assert isinstance(linear.weight, DTensor)
        assert isinstance(linear.weight.to_local(), wire)
        assert linear.weight.dtype == torch.float32
    (shard_mesh,) = BFloat16OnTheWire.calls
    assert shard_mesh == mesh["shard"]
    assert Int8OnTheWire.calls == [(mesh["shard"], torch.Size([16, 8]), (8, 1), type(linear), torch.bfloat16)]


@on_ranks(1, 2)
def test_memory_is_freed(rank: int, world_size: int) -> None:
    """Resharding frees the memory of the unsharded weight, both its own and the wire's."""
    for wire in (BFloat16OnTheWire, Int8OnTheWire):
        linear = nn.Linear(8, 16, bias=False)
        linear.weight = nn.Parameter(wire(linear.weight.detach()))
        shardkit.fully_shard(linear, mesh=rank_mesh((world_size,)))
        for _ in range(2):
            linear.unshard()
            weight = linear.weight
            assert weight.untyped_storage().nbytes() == 16 * 8 * weight.itemsize
            linear.reshard()
            assert weight.untyped_storage().nbytes() == 0


class Joined(NamedTuple):
    """As torch's AllGatherInput."""

    tensor: Tensor
    dim: int = 0
    output_size: tuple[int, ...] | None = None


class PaddedOnTheWire(WireWeight):
    """Uneven shards: the hook pads its shard to a full rank's chunk, the other hook cuts the tail off."""

    def padded(self, mesh: DeviceMesh, outer_size: torch.Size) -> Tensor:
        shapes = zip(outer_size, self._inner.shape, strict=True)
        full = [size if size == here else -(-size // mesh.size()) for size, here in shapes]
        padded = torch.zeros(full, dtype=torch.bfloat16)
        padded[: len(self._inner), : self._inner.shape[1]] = self._inner
        return padded

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.padded(mesh, outer_size),), outer_size[0]

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (data,) = gathered
        if out is not None:
            return None
        return data[:metadata], (data[:metadata],)


class PaddingLeftOn(PaddedOnTheWire):
    """The other hook leaves the padding on, and core cuts it off."""

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return None if out is not None else (gathered[0], gathered)


class JoinedByName(PaddedOnTheWire):
    """Each tensor names the dim that it is joined on."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        padded, rank = self.padded(mesh, outer_size), torch.tensor(mesh.get_local_rank())
        tags = (Joined(rank), Joined(rank.expand(2, 1, 3), -2, (2, 3 * mesh.size())))
        return (Joined(padded, -1), *tags), (outer_size[1], mesh.size())

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (data, ranks, tags), (width, world_size) = gathered, metadata
        assert torch.equal(ranks, torch.arange(world_size))
        assert torch.equal(tags, ranks.repeat_interleave(3).expand(2, -1))
        weight = data[:, :width]
        return None if out is not None else (weight, gathered)


@pytest.mark.parametrize(
    ("kind", "dim"), [(PaddedOnTheWire, 0), (PaddingLeftOn, 0), (PaddingLeftOn, 1), (JoinedByName, 1)]
)
@on_ranks(2, 3, 4)
def test_uneven_padded_by_the_hook(rank: int, world_size: int, kind: type[PaddedOnTheWire], dim: int) -> None:
    """Rows or columns, 5, over 2, 3 and 4 ranks: the last rank holds less than the others, or nothing."""
    torch.manual_seed(0)
    linear = nn.Linear(*((3, 5) if dim == 0 else (5, 3)), bias=False)
    full = linear.weight.detach().clone()
    linear.weight = nn.Parameter(kind(full.clone()))
    shardkit.fully_shard(linear, mesh=rank_mesh((world_size,)), shard_placement_fn=lambda parameter: Shard(dim))
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.5)
    for step in range(3):
        seen = linear(torch.eye(full.shape[1]).bfloat16())
        assert torch.equal(seen, full.bfloat16().t()), step
        seen.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        full -= 0.5
    assert isinstance(linear.weight.to_local(), kind)


def _gathered_by(before: Callable[..., Any], after: Any = BFloat16OnTheWire.fsdp_post_all_gather) -> type[WireWeight]:
    """A class with these hooks, of which `after` may be missing."""
    hooks = {"fsdp_pre_all_gather": before, "fsdp_post_all_gather": after}
    return type("Wire", (WireWeight,), {name: hook for name, hook in hooks.items() if hook is not None})


@on_ranks(2, 4)
def test_uneven_shards_are_refused_on_every_rank(rank: int, world_size: int) -> None:
    linear = nn.Linear(3, 5, bias=False)
    wire = _gathered_by(lambda weight, mesh: ((weight._inner.bfloat16(),), None))
    linear.weight = nn.Parameter(wire(linear.weight.detach()))
    shardkit.fully_shard(linear, mesh=rank_mesh((world_size,)))
    with pytest.raises(ValueError, match=r"(?s)'weight'.*\(5, 3\).*pad"):
        linear(torch.ones(1, 3).bfloat16())


@on_ranks(2)
def test_malformed_hooks(rank: int, world_size: int) -> None:
    def shard_and_run(wire: type[WireWeight]) -> None:
        linear = nn.Linear(8, 16, bias=False)
        linear.weight = nn.Parameter(wire(linear.weight.detach()))
        shardkit.fully_shard(linear, mesh=rank_mesh((world_size,)), shard_placement_fn=columns)
        linear(torch.ones(1, 8))

    for before, error, message in (
        (lambda weight, mesh, something: None, TypeError, "'weight' takes 2 arguments"),
        (
            lambda weight, mesh: ((weight._inner.abs().amax(0),), None),
            *(ValueError, r"'weight' .* shape \(4,\), .* on dim 1; expected \(16, 4\), or \(16,\) and any"),
        ),
        (
            lambda weight, mesh: ((Joined(weight._inner, 2),), None),
            *(ValueError, r"'weight' .* shape \(16, 4\) joined on dim 2"),
        ),
    ):
        with pytest.raises(error, match=message):
            shard_and_run(_gathered_by(before))
    with pytest.raises(TypeError, match=r"'weight'.*fsdp_post_all_gather"):
        shard_and_run(_gathered_by(BFloat16OnTheWire.fsdp_pre_all_gather, None))


@on_ranks(1, 2)
def test_state_dict(rank: int, world_size: int) -> None:
    """A state dict holds the wrapped shards, and loading copies into them."""
    model = shardkit.fully_shard(_wired(Int8OnTheWire), mesh=rank_mesh((world_size,)))
    model(torch.randn(2, 8)).sum().backward()
    saved = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    assert isinstance(saved["0.weight"].to_local(), Int8OnTheWire)
    with torch.no_grad():
        before = model(torch.ones(2, 8))
        for parameter in model.parameters():
            parameter.mul_(0.5)
        assert not torch.equal(model(torch.ones(2, 8)), before)
        model.load_state_dict(saved)
        assert torch.equal(model(torch.ones(2, 8)), before)


@on_ranks(4)
def test_smaller_group(rank: int, world_size: int) -> None:
    """Resharding to a smaller group after forward, which stock refuses, gives the same numbers as to all ranks."""
    mesh = rank_mesh((world_size,))
    assert_equal(*(_train(shardkit, rank, "int8", mesh=mesh, reshard_after_forward=to) for to in (2, True)))


def _put_hooks_on(local: Tensor, called: list[DeviceMesh]) -> None:
    def before(mesh: DeviceMesh) -> Any:
        called.append(mesh)
        return (local.bfloat16(),), None

    def after(gathered: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        (data,) = gathered
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(data.view(out.shape))
            return None
        weight = data.to(dtype)
        return weight, (weight, data)

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


@pytest.mark.parametrize("cut", [None, columns])
@on_ranks(2)
def test_hooks_that_are_put_on_local_tensors(rank: int, world_size: int, cut: Any) -> None:
    """The hooks may also be put on the local tensors of a model that is sharded already, and has run."""
    seen = []
    for fully_shard in (stock.fully_shard, shardkit.fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        for layer in (model[0], model[2], model):
            fully_shard(layer, shard_placement_fn=cut)
        if fully_shard is shardkit.fully_shard:
            model(torch.ones(2, 8))
        called: list[DeviceMesh] = []
        for parameter in model.parameters():
            _put_hooks_on(parameter._local_tensor, called)
        output = model(torch.ones(2, 8))
        output.sum().backward()
        assert len(called) >= 4
        seen.append([output, *(parameter.grad.full_tensor() for parameter in model.parameters())])
    for theirs, ours in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


# -- torchao -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TORCHAO)
@on_ranks(1)
def test_one_rank_like_one_process(rank: int, world_size: int, kind: str) -> None:
    """Stock hands on one of the hook's tensors only on a single rank, so the unsharded model is the reference."""
    torch.manual_seed(0)
    model = TORCHAO[kind]()
    sharded = copy.deepcopy(model)
    shardkit.fully_shard(sharded, mesh=rank_mesh((world_size,)))
    for step in range(3):
        x = torch.randn(24, next(model.parameters()).shape[1])
        losses = [one(x).square().mean() for one in (model, sharded)]
        assert torch.equal(*losses), step
        for one, loss in zip((model, sharded), losses, strict=True):
            loss.backward()
            torch.manual_seed(step)
            torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.5).step()
            one.zero_grad()


@on_ranks(2)
def test_float8_gathers_a_byte_for_each_element(rank: int, world_size: int) -> None:
    """Equal batches on both ranks, so the unsharded model is the reference: stock cannot gather float8 with gloo."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(3)])
    sharded = copy.deepcopy(plain)
    for model in (plain, sharded):
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=model is sharded, emulate=True)
        float8.convert_to_float8_training(model, config=config)
    shard_each(*sharded, sharded)
    with heard(shardkit.events.GatherStarted) as started:
        for step in range(3):
            x = torch.randn(24, 64, generator=torch.Generator().manual_seed(step))
            losses = [(model(x) - x.sin()).square().mean() for model in (plain, sharded)]
            assert torch.equal(*losses), step
            for model, loss in zip((plain, sharded), losses, strict=True):
                loss.backward()
                torch.optim.SGD(model.parameters(), lr=0.5).step()
                model.zero_grad()
    assert {(one.bytes, one.wire_bytes, one.dtype) for one in started} == {(64 * 64, 64 * 32, torch.float8_e4m3fn)}
