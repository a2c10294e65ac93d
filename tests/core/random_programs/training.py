"""The training loop of a program, as a stream of events that whoever runs it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.core.random_programs.blocks import DTYPES, OPS, Deliberate, Trap, unpack
from tests.core.random_programs.program import Act, Micro, Program, Step

LEARNING_RATE = 0.03125
LARGEST_NORM = 0.5
ROWS = 4


@dataclass(frozen=True)
class Backward:
    """A backward has ended. ``values`` are losses and gradients of inputs; ``last`` of its micro-batch."""

    label: str
    sync: bool
    values: list[Tensor | None] = field(default_factory=list)
    last: bool = False


Event = tuple[str, Any]
"""A kind and a value:

"backward"      the `Backward` that has ended
"sync"          whether the backwards that follow reduce gradients
"synchronize"   gradients that wait are reduced (no value)
"ask"           the `Act` that only a sharded model can do, such as an explicit unshard
"failed"        the user's code raised, and the loop goes on with the next micro-batch: gradients are dropped (no value)
"toggle"        the names of parameters that are frozen, or trained again
"update"        a step of SGD; whether gradients are clipped first
"zero"          ``zero_grad``; whether it sets to None
"""


@dataclass
class Loop:
    """One rank's training loop: its batches, and a model and its trap from ``build``, sharded or not.

    ``cast_to``: dtype that inputs are cast to, as a mixed precision policy would.
    """

    program: Program
    model: Any
    trap: Trap
    rank: int
    cast_to: torch.dtype | None = None
    batches: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.program.dtype]

    def run(self) -> Iterator[Event]:
        """All steps."""
        for index, step in enumerate(self.program.steps):
            yield from self._step(step, f"step {index}")

    def _step(self, step: Step, label: str) -> Iterator[Event]:
        if step.toggle:
            yield "toggle", step.toggle
        for index, micro in enumerate(step.micros):
            try:
                yield from self._micro(micro, f"{label}, micro-batch {index}")
            except Deliberate:
                yield "failed", None
            finally:
                self.trap.armed = None
        if step.synchronize:
            yield "synchronize", None
            yield "backward", Backward(f"{label}, synchronized", sync=True, last=True)
        if step.update:
            yield "update", step.clip
        if step.zero != "keep":
            yield "zero", step.zero == "none"

    def _micro(self, micro: Micro, label: str) -> Iterator[Event]:
        yield "sync", micro.sync
        yield from self._acts(micro.before)
        self.trap.armed = micro.fail
        done = [self._forward(micro) for _ in range(micro.forwards)]
        yield from self._acts(micro.between)
        losses = _losses(micro, [loss for loss, _, _ in done], [side for _, side, _ in done])
        inputs = [x for _, _, x in done if x.requires_grad]
        losses = [loss for loss in losses if loss.requires_grad]
        for index, loss in enumerate(losses):
            for again in range(1 + micro.twice):
                values: list[Tensor | None] = [loss.detach()]
                # Losses of one forward share parts of their graph.
                retain = index < len(losses) - 1 or again < micro.twice
                values += self._backward(micro, loss, inputs, retain)
                last = not retain
                where = f"{label}, backward {index}{' again' if again else ''}"
                yield "backward", Backward(where, micro.sync, values, last)

    def _backward(self, micro: Micro, loss: Tensor, inputs: list[Tensor], retain: bool) -> list[Tensor | None]:
        if micro.by == "inputs" and inputs:
            return list(torch.autograd.grad(loss, inputs, retain_graph=retain, allow_unused=True))
        if micro.by == "penalty" and inputs:
            found = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
            loss = loss + sum(one.square().sum() for one in found if one is not None)
        loss.backward(retain_graph=retain)
        gradients = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        return list(gradients)

    def _forward(self, micro: Micro) -> tuple[Tensor, list[Tensor], Tensor]:
        self._collect()
        x = self._batch().requires_grad_(micro.inputs)
        given = x.to(self.cast_to or x.dtype, copy=True)  # a leaf may not be changed in place
        output, extra = unpack(self.model, self.model(given))
        for op in micro.change:
            output = OPS[op](output, None)
        loss = output.to(self.dtype).square().mean()
        if isinstance(extra, Tensor):
            loss = loss + extra.to(self.dtype).mean()
        return loss, [side.to(self.dtype) for side in self._collect()], x

    def _batch(self) -> Tensor:
        self.batches += 1
        generator = torch.Generator().manual_seed(1000 * self.rank + self.batches)
        return torch.randn(ROWS, self.program.width, generator=generator, dtype=torch.float64).to(self.dtype)

    def _collect(self) -> list[Tensor]:
        return [loss for module in self.model.modules() for loss in module.collect()]

    def _acts(self, acts: tuple[Act, ...]) -> Iterator[Event]:
        for act in acts:
            if act.kind in ("no_grad", "inference", "eval", "dropped"):
                self._other_forward(act.kind)
            else:
                yield "ask", act

    def _other_forward(self, kind: str) -> None:
        """A forward that no backward follows. The trap is for the others."""
        armed, self.trap.armed = self.trap.armed, None
        x = self._batch()
        x = x if self.cast_to is None else x.to(self.cast_to)
        self.model.train(kind != "eval")
        with torch.inference_mode(kind == "inference"), torch.set_grad_enabled(kind == "dropped"):
            self.model(x)
        self.model.train()
        self._collect()
        self.trap.armed = armed


def _losses(micro: Micro, mains: list[Tensor], sides: list[list[Tensor]]) -> list[Tensor]:
    """The losses to call backward on, in order."""
    pairs: list[list[Any]] = []
    for main, side in zip(mains, sides, strict=True):
        aside = sum(side[1:], side[0]) if side else None
        if aside is None or micro.sides == "drop":
            pairs.append([main])
        else:
            ways = {"only": [aside], "sum": [main + aside], "first": [aside, main], "last": [main, aside]}
            pairs.append(ways[micro.sides])
    if micro.order == "reversed":
        pairs.reverse()
    if micro.order == "together":
        return [sum(losses[1:], losses[0]) for losses in zip(*pairs, strict=True)]
    return [loss for losses in pairs for loss in losses]
