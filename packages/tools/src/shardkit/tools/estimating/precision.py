"""In which dtypes a training script keeps parameters and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Precision"]


@dataclass(frozen=True)
class Precision:
    """What of the dtypes the training script decides itself, beside the mixed precision of `fully_shard`.

    Attributes:
        parameters: of the parameters, and so of their gradients; None for what the model makes.
        optimizer: of the optimizer's state; None for what the optimizer makes.
        master_weights: whether the optimizer steps copies of the parameters in float32.
    """

    parameters: torch.dtype | None = None
    optimizer: torch.dtype | None = None
    master_weights: bool = False

    def cast(self, model: nn.Module) -> nn.Module:
        """The model, its parameters and buffers of floating point in the dtype."""
        return model if self.parameters is None else model.to(self.parameters)

    def optimizer_of(
        self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], parameters: Iterable[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """The optimizer that `make` makes, with its state in the dtype, and on copies in float32 if wanted."""
        if self.optimizer is None and not self.master_weights:
            return make(parameters)
        return _PreciseOptimizer(parameters, make, self.optimizer, self.master_weights)


class _PreciseOptimizer(torch.optim.Optimizer):
    """Steps each parameter by itself: its state is cast up for the step and down again, one parameter at a time."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        state_dtype: torch.dtype | None,
        master_weights: bool,
    ) -> None:
        own = [one for one in parameters if one.requires_grad]
        super().__init__(own, {})
        weights = [nn.Parameter(one.detach().float()) for one in own] if master_weights else own
        self._steppers = [(one, weight, make([weight])) for one, weight in zip(own, weights, strict=True)]
        self._state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for own, weight, stepper in self._steppers:
            if own.grad is None:
                continue
            if weight is not own:
                weight.grad = own.grad.to(weight.dtype)
            state = stepper.state[weight]
            _cast(state, weight.dtype)
            stepper.step()
            if self._state_dtype is not None:
                _cast(state, self._state_dtype)
            self.state[own] = dict(state)
            if weight is not own:
                own.copy_(weight)
                weight.grad = None
                self.state[own]["master_weight"] = weight


def _cast(state: dict[str, Any], dtype: torch.dtype) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
            state[name] = value.to(dtype)
