"""Parameters that are not plain tensors: tensor subclasses with a wire format of their own, and DTensors.

Note [Forms]
Data parallelism cuts, gathers and reduces plain tensors. A `ParameterForm` connects such a tensor to its parameter. If
another parallelism has made the parameter a DTensor, the tensor is this rank's local one. The form then knows the
sharded DTensor's mesh, makes the unsharded DTensor that the module computes with, and a plain tensor of its gradient.
Forms of DTensors come from a `DTensorAdapter` that another distribution provides under the entry point group
`shardkit.dtensor_adapters`.

Note [Annotations]
`spmd_types` says of a plain parameter, by mesh axis, how the ranks' tensors are related; torchtitan annotates its
models so by default. On data-parallel axes all ranks have the same values, and gradients are summed (`R`). On any other
axis, values and gradients are the same (`I`), or gradients have to be summed (`R`), or the tensors are parts of one
(`S`). For the last two a DTensor adapter is needed, and the whole mesh, with the names of its data-parallel axes.

Note [Attributes of parameters]
A user may set attributes on a parameter, such as `no_weight_decay`, for an optimizer or a trainer to read. The sharded
parameter gets those of the original, and the unsharded one gets those of the sharded one. A wrapper subclass keeps its
inner tensors among the attributes; these are not copied, because computation would use them instead of the gathered
ones. Gradients and hooks are not copied either: torch does not keep them among the attributes. A class that adds only
Python to a tensor (methods, `__torch_function__`), such as a subclass of nn.Parameter, is also the class of the
unsharded parameter, because forward may depend on it.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.placed import PlacedTensor
from shardkit.core.parameters.placements import Blocks, is_ours, layout_for
from shardkit.core.policies import MixedPrecisionPolicy
from shardkit.core.runtime.sharding import ChunkLayout
from shardkit.core.torch_compat import PARAMETER_FLAG, local_of, new_dtensor, wraps_tensors

ADAPTERS = "shardkit.dtensor_adapters"
"""The group of entry points under which distributions offer a `DTensorAdapter`."""
HOOK = "fsdp_pre_all_gather"
"""The method by which a local tensor brings its own all-gather; users may also put it on one object."""

Holder = tuple[nn.Module, str]
"""A module, and the name of its attribute that is the parameter."""


class ParameterForm(Protocol):
    """Connects a parameter to the plain tensor that data parallelism cuts (see Note [Forms]). Not collective."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter, as state dicts have it."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the sharded parameter."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the sharded parameter."""

    @property
    def sums_elsewhere(self) -> bool:
        """Whether `gradient` may have to sum over axes that are not data-parallel."""

    def plain(self, parameter: torch.Tensor, /) -> torch.Tensor:
        """The plain tensor inside the original parameter; data parallelism cuts it."""

    def sharded(self, shard: torch.Tensor) -> DTensor:
        """The sharded parameter, over the memory of a shard."""

    def local(self, shard: torch.Tensor, /) -> torch.Tensor:
        """The local tensor of the sharded parameter, or of its gradient, over the memory of a shard.

        It is the shard itself, unless the local tensor carries more than its elements.
        """

    def shard(self, local: torch.Tensor, /) -> torch.Tensor:
        """The shard in a local tensor: the inverse of `local`."""

    def unsharded(self, whole: torch.Tensor, /) -> torch.Tensor:
        """The tensor that the module computes with, over the memory of the gathered plain tensor."""

    def gradient(self, gradient: torch.Tensor, /) -> torch.Tensor:
        """The plain gradient of the plain tensor, from that of the unsharded parameter.

        It may communicate over axes that are not data-parallel.
        """


class DTensorAdapter(Protocol):
    """Shards parameters that tensor or expert parallelism has made DTensors, or that are annotated as parts of one."""

    def form(
        self, parameter: torch.Tensor, fqn: str, mesh: DataParallelMesh, dim: int | None, holders: Sequence[Holder]
    ) -> ParameterForm:
        """The form of one parameter, cut on tensor dim `dim` over `mesh`; None (0-dim parameters): replicated.

        A plain parameter is one that `spmd_types` annotates on axes of `mesh.whole`. Notes about a parameter are kept
        on its holders, because the parameter is another tensor after `module.to()` or a load.

        Raises:
            ValueError, TypeError, NotImplementedError: for meshes, placements or annotations that do not match; the
                message has the FQN.
        """


