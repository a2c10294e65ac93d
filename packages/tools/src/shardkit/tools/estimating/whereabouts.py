"""Where a rank is in its iteration: the module (FQN) that runs, and the phase.

Forward is followed by module hooks, backward by tensor hooks: when the gradient of a module's output arrives, the
rank is in that module's backward; when the gradient of its input is done, it is back in the module around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardkit.core.tensors import tensors_with_grad
from shardkit.core.torch_compat import in_backward

Phase: TypeAlias = Literal["building", "inputs", "forward", "backward", "optimizer", "between"]


class Whereabouts:
    """Follows a model through forward, backward and optimizer steps while it is open.

    Attributes:
        set_phase: what is going on outside of modules, optimizer and backward.
        after_forward: called with each module that has run, while its parameters are still there.
    """

    def __init__(self, after_forward: Callable[[nn.Module], None]) -> None:
        self.set_phase: Phase = "building"
        self.after_forward = after_forward
        self._names: dict[int, str] = {}
        self._running: list[str] = []
        self._backward = ""
        self._stepping = False
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Whereabouts:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self._step(True)),
            register_optimizer_step_post_hook(lambda *_: self._step(False)),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def name(self, model: nn.Module) -> None:
        """Takes the FQNs of the modules of `model`."""
        self._names = {id(module): fqn for fqn, module in model.named_modules()}

    @property
    def fqn(self) -> str:
        """The module that runs; "" for the model itself and outside of it."""
        if self._running:
            return self._running[-1]
        return self._backward if in_backward() else ""

    @property
    def phase(self) -> Phase:
        """What the rank is doing."""
        if self._running:  # with closures the optimizer's step runs forward and backward
            return "backward" if in_backward() else "forward"
        if in_backward():
            return "backward"
        return "optimizer" if self._stepping else self.set_phase

    def here(self) -> tuple[str, str]:
        """(FQN, phase)."""
        return self.fqn, self.phase

    def _step(self, begins: bool) -> None:
        self._stepping = begins

    def _enter(self, module: nn.Module, args: Any) -> None:
        fqn = self._names.get(id(module))
        if fqn is None:
            return
        if not in_backward():
            self._backward = ""  # the next backward begins outside of all modules, with the loss
        if not in_backward() and torch.is_grad_enabled():
            around = self._running[-1] if self._running else ""
            for tensor in tensors_with_grad(args):
                tensor.register_hook(lambda _: self._left_backward(fqn, around))
        self._running.append(fqn)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        fqn = self._names.get(id(module))
        if fqn is None or not self._running:
            return
        self._running.pop()
        self.after_forward(module)
        if torch.is_grad_enabled():
            for tensor in tensors_with_grad(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._entered_backward(fqn))

    def _entered_backward(self, fqn: str) -> None:
        # A module's output may be that of one inside it, whose hook has run just before.
        if not self._backward.startswith(f"{fqn}." if fqn else "") or not self._backward:
            self._backward = fqn

    def _left_backward(self, fqn: str, around: str) -> None:
        if self._backward == fqn or self._backward.startswith(f"{fqn}."):
            self._backward = around
