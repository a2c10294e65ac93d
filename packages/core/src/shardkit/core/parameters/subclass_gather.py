"""Tensor subclasses with a wire format of their own: `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core.policies import MixedPrecisionPolicy
from shardkit.core.runtime.sharding import ChunkLayout

HOOK = "fsdp_pre_all_gather"
"""The method by which a local tensor brings its own all-gather; users may also put it on one object."""


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
    def check(local: torch.Tensor, fqn: str) -> None:
        """Raises TypeError for half of the hooks."""
        before, after = HOOK, "fsdp_post_all_gather"
        if hasattr(local, before) != hasattr(local, after):
            has, lacks = (before, after) if hasattr(local, before) else (after, before)
            raise TypeError(
                f"parameter '{fqn}' is a {type(local).__name__}, which defines {has} but not {lacks}; "
                "define both or none"
            )

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
