"""The reference in one process: the plain module on the batches of all ranks, gradients averaged over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.core.random_programs.blocks import DTYPES, add_hooks, build, toggle
from tests.core.random_programs.program import Program
from tests.core.random_programs.training import LARGEST_NORM, LEARNING_RATE, Backward, Loop

# A program whose numbers grow beyond this says nothing: roundings would count.
_LARGEST = 1e8


class Unusable(Exception):
    """The program cannot serve as a test: it raises in one process, or its numbers are out of range."""


@dataclass(frozen=True)
class Expected:
    """After one backward: each rank's losses and gradients of inputs, and the gradients by name if they are reduced."""

    values: list[list[Tensor | None]]
    gradients: dict[str, Tensor | None] | None


class SingleProcess:
    """One replica for each rank; gradients of the replicas are averaged, and the master parameters make the steps.

    When it has run, ``backwards`` has all backwards of the program, and ``masters`` the parameters at its end.
    """

    def __init__(self, program: Program) -> None:
        policy = program.policy
        self.compute = DTYPES[policy.param_dtype] if policy.param_dtype else None
        self.reduce = DTYPES[policy.reduce_dtype] if policy.reduce_dtype else None
        built = [build(program) for _ in range(policy.world)]
        self.models = [model for model, _ in built]
        self.masters = dict(build(program)[0].named_parameters())
        if not self.masters:
            raise Unusable("no parameters")
        self.optimizer = torch.optim.SGD(self.masters.values(), lr=LEARNING_RATE)
        for model in self.models:
            add_hooks(model)
            if self.compute is not None:
                model.to(self.compute)
        tables = [dict(model.named_parameters()) for model in self.models]
        self.replicas = {name: [table[name] for table in tables] for name in self.masters}
        self.loops = [Loop(program, model, trap, rank, self.compute).run() for rank, (model, trap) in enumerate(built)]

    def run(self) -> None:
        """Run the program.

        Raises:
            Unusable: if it raises, or its numbers are out of range.
        """
        self.backwards: list[Expected] = []
        try:
            for events in zip(*self.loops, strict=True):
                if answer := getattr(self, f"_{events[0][0]}", None):
                    answer(*(value for _, value in events))
        except Unusable:
            raise
        except Exception as error:
            raise Unusable(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self._check_unwritten()
        for expected in self.backwards:
            seen = [*(expected.gradients or {}).values(), *(v for values in expected.values for v in values)]
            if not all(_in_range(tensor) for tensor in seen if tensor is not None):
                raise Unusable("numbers out of range")
        if not any(expected.gradients for expected in self.backwards):
            raise Unusable("no gradients")

    # Events, whose values are equal on all ranks but for those of a backward.

    def _backward(self, *ranks: Backward) -> None:
        first = ranks[0]
        if first.sync:
            self._reduce()
        gradients = {name: _copy(master.grad) for name, master in self.masters.items()} if first.sync else None
        self.backwards.append(Expected([[_copy(v) for v in one.values] for one in ranks], gradients))

    def _failed(self, *_: None) -> None:
        self._zero(True)

    def _update(self, clip: bool, *_: bool) -> None:
        if any(parameter.grad is not None for model in self.models for parameter in model.parameters()):
            raise Unusable("a step while gradients wait for their reduction")
        self._check_unwritten()
        if clip:
            nn.utils.clip_grad_norm_(self.masters.values(), LARGEST_NORM)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameters in self.replicas.items():
                for parameter in parameters:
                    parameter.copy_(self.masters[name])

    def _toggle(self, names: tuple[str, ...], *_: tuple[str, ...]) -> None:
        for model in self.models:
            toggle(model, names)

    def _zero(self, set_to_none: bool, *_: bool) -> None:
        for model in self.models:
            model.zero_grad()  # also gradients that wait for their reduction
        self.optimizer.zero_grad(set_to_none)

    def _reduce(self) -> None:
        for name, parameters in self.replicas.items():
            found = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if not found:
                continue
            assert len(found) == len(parameters), "replicas do the same"
            total = torch.stack([gradient.to(self.reduce or gradient.dtype) for gradient in found]).sum(0) / len(found)
            master = self.masters[name]
            total = total.to(master.dtype)
            master.grad = total if master.grad is None else master.grad + total
            for parameter in parameters:
                parameter.grad = None

    def _check_unwritten(self) -> None:
        """Unsharded parameters are copies, which is documented: what the program writes to them is lost."""
        for name, parameters in self.replicas.items():
            if not all(torch.equal(one, self.masters[name].to(one.dtype)) for one in parameters):
                raise Unusable(f"{name} is written in place")


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


def _in_range(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) and (tensor.numel() == 0 or float(tensor.abs().max()) < _LARGEST)
