"""Places where modules hold parameters."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter, call, is_, setitem
from typing import Any

from torch import nn

__all__ = ["Slot", "Slots"]

_parameters_of = attrgetter("_parameters")
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class Slot:
    """A place where a module holds a parameter. The module is held weakly, because it owns this object."""

    module: weakref.ReferenceType[nn.Module]
    name: str
    plain: bool

    @staticmethod
    def of(module: nn.Module, name: str) -> Slot:
        """The slot `module.name`; modules that override __setattr__ (nn.LSTM and similar) are still notified."""
        plain = type(module).__setattr__ is nn.Module.__setattr__
        return Slot(weakref.ref(module), name, plain)

    def get(self) -> nn.Parameter | None:
        """The parameter that is registered now, None if the module is gone or holds none."""
        module = self.module()
        return None if module is None else module._parameters.get(self.name)

    def set(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` in this slot."""
        module = self.module()
        if module is None:
            return
        if self.plain:
            module._parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


class Slots:
    """All slots of a group, with their parameters, in columns: C loops register and compare them several times a step.

    It holds the dicts in which modules keep their parameters, and no module.

    Args:
        rows: each slot with its sharded and its unsharded parameter, which is None before the first gather.
    """

    def __init__(self, rows: Iterable[tuple[Slot, nn.Parameter, nn.Parameter | None]]) -> None:
        alive = [(module, *row) for row in rows if (module := row[0].module()) is not None]
        modules = {id(module): (slot.module, module._parameters) for module, slot, *_ in alive}
        self._modules = [reference for reference, _ in modules.values()]
        self._parameters = [parameters for _, parameters in modules.values()]
        self._slots = [slot for _, slot, *_ in alive]
        self._plain = all(slot.plain for slot in self._slots)
        self._dicts = [module._parameters for module, *_ in alive]
        self._names = [slot.name for slot in self._slots]
        self._sharded = [sharded for *_, sharded, _ in alive]
        self._unsharded: list[Any] = [unsharded for *_, unsharded in alive]
        self._gathered_requires_grad: list[bool] = []

    def _held(self) -> list[Any] | None:
        """The parameters that the modules hold; None if a module is gone, or has another dict of parameters."""
        try:
            parameters = map(_parameters_of, map(call, self._modules))
            if not all(map(is_, parameters, self._parameters)):
                return None
        except AttributeError:  # a module is gone
            return None
        return [*map(dict.get, self._dicts, self._names)]

    @property
    def hold_sharded(self) -> bool:
        """Whether each of them holds its sharded parameter, in a module that still exists."""
        held = self._held()
        return held is not None and all(map(is_, held, self._sharded))

    @property
    def hold(self) -> bool:
        """Whether each of them holds one of its two parameters, or none, in a module that still exists."""
        held = self._held()
        if held is None or all(map(is_, held, self._sharded)):
            return held is not None
        known = zip(held, self._sharded, self._unsharded, strict=True)
        return all(one is sharded or one is unsharded or one is None for one, sharded, unsharded in known)

    def register_unsharded(self) -> None:
        """Registers the unsharded parameters, which require grad where the sharded ones do."""
        wanted = [*map(_requires_grad, self._sharded)]
        if [*map(_requires_grad, self._unsharded)] != wanted:
            for unsharded, requires_grad in zip(self._unsharded, wanted, strict=True):
                unsharded.requires_grad_(requires_grad)
        self._gathered_requires_grad = wanted
        self._register(self._unsharded)

    def pass_on_freezing(self) -> None:
        """Changes `requires_grad` of the unsharded parameters where that of the sharded ones has changed."""
        self._pass_on(self._sharded, self._unsharded)

    def _pass_on(self, changed: list[nn.Parameter], others: list[nn.Parameter]) -> None:
        current = [*map(_requires_grad, changed)]
        if current != self._gathered_requires_grad:
            both = zip(current, self._gathered_requires_grad, strict=True)
            for other, (requires_grad, gathered) in zip(others, both, strict=True):
                if requires_grad != gathered:
                    other.requires_grad_(requires_grad)
            self._gathered_requires_grad = current

    def register_sharded(self) -> None:
        """Registers the sharded parameters; keeps what the user did to the unsharded ones in between.

        This means `requires_grad` of the registered parameter, and another parameter assigned in its place (which the
        next gather adopts or refuses).
        """
        if all(map(is_, map(dict.get, self._dicts, self._names), self._unsharded)):
            self._register(self._sharded)
        else:
            for slot, sharded, unsharded in zip(self._slots, self._sharded, self._unsharded, strict=True):
                if slot.get() is unsharded:
                    slot.set(sharded)
        self._pass_on(self._unsharded, self._sharded)

    def _register(self, parameters: list[nn.Parameter]) -> None:
        if self._plain:
            deque(map(setitem, self._dicts, self._names, parameters), maxlen=0)
        else:
            for slot, parameter in zip(self._slots, parameters, strict=True):
                slot.set(parameter)
