"""Tensor subclasses that bring their own all-gather, in torchao's manner, against stock and the mathematics."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.meshes import data_mesh
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


WIRES = {"bfloat16": BFloat16OnTheWire, "int8": Int8OnTheWire, "same": SameOnTheWire}


def _model(api: Any, wire: type[WireWeight], **options: Any) -> Any:
    """Wrapped weights beside plain biases, in one group; every first dim divides by 1, 2 and 4."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)]
    for linear in layers[:3:2]:
        linear.weight = nn.Parameter(wire(linear.weight.detach().clone()))
    return shard_each(layers[0], layers[2], nn.Sequential(*layers), api=api, **options)


def _train(api: Any, rank: int, wire: str, steps: int = 4, **options: Any) -> dict[str, Tensor]:
    if wire == "bfloat16":
        options["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = _model(api, WIRES[wire], **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2)
    trace = {}
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * rank + step)
        loss = model(torch.randn(3, 8, generator=generator)).square().mean()
        trace[f"step {step}: loss"] = loss.detach()
        loss.backward()
        for fqn, parameter in model.named_parameters():
            if parameter.requires_grad:
                trace[f"step {step}: gradient {fqn}"] = _plain(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        for fqn, parameter in model.named_parameters():
            trace[f"step {step}: parameter {fqn}"] = _plain(parameter)
        with torch.no_grad():
            trace[f"step {step}: evaluated"] = model(torch.ones(2, 8))
    return trace


def _plain(parameter: Any) -> Tensor:
    local = parameter.detach().to_local()
    return (local._inner if isinstance(local, WireWeight) else local).clone()


def columns(parameter: Tensor) -> Shard:
    return Shard(parameter.ndim - 1)


@pytest.mark.parametrize(
    ("world_size", "wire", "options"),
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
    ],
)
@on_ranks()
def test_training_like_stock(rank: int, world_size: int, wire: str, options: dict[str, Any]) -> None:
    mesh = data_mesh(options.pop("hsdp", False))
    assert_equal(*(_train(api, rank, wire, mesh=mesh, **options) for api in (shardkit, stock)))


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
    model = _model(shardkit, Int8OnTheWire, mesh=rank_mesh((world_size,)))
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
