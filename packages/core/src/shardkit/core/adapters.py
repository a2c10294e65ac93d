"""Parameters that are not plain tensors: tensor subclasses with a wire format of their own, and DTensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.core.policies import MixedPrecisionPolicy

__all__ = ["SubclassGather", "refuse_dtensor"]


def refuse_dtensor(parameter: nn.Parameter, fqn: str) -> None:
    """Raises for a parameter that another parallelism has already made a DTensor.

    Raises:
        TypeError: with the FQN, its placements and the package that handles it.
    """
    if isinstance(parameter, DTensor):
        raise TypeError(
            f"parameter '{fqn}' is already a DTensor with placements {tuple(parameter.placements)} on "
            f"{parameter.device_mesh}; shardkit-core shards plain tensors. Tensor-parallel parameters need the package "
            "shardkit-tp-adapter; a parameter that fully_shard has sharded before cannot be sharded again"
        )


@dataclass
class SubclassGather:
    """A sharded parameter whose local tensor has `fsdp_pre_all_gather` and `fsdp_post_all_gather`, as torchao's have.

    The first hook turns the shard into plain tensors to gather and metadata; the second turns the gathered tensors into
    the unsharded tensor, or with `out=` refills the one that it made before. `inner` are the tensors that the unsharded
    one is made of, whose storage is freed at reshard. `metadata` stays until the next gather from shards: a smaller
    group that keeps the parameter after forward gathers it again without asking the first hook.
    """

    fqn: str
    mesh: DeviceMesh
    shape: torch.Size
    mp_policy: MixedPrecisionPolicy
    metadata: Any = None
    input_shapes: tuple[torch.Size, ...] = ()
    inner: tuple[torch.Tensor, ...] = field(default=())

    @staticmethod
    def wanted_by(local: torch.Tensor, fqn: str) -> bool:
        """Whether this local tensor brings its own all-gather hooks.

        Raises:
            TypeError: if it has only one of the two.
        """
        before, after = "fsdp_pre_all_gather", "fsdp_post_all_gather"
        if hasattr(local, before) != hasattr(local, after):
            has, lacks = (before, after) if hasattr(local, before) else (after, before)
            raise TypeError(
                f"parameter '{fqn}' is a {type(local).__name__}, which defines {has} but not {lacks}; "
                "define both or none"
            )
        return hasattr(local, before)

    def inputs(self, local: torch.Tensor, module: nn.Module) -> list[torch.Tensor]:
        """Runs `fsdp_pre_all_gather` in its 1-argument or 5-argument form; returns the flat tensors to gather.

        Raises:
            TypeError: for any other signature.
        """
        hook = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arity = len(inspect.signature(hook).parameters)
        if arity == 1:
            tensors, self.metadata = hook(self.mesh)
        elif arity == 5:
            stride = torch.empty(self.shape, device="meta").stride()
            tensors, self.metadata = hook(self.mesh, self.shape, stride, module, self.mp_policy)
        else:
            raise TypeError(
                f"fsdp_pre_all_gather of parameter '{self.fqn}' takes {arity} arguments; expected (mesh) or "
                "(mesh, outer_size, outer_stride, module, mp_policy)"
            )
        self.input_shapes = tuple(tensor.shape for tensor in tensors)
        return [tensor.reshape(-1) for tensor in tensors]

    def unsharded(
        self, local: torch.Tensor, flats: list[torch.Tensor], dtype: torch.dtype, out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Runs `fsdp_post_all_gather` on the gathered flat tensors; returns the unsharded tensor, None with `out`."""
        gathered = tuple(flat.view(-1, *shape[1:]) for flat, shape in zip(flats, self.input_shapes, strict=True))
        hook = local.fsdp_post_all_gather  # type: ignore[attr-defined]
        if out is not None:
            hook(gathered, self.metadata, dtype, out=out)
            return None
        tensor, inner = hook(gathered, self.metadata, dtype)
        self.inner = tuple(inner)
        assert isinstance(tensor, torch.Tensor)
        return tensor
