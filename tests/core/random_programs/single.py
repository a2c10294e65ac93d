"""The reference in one process: the plain module on the batches of all ranks, gradients averaged over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.core.random_programs.blocks import DTYPES, add_hooks, build, toggle
from tests.core.random_programs.program import Program
from tests.core.random_programs.training import (
    LARGEST_NORM,
    LEARNING_RATE,
    Backward,
    Event,
    Failed,
    Loop,
    Toggle,
    Update,
    Zero,
)

# A program whose numbers grow beyond this says nothing: roundings would count.
_LARGEST = 1e8


class Unusable(Exception):
    """The program cannot serve as a test: it raises in one process, or its numbers are out of range."""


@dataclass(frozen=True)
class Expected:
    """After one backward: each rank's losses and gradients of inputs, and the gradients by name if they are reduced."""

    label: str
    values: list[list[Tensor | None]]
    gradients: dict[str, Tensor | None] | None


@dataclass(frozen=True)
class Run:
    """All backwards of a program, and the parameters at its end."""

    backwards: list[Expected] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


class SingleProcess:
    """One replica for each rank; gradients of the replicas are averaged, and the master parameters make the steps."""

    def __init__(self, program: Program) -> None:
        policy = program.policy
        self.program = program
        self.compute = DTYPES[policy.param_dtype] if policy.param_dtype else None
        self.reduce = DTYPES[policy.reduce_dtype] if policy.reduce_dtype else None
        built = [build(program) for _ in range(policy.world)]
        self.models = [model for model, _ in built]
        self.masters = {name: value.detach().clone() for name, value in self.models[0].named_parameters()}
        self.gradients: dict[str, Tensor | None] = dict.fromkeys(self.masters)
        for model in self.models:
            add_hooks(model)
            if self.compute is not None:
                model.to(self.compute)
        self.loops = [Loop(program, model, trap, rank, self.compute).run() for rank, (model, trap) in enumerate(built)]

    def run(self) -> Run:
        """Run the program.

        Raises:
            Unusable: if it raises, or its numbers are out of range.
        """
        result = Run(parameters=self.masters)
        try:
            for events in zip(*self.loops, strict=True):
                self._answer(events, result)
        except Unusable:
            raise
        except Exception as error:
            raise Unusable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self._check_unwritten()
        for expected in result.backwards:
            seen = [*(expected.gradients or {}).values(), *(v for values in expected.values for v in values)]
            if not all(_in_range(tensor) for tensor in seen if tensor is not None):
                raise Unusable("numbers out of range")
        if not any(expected.gradients for expected in result.backwards):
            raise Unusable("no gradients")
        return result

    def _answer(self, events: tuple[Event, ...], result: Run) -> None:
        event = events[0]
        if isinstance(event, Backward):
            if event.sync:
                self._reduce()
            gradients = {n: None if g is None else g.clone() for n, g in self.gradients.items()} if event.sync else None
            values = [[_copy(v) for v in one.values] for one in events if isinstance(one, Backward)]
            result.backwards.append(Expected(event.label, values, gradients))
        elif isinstance(event, Failed):
            for model in self.models:
                model.zero_grad()
            self.gradients = dict.fromkeys(self.gradients)
        elif isinstance(event, Update):
            if any(parameter.grad is not None for model in self.models for parameter in model.parameters()):
                raise Unusable("a step while gradients wait for their reduction")
            self._check_unwritten()
            if event.clip:
                self._clip()
            self._update()
        elif isinstance(event, Toggle):
            for model in self.models:
                toggle(model, event.names)
        elif isinstance(event, Zero):
            for model in self.models:
                model.zero_grad()  # also gradients that wait for their reduction
            for name, gradient in self.gradients.items():
                self.gradients[name] = None if gradient is None or event.set_to_none else torch.zeros_like(gradient)

    def _reduce(self) -> None:
        for name, parameters in _by_name(self.models):
            found = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not found:
                continue
            assert len(found) == len(parameters), "replicas do the same"
            total = torch.stack([gradient.to(self.reduce or gradient.dtype) for gradient in found]).sum(0) / len(found)
            total = total.to(self.masters[name].dtype)
            before = self.gradients[name]
            self.gradients[name] = total if before is None else before + total
            for parameter in parameters:
                parameter.grad = None

    def _clip(self) -> None:
        found = [gradient for gradient in self.gradients.values() if gradient is not None]
        norm = sum(float(gradient.double().square().sum()) for gradient in found) ** 0.5
        for gradient in found:
            gradient.mul_(min(1.0, LARGEST_NORM / (norm + 1e-6)))

    def _check_unwritten(self) -> None:
        """Unsharded parameters are copies, which is documented: what the program writes to them is lost."""
        for name, parameters in _by_name(self.models):
            if not all(torch.equal(one, self.masters[name].to(one.dtype)) for one in parameters):
                raise Unusable(f"{name} is written in place")

    @torch.no_grad()
    def _update(self) -> None:
        for name, parameters in _by_name(self.models):
            gradient = self.gradients[name]
            if gradient is None:
                continue
            self.masters[name].sub_(gradient, alpha=LEARNING_RATE)
            for parameter in parameters:
                parameter.copy_(self.masters[name])


def _by_name(models: list[nn.Module]) -> Iterator[tuple[str, list[nn.Parameter]]]:
    tables = [dict(model.named_parameters()) for model in models]
    return ((name, [table[name] for table in tables]) for name in tables[0])


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _in_range(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) and (tensor.numel() == 0 or float(tensor.abs().max()) < _LARGEST)
