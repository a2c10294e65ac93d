"""Before sharding a unit: initialises parameters on the meta device, and copies the first rank's values to all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.torch_compat import local_of
from shardkit.legacy_fsdp_compat.ignored import Ignored

__all__ = ["materialize_unit", "own_modules", "sync_from_first_rank"]


def own_modules(
    root: nn.Module, ignored: Ignored, is_wrapped: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of one unit: down to FSDP modules and ignored ones, each once, with their names."""
    seen: set[nn.Module] = set()

    def below(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module in ignored.modules or is_wrapped(module):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from below(f"{name}.{child_name}" if name else child_name, child)

    yield from below("", root)


def materialize_unit(
    root: nn.Module,
    ignored: Ignored,
    is_wrapped: Callable[[nn.Module], bool],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Initialises every module of the unit that owns meta tensors.

    It calls `param_init_fn(module)`, or `module.to_empty()` and `module.reset_parameters()`.

    Raises:
        RuntimeError: if a module has no `reset_parameters()`, still has tensors on the meta device afterwards, or was
            deferred by torchdistX.
    """
    for name, module in list(own_modules(root, ignored, is_wrapped)):
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        tensors = [tensor for tensor in tensors if tensor not in ignored.parameters]
        where = f"'{name or 'the wrapped module'}' ({type(module).__name__})"
        _refuse_deferred(where, tensors)
        if not any(tensor.is_meta for tensor in tensors):
            continue
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                raise RuntimeError(
                    f"{where} has meta tensors and no reset_parameters(); write one, or pass param_init_fn"
                )
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                reset()
        left = [name for name, tensor in module.named_parameters(recurse=False) if tensor.is_meta]
        if left:
            raise RuntimeError(f"param_init_fn left {left} of {where} on the meta device; it must call to_empty()")


def _refuse_deferred(where: str, tensors: list[torch.Tensor]) -> None:
    """Refuses tensors of torchdistX: they look like real ones, and only torchdistX, if imported, can tell."""
    torchdistx = sys.modules.get("torchdistx.fake")
    if torchdistx is not None and any(torchdistx.is_fake(tensor) for tensor in tensors):
        raise RuntimeError(
            f"{where} was deferred by torchdistX, which FSDP does not materialize here: call "
            "torchdistx.deferred_init.materialize_module(module) before, or build the model under "
            "torch.device('meta') and pass param_init_fn"
        )


@torch.no_grad()
def sync_from_first_rank(
    root: nn.Module,
    ignored: Ignored,
    is_wrapped: Callable[[nn.Module], bool],
    groups: list[dist.ProcessGroup],
    device: torch.device,
) -> None:
    """Copies parameters and buffers of one unit from the first rank of each group to the others (collective)."""
    tensors: dict[int, torch.Tensor] = {}
    for _, module in own_modules(root, ignored, is_wrapped):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor not in ignored.parameters:
                tensors[id(tensor)] = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    for tensor in tensors.values():
        there = tensor.detach().to(device).contiguous()
        for group in groups:
            dist.broadcast(there, group=group, group_src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(there)
