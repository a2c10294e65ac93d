"""A place where a module holds a parameter."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

__all__ = ["Slot"]


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
