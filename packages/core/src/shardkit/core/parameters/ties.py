"""Tied parameters: one parameter in several slots, which keeps one value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shardkit.core.parameters.slot import Slot
from shardkit.core.torch_compat import local_of

__all__ = ["TieLoads", "replacement"]

_Known = tuple[nn.Parameter, nn.Parameter | None]  # the sharded and the unsharded parameter of an FSDPParam


def replacement(fqn: str, slots: Sequence[Slot], known: _Known) -> nn.Parameter | None:
    """The parameter that the user has put into the slots of parameter `fqn` in place of those `known`, if any.

    Raises:
        ValueError: for a tied parameter whose slots no longer hold one parameter. It keeps one value, so the others
            would be lost. All ranks compare the same, so all of them raise.
    """
    current = [(slot, parameter) for slot in slots if (parameter := slot.get()) is not None]
    new = [(slot, parameter) for slot, parameter in current if parameter is not known[0] and parameter is not known[1]]
    if not new:
        return None
    if len(new) < len(current) or any(parameter is not new[0][1] for _, parameter in new):
        slot, others = new[-1][0], len(current) - 1
        raise ValueError(
            f"parameter '{fqn}' is tied, and '{slot.name}' of a {type(slot.module()).__name__} was assigned a "
            f"parameter (or a state dict gave it values) that its other {others} use{'s' * (others != 1)} "
            f"do{'es' * (others == 1)} not have. Tied parameters stay tied after fully_shard: assign the same one to "
            "all uses (call torch.func.functional_call on a module that has all of them), or untie them before it"
        )
    return new[0][1]


class TieLoads:
    """Ties slots again that loads with `assign=True` have filled one by one, with equal values, or in part.

    Slots that one `load_state_dict` call has filled with different values are left as they are, so that a model's
    `tie_weights` can decide; so are slots that the user has filled before. The next gather refuses them.
    """

    def __init__(self) -> None:
        self._before: dict[Slot, nn.Parameter | None] = {}
        self._keys: list[str] = []
        self._loaded: set[Slot] = set()

    def begin(self, mine: Iterable[Slot], keys: list[str], *, within: bool) -> None:
        """Before a module is loaded.

        Args:
            mine: the module's slots of tied parameters.
            keys: the list in which `load_state_dict` collects missing keys. It tells one call from another.
            within: whether this call is known to be a part of another one, as a module may load a part of itself by a
                `load_state_dict` of its own.
        """
        if self._keys is not keys and not within and not self._before:
            self._keys, self._loaded = keys, set()
        for slot in mine:  # a module may run torch's loading, and so this hook, twice
            self._before.setdefault(slot, slot.get())

    def end(self, mine: Iterable[Slot], slots: Sequence[Slot], known: _Known) -> bool:
        """After a module was loaded; returns whether all uses of a tied parameter have the same one now.

        Args:
            mine: the module's slots of this tie. If `begin` was not called, the module has loaded them by itself.
            slots: all slots of the tie.
            known: the parameters that they have had.
        """
        self._loaded.update(slot for slot in mine if slot.get() is not self._before.pop(slot, known[0]))
        current = [(slot, value) for slot in slots if (value := slot.get()) is not None]
        loaded = [value for slot, value in current if slot in self._loaded]
        others = [value for slot, value in current if slot not in self._loaded]
        if any(value is not known[0] and value is not known[1] for value in others):
            return False
        if loaded:
            if (value := _value(loaded, known[0] if others else None)) is None:
                return False
            for slot in slots:
                slot.set(value)
        return True


def _value(loaded: Sequence[nn.Parameter], other: nn.Parameter | None) -> nn.Parameter | None:
    """The parameter for all uses, None if the loaded ones differ. One without values, on meta, gives way to others."""
    real = [value for value in loaded if value.device.type != "meta"]
    if not real:
        return loaded[-1] if other is None or other.device.type == "meta" else other
    return None if any(_differ(value, real[0]) for value in real[1:]) else real[-1]


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the shards differ in any byte. Those of tensor subclasses are not compared."""
    if one is other:
        return False
    one, other = local_of(one).detach(), local_of(other).detach()
    if any(type(tensor) is not torch.Tensor for tensor in (one, other)):
        return False
    if one.dtype != other.dtype or one.shape != other.shape or one.device != other.device:
        return True
    return not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))