def _itself(tensor: torch.Tensor, /) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class _PlainForm:
    """The form of a parameter that is a plain tensor, or a subclass other than DTensor: nothing to convert."""

    shape: torch.Size
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    kind: type[DTensor]
    sums_elsewhere = False
    plain = local = shard = unsharded = gradient = staticmethod(_itself)

    def sharded(self, shard: torch.Tensor) -> DTensor:
        return new_dtensor(shard, self.mesh, self.placements, self.shape, kind=self.kind)


class _PlacedForm:
    """The form of a DTensor parameter whose tensor-parallel shard has a placement of ours; `inner` is a replica's."""

    def __init__(self, inner: ParameterForm, axis: int, placement: Placement) -> None:
        self.inner = inner
        self.shape, self.sums_elsewhere = inner.shape, inner.sums_elsewhere
        self.mesh = inner.mesh
        self.placements = tuple(placement if number == axis else one for number, one in enumerate(inner.placements))
        self.plain, self.local, self.shard = inner.plain, inner.local, inner.shard
        self.unsharded, self.gradient = inner.unsharded, inner.gradient

    def sharded(self, shard: torch.Tensor) -> DTensor:
        return new_dtensor(shard, self.mesh, self.placements, self.shape, kind=PlacedTensor)


def form_of(
    parameter: torch.Tensor, fqn: str, mesh: DataParallelMesh, placement: Placement | None, holders: Sequence[Holder]
) -> ParameterForm:
    """The form of a parameter that is cut by `placement` over `mesh`; None: replicated."""
    dim: int | None = getattr(placement, "dim", None)
    if not isinstance(parameter, DTensor):
        spmd: Any = sys.modules.get("spmd_types")  # Note [Annotations]
        if spmd is not None and (annotated := spmd.get_local_type(parameter)):
            model_axes = mesh.whole is not None and len(mesh.named) < mesh.whole.ndim
            if model_axes and not is_ours(placement) and (adapter := _dtensor_adapter()):
                return adapter.form(parameter, fqn, mesh, dim, holders)
            _check_annotations(annotated, fqn, mesh)
        kind = PlacedTensor if is_ours(placement) else DTensor
        return _PlainForm(parameter.shape, mesh.mesh, mesh.placements(placement), kind)
    adapter = _dtensor_adapter()
    if adapter is None:
        raise TypeError(
            f"parameter '{fqn}' is already a DTensor with placements {tuple(parameter.placements)} on "
            f"{parameter.device_mesh}; shardkit-core shards plain tensors. For tensor-parallel parameters install "
            "shardkit-tp-adapter; a parameter that fully_shard has sharded before cannot be sharded again"
        )
    if placement is not None and is_ours(placement):
        return _placed_form(adapter, parameter, fqn, mesh, placement, holders)
    return adapter.form(parameter, fqn, mesh, dim, holders)


def _placed_form(
    adapter: DTensorAdapter,
    parameter: DTensor,
    fqn: str,
    mesh: DataParallelMesh,
    placement: Placement,
    holders: Sequence[Holder],
) -> ParameterForm:
    if isinstance(placement, Blocks):
        _refuse_cut_blocks(parameter, fqn, placement)
    inner = adapter.form(parameter, fqn, mesh.fully_replicated, None, holders)
    local = local_of(parameter)
    if inner.local(local) is not local:
        raise NotImplementedError(
            f"parameter '{fqn}' is a fused weight whose shard lies in several places, so {placement} cannot describe "
            "it. Use Shard(dim) for it, or keep its parts as parameters of their own"
        )
    ranks = mesh.mesh.mesh.movedim(mesh.shard_axis or 0, -1).reshape(-1, mesh.shard_size)
    along = {tuple(row) for row in ranks.tolist()}
    for axis in range(inner.mesh.ndim):
        rows = inner.mesh.mesh.movedim(axis, -1).reshape(-1, inner.mesh.size(axis))
        if along <= {tuple(row) for row in rows.tolist()} and inner.placements[axis].is_replicate():
            return _PlacedForm(inner, axis, placement)
    raise NotImplementedError(
        f"parameter '{fqn}' with placements {tuple(parameter.placements)} on {parameter.device_mesh}: no axis of it is "
        f"the one that fully_shard shards over, {mesh.mesh}; {placement} needs one. Use Shard(dim)"
    )


