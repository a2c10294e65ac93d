"""Views of parameters that a forward keeps on its modules.

Note [Kept views]
A forward may keep a view of a parameter on its module (`self.kernel = self.weight.flatten(1)`) and compute with it. The
view has no memory while its group is sharded, and an elementwise operator that reads it would crash the process. So the
class of such a view changes during that time, and every use raises an error that names the module. The next gather
restores its class, because the view is valid again.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

__all__ = ["FreedView", "KeptViews", "kept_parameter"]

_KEEPER = "_shardkit_kept_by"


class FreedView(torch.Tensor):
    """The class of a kept view while it has no memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        keepers = {str(one.__dict__.get(_KEEPER)) for one in _tensors_among(args) if isinstance(one, FreedView)}
        raise RuntimeError(
            f"a view of a parameter that '{', '.join(sorted(keepers))}' keeps is used while the parameter is sharded, "
            "so its memory is freed. Keep a clone of the view, or compute what needs it in the module's forward"
        )


class KeptViews:
    """The kept views of one group's parameters: weak references, without duplicates."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[weakref.ReferenceType[torch.Tensor], type]] = {}

    def note(self, view: torch.Tensor, keeper: str) -> None:
        """Notes that the module with the FQN `keeper` keeps `view`."""
        view.__dict__[_KEEPER] = keeper
        self._views[id(view)] = weakref.ref(view), type(view)

    def forbid(self) -> None:
        """Call before the memory is freed."""
        for key, (reference, _) in list(self._views.items()):
            if (view := reference()) is None:
                del self._views[key]
            else:
                view.__class__ = FreedView

    def allow(self) -> None:
        """Call when the memory is available."""
        for reference, cls in self._views.values():
            if (view := reference()) is not None:
                view.__class__ = cls


def kept_parameter(fqn: str, keeper: str) -> RuntimeError:
    """The error for a parameter that a forward keeps in a list, dict or object."""
    return RuntimeError(
        f"'{keeper}' keeps parameter '{fqn}' beyond forward, in a list, dict, object or function on the module. The "
        "parameter's memory is freed until it is gathered again. Keep a clone of it, or read it from its module when "
        "it is needed"
    )


def _tensors_among(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_among(value)
    return found
