"""Counts what autograd saves for backward, and the gradients that it makes, by public hooks of torch.

A storage counts once, from the first tensor over it that is saved until its memory is free. Parameters do not count:
their unsharded storages stay the same objects from step to step, so they are looked up once for each module; that is
also when each of them gets a hook that tells when its gradient is there.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from shardkit.tools.profiling.log import (
    ActivationDropped,
    ActivationSaved,
    Entry,
    GradientAccumulated,
    GradientsKept,
)

__all__ = ["SavedTensors"]


class SavedTensors:
    """The hooks. `enter` puts them in place on this thread, `leave` takes them away; both only in pairs.

    Args:
        write: what each storage is told to.
    """

    def __init__(self, write: Callable[[Entry], None]) -> None:
        self.active = True
        self.seconds = 0.0
        self.packed = 0
        self._write = write
        self._known: set[str] = set()
        self._unknown: dict[str, list[nn.Module]] = {}
        # By identity, which holds as long as the storage does: looking up a weak reference would cost ten times more.
        self._parameters: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._unsharded: dict[str, weakref.ref[nn.Parameter]] = {}
        self._gradient_hooks: list[RemovableHandle] = []
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._hooks: Any = None

    def enter(self) -> None:
        """Starts counting what this thread saves."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def stop(self) -> None:
        """Stops counting. The hooks on saved tensors stay until `leave`, and do nothing."""
        self.active = False
        for hook in self._gradient_hooks:
            hook.remove()

    def leave(self) -> None:
        """Takes the hooks on saved tensors away."""
        self._hooks.__exit__(None, None, None)

    def enter_module(self, fqn: str, roots: list[nn.Module]) -> None:
        """The module's forward begins: its parameters, unsharded before anything is saved in it, are not to be counted.

        They are looked up when something is saved; a forward without grad saves nothing.
        """
        if fqn not in self._known:
            self._unknown[fqn] = roots

    def leave_module(self, fqn: str) -> None:
        """The module's forward has ended."""
        self._unknown.pop(fqn, None)

    def _know_parameters(self) -> None:
        for root in {id(root): root for roots in self._unknown.values() for root in roots}.values():
            for name, parameter in root.named_parameters():
                if not isinstance(parameter, DTensor):
                    self._know(name, parameter)
        self._known.update(self._unknown)
        self._unknown.clear()

    def _know(self, name: str, parameter: nn.Parameter) -> None:
        storage = parameter.untyped_storage()
        key = id(storage)
        if key in self._parameters:
            return
        self._parameters[key] = weakref.ref(storage, functools.partial(self._forget, key))
        if parameter.requires_grad:
            hook = functools.partial(self._accumulated, name)
            self._gradient_hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            self._unsharded[name] = weakref.ref(parameter)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        if self.active and parameter.grad is not None:
            self._write(GradientAccumulated(name, parameter.grad.nbytes))

    def end_backward(self) -> None:
        """A backward is over: tells which unsharded gradients are still there."""
        kept = [
            name for name, one in self._unsharded.items() if (there := one()) is not None and there.grad is not None
        ]
        self._write(GradientsKept(tuple(kept)))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return tensor
        began = time.perf_counter()
        self.packed += 1
        plain = tensor if type(tensor) is torch.Tensor else _plain(tensor)
        if plain is not None and plain.layout is torch.strided:
            if self._unknown:
                self._know_parameters()
            storage = plain.untyped_storage()
            key = id(storage)
            if key not in self._saved and key not in self._parameters and (nbytes := storage.nbytes()):
                self._saved[key] = weakref.ref(storage, functools.partial(self._dropped, key))
                self._write(ActivationSaved(key, nbytes))
        self.seconds += time.perf_counter() - began
        return tensor

    def _forget(self, key: int, _: object) -> None:
        self._parameters.pop(key, None)

    def _dropped(self, key: int, _: object) -> None:
        del self._saved[key]
        if self.active:
            self._write(ActivationDropped(key))


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """What holds the memory of a tensor of another class; None for subclasses without memory that can be told."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor if type(tensor) is nn.Parameter else None


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