def _refuse_cut_blocks(parameter: DTensor, fqn: str, placement: Blocks) -> None:
    """Refuses blocks that lie otherwise in this rank's part of a tensor than in the whole: each must be one row."""
    layout = layout_for(placement, tuple(parameter.shape), 1)
    merged = parameter.ndim - len(layout.shape) + 1
    cut = {getattr(one, "dim", 0) for one in parameter.placements if not one.is_replicate()}
    if layout.unit > 1 or any(dim >= merged for dim in cut):
        raise NotImplementedError(
            f"parameter '{fqn}' of shape {tuple(parameter.shape)} is a DTensor with placements "
            f"{tuple(parameter.placements)}, so {placement} cannot cut it: a block must be one row, behind the dims "
            "that they cut. Use Shard(dim), Blocks(elements=...) with the elements of the last dims, or Owned() to "
            "keep each rank's tensor-parallel shard whole"
        )


def _check_annotations(annotated: dict[Any, Any], fqn: str, mesh: DataParallelMesh) -> None:
    """Raises unless the local tensor of a parameter with these annotations may be treated as the whole parameter."""
    spmd: Any = sys.modules["spmd_types"]
    axes = [spmd.MeshAxis.of(group) for group in mesh.groups]
    for axis, kind in annotated.items():
        several = len(axes) > 1 and axis.size() == mesh.size and all(one <= axis for one in axes)
        expected = spmd.R if several or any(axis <= one for one in axes) else spmd.I
        if axis.size() > 1 and kind is not expected:
            raise NotImplementedError(
                f"spmd_types annotates parameter '{fqn}' with {kind} on the mesh axis {axis}; expected {expected}, "
                "because the local tensor is taken for the whole parameter. Pass the whole mesh to fully_shard, name "
                "its data-parallel axes with dp_mesh_dims, and install shardkit-tp-adapter"
            )


@functools.cache
def _dtensor_adapter() -> DTensorAdapter | None:
    """The adapter that an installed distribution provides, looked up at the first DTensor parameter."""
    found = list(entry_points(group=ADAPTERS))
    if len(found) > 1:
        names = ", ".join(sorted(f"{entry.name} = {entry.value}" for entry in found))
        raise RuntimeError(f"several adapters for DTensor parameters are installed ({names}); uninstall all but one")
    return cast(DTensorAdapter, found[0].load()) if found else None


