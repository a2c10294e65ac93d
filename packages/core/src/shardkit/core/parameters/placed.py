"""`PlacedTensor`: a DTensor on one of our own placements.

Note [Operators on our placements]
torch's operators know `Shard`, `Replicate` and `Partial`; with another placement they would guess, or gather with wrong
sizes. So a `PlacedTensor` runs operators itself. Elementwise operators run on the local tensors, without communication.
Norms are summed over the ranks, for third-party clipping and loggers. Random numbers are drawn for the whole tensor, as
torch's initialisers want them. All other operators raise. Optimizers step on plain tensors (`plain_steps.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardkit.core.parameters.placements import is_ours, layout_for
from shardkit.core.parameters.region import region_at, region_of
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor

# Operators that keep each element in its place but lack a tag for it.
_IN_PLACE = frozenset(
    {
        "_pin_memory",
        "_to_copy",
        "alias",
        "clone",
        "copy_",
        "detach",
        "empty_like",
        "fill_",
        "full_like",
        "is_pinned",
        "lift_fresh",
        "ones_like",
        "zero_",
        "zeros_like",
    }
)
_ON_LISTS = ("_foreach_", "_fused_adam", "_fused_adagrad", "_fused_sgd")
# Operators on lists that return other shapes.
_REDUCING = frozenset({"_foreach_max", "_foreach_mm", "_foreach_powsum"})
_NEW = frozenset({"new_empty", "new_full", "new_ones", "new_zeros"})
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class PlacedTensor(DTensor):
    """A DTensor with `Owned` or `Blocks` on one axis of its mesh. See Note [Operators on our placements]."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function that is called like this one
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        if name == "copy_" and args[0].shape == args[1].shape and not _alike(args[0], args[1]):
            return _copy_between(args[0], args[1])
        if name == "linalg_vector_norm":
            return _norm(func, *args, **kwargs)
        if name == "equal":
            return _equal(func, *args)
        if name == "any" and len(args) == 1:  # trunc_normal_ asks whether to draw again
            return _any(func, args[0])
        if name == "_foreach_norm":
            order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
            return [torch.linalg.vector_norm(one, order, dtype=kwargs.get("dtype")) for one in args[0]]
        if name == _UNSCALE:
            return _unscale(func, args[0], *args[1:])
        if name == "view" and tuple(args[1]) == tuple(args[0].shape):  # how torch finds a tensor's node in the graph
            return like_dtensor(local_of(args[0]), args[0])
        if name in _NEW:
            return _new(func, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and name.endswith("_"):
            return _draw(func, *args, **kwargs)
        if name in _REDUCING:
            raise _refusal(func, _first(args))
        if name in _IN_PLACE or name.startswith(_ON_LISTS) or torch.Tag.pointwise in func.tags:
            return _elementwise(func, args, kwargs, on_lists=name.startswith(_ON_LISTS))
        raise _refusal(func, _first((*args, *kwargs.values())))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, plain, on every rank of the mesh. Collective. Its gradient goes to this rank's part."""
        return _Whole.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> DTensor:
        """Converts to a DTensor with torch's placements on the same mesh. Collective; carries no gradient."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        wanted = tuple(self.placements if placements is None else placements)
        if mesh == self.device_mesh and wanted == tuple(self.placements):
            return self
        if mesh != self.device_mesh or any(is_ours(one) for one in wanted):
            raise ValueError(
                f"{self._described()} cannot be redistributed to {wanted} on {mesh}; shard the model again, or save a "
                "checkpoint and load it into a model with these placements"
            )
        return self._gathered().redistribute(placements=wanted)

    def _gathered(self) -> DTensor:
        """The same values with our placement replaced by Replicate: one broadcast for each rank that holds a part."""
        mesh, shape = self.device_mesh, tuple(self.shape)
        axis = next((number for number, one in enumerate(self.placements) if is_ours(one)), None)
        if axis is None:  # on a mesh of replicas only
            return new_dtensor(local_of(self).detach(), mesh, self.placements, self.shape)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, self._described()
        others = [Replicate() if number == axis else one for number, one in enumerate(self.placements)]
        mine = local_of(self).detach()
        whole = mine.new_empty(region_at("", shape, others, mesh.mesh.shape, coordinate).shape)
        layout = layout_for(self.placements[axis], tuple(whole.shape), mesh.size(axis))
        rows = whole.view(layout.shape)
        for rank in range(mesh.size(axis)):
            target = rows.narrow(0, layout.offset(rank), layout.length(rank))
            if not target.numel():
                continue
            piece = mine.contiguous() if rank == coordinate[axis] else torch.empty_like(target)
            on_wire = piece.to(mesh.device_type)
            dist.broadcast(on_wire, group=mesh.get_group(axis), group_src=rank)
            target.copy_(on_wire)
        return new_dtensor(whole, mesh, others, self.shape)

    def _described(self) -> str:
        return f"a tensor of shape {tuple(self.shape)} with placements {tuple(self.placements)}"

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PlacedTensor(local_tensor={local_of(self)}, placements={tuple(self.placements)})"

    # -- queries of torch.distributed.checkpoint
    # ------------------------------------------------------------------------

    def _boxes(self) -> list[tuple[torch.Size, torch.Size, Any]]:
        return [
            (torch.Size(one.start for one in where), torch.Size(one.stop - one.start for one in where), in_local)
            for where, in_local in region_of("a tensor", self).boxes()
            if math.prod(one.stop - one.start for one in where)
        ]

    def __create_write_items__(self, fqn: str, owner: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local_of(self))
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offset, size), properties, self.shape),
            )
            for offset, size, _ in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, size) for offset, size, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offset, size, in_local in self._boxes():
            if offset == index.offset:
                return local_of(self).detach()[in_local].view(size)
        raise ValueError(
            f"{index.fqn}: this rank holds no box at {index.offset} of {self._described()}; use CheckpointManager"
        )


class _Whole(torch.autograd.Function):
    """`PlacedTensor.full_tensor`."""

    @staticmethod
    def forward(ctx: Any, placed: PlacedTensor) -> torch.Tensor:
        ctx.placed = placed
        return placed._gathered().full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        part = region_of("a gradient", ctx.placed).take(gradient)
        return like_dtensor(part.clone(), ctx.placed)


def _first(args: Sequence[Any]) -> PlacedTensor:
    for one in args:
        for tensor in one if isinstance(one, list | tuple) else (one,):
            if isinstance(tensor, PlacedTensor):
                return tensor
    raise AssertionError("an operator without a PlacedTensor came to PlacedTensor")


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor) or one.device_mesh != other.device_mesh:
        return False
    return one.shape == other.shape and tuple(one.placements) == tuple(other.placements)


def _refusal(func: Any, tensor: PlacedTensor, because: str = "is not known to act on each element by itself") -> Any:
    return NotImplementedError(
        f"{func} {because}, and was called with {tensor._described()}. Use full_tensor() (collective), or to_local() "
        "for this rank's part; clip with shardkit.core.clip_grad_norm_; initialise with shardkit.core.materialize, or "
        "before fully_shard. An optimizer that needs whole matrices takes parameters on Owned()"
    )


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_lists: bool) -> Any:
    """Runs an operator on the local tensors and wraps results of their shape."""
    like = _first(args)

    def local(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(local(one) for one in value)
        if not isinstance(value, torch.Tensor) or (not isinstance(value, DTensor) and not value.ndim):
            return value
        if isinstance(value, DTensor):
            if not value.ndim:
                return value.full_tensor()
            if on_lists or _alike(value, like):
                return local_of(value)
        raise _refusal(
            func,
            like,
            f"got {type(value).__name__} of shape {tuple(value.shape)} with placements "
            f"{tuple(getattr(value, 'placements', ('plain',)))}, which lies in other places",
        )

    sources: Any = like
    if on_lists:
        _refuse_mixed_lists(func, args, like)
        sources = next(one for one in args if isinstance(one, list | tuple))
    results = func(*[local(one) for one in args], **{key: local(value) for key, value in kwargs.items()})
    return _wrapped(results, sources)


def _refuse_mixed_lists(func: Any, args: tuple[Any, ...], like: PlacedTensor) -> None:
    """Checks lists of tensors: they may have several placements, if tensors at the same index are alike."""
    lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], torch.Tensor)]
    for side_by_side in zip(*lists, strict=False):
        full = [one for one in side_by_side if one.ndim]
        if any(not _alike(full[0], one) for one in full[1:]) or any(not isinstance(one, DTensor) for one in full):
            raise _refusal(func, like, "got tensors side by side that lie in different places")


def _wrapped(result: Any, source: Any) -> Any:
    if isinstance(result, list | tuple):
        sources = source if isinstance(source, list | tuple) else [source] * len(result)
        wrapped = [_wrapped(one, like) for one, like in zip(result, sources, strict=True)]
        return wrapped if isinstance(result, list) else tuple(wrapped)
    if not isinstance(result, torch.Tensor) or not isinstance(source, DTensor):
        return result
    if result is local_of(source):
        return source
    assert result.shape == local_of(source).shape, (result.shape, source)
    return like_dtensor(result, source)


def _equal(func: Any, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are equal, on every rank of the mesh (collective)."""
    if one.shape != other.shape:
        return False
    like = _first((one, other))
    if not _alike(one, other):
        raise _refusal(func, like, "got tensors that lie in different places")
    same = torch.tensor(func(local_of(one), local_of(other)), dtype=torch.int32, device=like.device_mesh.device_type)
    return bool(_reduced(same, dist.ReduceOp.MIN, like))


def _any(func: Any, tensor: PlacedTensor) -> torch.Tensor:
    """Whether any element is true, on every rank of the mesh (collective)."""
    found = func(local_of(tensor)).to(tensor.device_mesh.device_type, torch.int32)
    return _reduced(found, dist.ReduceOp.MAX, tensor).bool()


def _new(func: Any, like: PlacedTensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """`new_empty` and similar operators: results of this tensor's shape have its placement; 0-dim ones are plain."""
    local = local_of(like)
    if tuple(size) == tuple(like.shape):
        return like_dtensor(func(local, local.shape, *args, **kwargs), like)
    if tuple(size) == ():
        return func(local, size, *args, **kwargs)
    raise _refusal(func, like, f"was asked for shape {tuple(size)}")


def _draw(func: Any, tensor: PlacedTensor, *args: Any, **kwargs: Any) -> PlacedTensor:
    """A random operator in place. As on a replicated tensor of torch's, whose draws agree on all ranks of the mesh."""
    if any(isinstance(one, torch.Tensor) for one in (*args, *kwargs.values())):
        raise _refusal(func, tensor, "got another tensor")
    mesh, local = tensor.device_mesh, local_of(tensor)
    whole = torch.empty(tensor.shape, dtype=local.dtype, device=mesh.device_type)
    func(new_dtensor(whole, mesh, [Replicate() for _ in tensor.placements], tensor.shape), *args, **kwargs)
    local.copy_(region_of("a tensor", tensor).take(whole))
    return tensor


def _copy_between(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`copy_` from a tensor of the whole shape with another placement (collective, unless it is plain)."""
    full = source.full_tensor() if isinstance(source, DTensor) else source
    if isinstance(target, DTensor):
        local_of(target).copy_(region_of("the target of copy_", target).take(full))
    else:
        target.copy_(full)
    return target


def _reduced(number: torch.Tensor, op: Any, *tensors: DTensor) -> torch.Tensor:
    """Reduces a number in place over the ranks that hold other parts of `tensors` (collective)."""
    groups: dict[int, dist.ProcessGroup] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh
        for axis, one in enumerate(tensor.placements):
            if not one.is_replicate() and mesh.size(axis) > 1:
                groups.setdefault(id(group := mesh.get_group(axis)), group)
    for group in groups.values():
        dist.all_reduce(number, op, group=group)
    return number


def _norm(
    func: Any,
    tensor: PlacedTensor,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> DTensor:
    """The norm of all elements, on every rank of the mesh (collective)."""
    if dim is not None or keepdim or order <= 0:
        raise _refusal(func, tensor, "is known for the norm of all elements and orders above 0")
    local = local_of(tensor)
    numbers = local if local.numel() else local.new_zeros(1)
    part = cast(torch.Tensor, func(numbers, order, dtype=dtype))
    total = part.double().to(tensor.device_mesh.device_type)
    if math.isinf(order):
        total = _reduced(total, dist.ReduceOp.MAX, tensor)
    else:
        total = _reduced(total.pow(order), dist.ReduceOp.SUM, tensor).pow(1 / order)
    replicated = [Replicate() for _ in tensor.placements]
    return new_dtensor(total.to(part.dtype), tensor.device_mesh, replicated, torch.Size(()))


class ReplicatedGradient(DTensor):
    """The gradient of a replicated parameter beside sharded ones.

    A GradScaler takes the placements of the first gradient of a list for those of all, so behind a replicated one it
    would overlook that another gradient is not finite on another rank.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).split(".")[1] == _UNSCALE:
            return _unscale(func, args[0], *args[1:])
        return super().__torch_dispatch__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A plain DTensor: operators give plain ones, so that no optimizer keeps this class in its state."""
        copied = memo[id(self)] = like_dtensor(local_of(self).clone(), self, DTensor)
        return copied


def _unscale(func: Any, gradients: Sequence[torch.Tensor], found: torch.Tensor, scale: torch.Tensor) -> None:
    """A GradScaler's unscaling of gradients; a nan on one rank is found on all (collective)."""
    plain = [local_of(one) if isinstance(one, DTensor) else one for one in gradients]
    seen, factor = (one.full_tensor() if isinstance(one, DTensor) else one for one in (found, scale))
    func([one for one in plain if one.numel()], seen, factor)
    _reduced(seen, dist.ReduceOp.MAX, *(one for one in gradients if isinstance(one, DTensor)))
    if seen is not found:
        found.copy_(seen)


# For torch.load(weights_only=True), as torch's DTensor.
torch.serialization.add_safe_globals([PlacedTensor, ReplicatedGradient])
