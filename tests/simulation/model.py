"""Models for the simulated device: blocks of real parameters whose computation has a declared cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.simulation.device import compute, declared


class _Compute(torch.autograd.Function):
    """Reads the input and all parameters, in forward and again in backward, and makes full gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Block, *params: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *params)
        ctx.block = block
        compute(block.spec.forward, f"{block.name} forward")
        with declared():
            result = x.clone()
            for param in params:
                result += param.sum()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, *params = ctx.saved_tensors
        compute(ctx.block.spec.backward, f"{ctx.block.name} backward")
        with declared():
            gradients = [param * gradient.sum() if param.requires_grad else None for param in params]
            return gradient + x, None, *gradients


@dataclass(frozen=True)
class BlockSpec:
    """The costs of a block, and the shapes of its parameters."""

    forward: float = 10.0
    backward: float = 20.0
    shapes: tuple[tuple[int, ...], ...] = ((512, 512), (512, 512), (1024, 512), (512,))

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


class Block(nn.Module):
    """One computation with parameters. `recomputes`: forward runs again in backward, inside the sharded module."""

    def __init__(self, spec: BlockSpec, name: str) -> None:
        super().__init__()
        self.spec = spec
        self.name = name
        self.recomputes = False
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, device="sim")) for shape in spec.shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self._compute, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return _Compute.apply(x, self, *self.weights)  # type: ignore[no-any-return, no-untyped-call]


class Checkpointed(nn.Module):
    """Runs a sharded block again in backward: the recomputation goes through its hooks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class Chain(nn.Module):
    """Blocks one after the other, in the order `order` (all of them, unless told otherwise)."""

    def __init__(self, specs: tuple[BlockSpec, ...], first: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(spec, f"block {first + index}") for index, spec in enumerate(specs))
        self.order = list(range(len(specs)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x