def user_attributes(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes of a parameter that its class did not set (see Note [Attributes of parameters])."""
    attributes = parameter.__dict__
    if not wraps_tensors(parameter):
        return dict(attributes)
    # A DTensor keeps its own attributes in slots; `detach` would cost an operator for each parameter.
    by_class = {PARAMETER_FLAG}
    if type(parameter) is not DTensor:
        with torch.inference_mode(False):  # in it detach() fails for tensors that were made outside
            by_class.update(parameter.detach().__dict__)
    return {name: value for name, value in attributes.items() if name not in by_class}


@dataclass
class SubclassGather:
    """A sharded parameter whose local tensor has `fsdp_pre_all_gather` and `fsdp_post_all_gather`, like torchao's.

    The first hook turns the shard into tensors to gather and metadata. The second turns the gathered tensors into the
    unsharded tensor, or with `out=` refills the previous one. `inner` are the inner tensors of the unsharded one; their
    storages, of `inner_bytes`, are freed at reshard. `metadata`, `layouts` and `shapes` are kept until the next gather
    from shards: a smaller group that keeps the parameter after forward gathers it again without the first hook.

    Attributes:
        sharded: how the parameter is cut.
        layouts: of the tensors to gather, which may be others at each gather.
        shapes: in which the second hook gets them.
        own_bytes: of memory that the second hook has allocated besides the gathered tensors.
    """

    fqn: str
    mesh: DeviceMesh
    shape: torch.Size
    sharded: ChunkLayout
    mp_policy: MixedPrecisionPolicy
    metadata: Any = None
    layouts: tuple[ChunkLayout, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    inner: tuple[torch.Tensor, ...] = field(default=())
    inner_bytes: tuple[int, ...] = ()
    own_bytes: int = 0

    @staticmethod
    def wanted_by(local: torch.Tensor, fqn: str) -> bool:
        """Whether this local tensor has its own all-gather hooks."""
        before, after = HOOK, "fsdp_post_all_gather"
        if hasattr(local, before) != hasattr(local, after):
            has, lacks = (before, after) if hasattr(local, before) else (after, before)
            raise TypeError(
                f"parameter '{fqn}' is a {type(local).__name__}, which defines {has} but not {lacks}; "
                "define both or none"
            )
        return hasattr(local, before)

    def inputs(self, local: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
        """Runs `fsdp_pre_all_gather` in its 1-argument or 5-argument form; returns the tensors to gather."""
        hook = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arity = len(inspect.signature(hook).parameters)
        if arity == 1:
            payloads, self.metadata = hook(self.mesh)
        elif arity == 5:
            stride = torch.empty(self.shape, device="meta").stride()
            payloads, self.metadata = hook(self.mesh, self.shape, stride, module, self.mp_policy)
        else:
            raise TypeError(
                f"fsdp_pre_all_gather of parameter '{self.fqn}' takes {arity} arguments; expected (mesh) or "
                "(mesh, outer_size, outer_stride, module, mp_policy)"
            )
        joined = [self._joined(one) for one in payloads]
        dtypes = tuple(tensor.dtype for tensor, _, _ in joined)
        if self.dtypes not in (None, dtypes):  # the unsharded tensor may be over memory of the earlier form
            raise ValueError(
                f"fsdp_pre_all_gather of parameter '{self.fqn}' returned tensors of other dtypes than before: "
                f"{dtypes}; expected {self.dtypes}. Return the same dtypes at every gather"
            )
        self.dtypes = dtypes
        self.layouts = tuple(layout for _, layout, _ in joined)
        self.shapes = tuple(shape for _, _, shape in joined)
        return [tensor for tensor, _, _ in joined]

    def _joined(self, payload: Any) -> tuple[torch.Tensor, ChunkLayout, tuple[int, ...]]:
        """One tensor to gather, the layout that joins the ranks' ones, and the shape that the second hook gets.

        A plain tensor has the dims before the cut of the shard, or as many elements as the shard. It is joined along
        the parameter's dim, and gets the shape that ranks' tensors have when stacked on dim 0, as in stock: tensors
        that broadcast on a rank then do so when gathered. Other objects are torch's `AllGatherInput` or have the same
        attributes: they name the dim, and may name the shape.
        """
        world = self.sharded.world_size
        if not isinstance(payload, torch.Tensor):
            tensor = payload.tensor if payload.tensor.ndim else payload.tensor.view(1)
            if not -tensor.ndim <= payload.dim < tensor.ndim:
                raise ValueError(
                    f"fsdp_pre_all_gather of parameter '{self.fqn}' wants a tensor of shape {tuple(tensor.shape)} "
                    f"joined on dim {payload.dim}; expected one of its dims"
                )
            dim = payload.dim % tensor.ndim
            whole = (*tensor.shape[:dim], world * tensor.shape[dim], *tensor.shape[dim + 1 :])
            return tensor.contiguous(), ChunkLayout(whole, dim, world), getattr(payload, "output_size", None) or whole
        tensor = payload.contiguous() if payload.ndim else payload.view(1)
        shape = (world * tensor.shape[0], *tensor.shape[1:])
        before, shard = self.sharded.dim, self.sharded.padded_local_shape
        if not before or not tensor.numel():
            return tensor, ChunkLayout(shape, 0, world), shape
        if payload.numel() != math.prod(shard) and payload.shape[:before] != shard[:before]:
            raise ValueError(
                f"fsdp_pre_all_gather of parameter '{self.fqn}' returned a tensor of shape {tuple(payload.shape)}, "
                f"which cannot be joined on dim {before}; expected {shard}, or {shard[:before]} and any other dims; "
                "for others return an object with the attributes tensor and dim, such as torch's AllGatherInput"
            )
        rows = tensor.view(math.prod(shard[:before]), -1)
        return rows, ChunkLayout((len(rows), world * rows.shape[1]), 1, world), shape

    def unsharded(
        self, local: torch.Tensor, targets: list[torch.Tensor], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Runs `fsdp_post_all_gather` on the gathered flat tensors; returns the unsharded tensor, None with `out`."""
        gathered = tuple(flat.view(shape) for flat, shape in zip(targets, self.shapes, strict=True))
        hook = local.fsdp_post_all_gather  # type: ignore[attr-defined]
        if out is not None:
            hook(gathered, self.metadata, dtype, out=out)
            return None
        tensor, inner = hook(gathered, self.metadata, dtype)
        self.inner = tuple(inner)
        storages = [one.untyped_storage() for one in self.inner]
        self.inner_bytes = tuple(storage.nbytes() for storage in storages)
        flats = {flat.untyped_storage().data_ptr() for flat in targets}
        own = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.own_bytes = sum(nbytes for address, nbytes in own.items() if address not in flats)
        assert isinstance(tensor, torch.Tensor)
        return tensor
