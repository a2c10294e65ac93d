"""Lists, dicts and dataclasses among the inputs of a forward, and how forward changes them.

Note [Containers that forward changes]
A caller may pass a list from block to block for each to add its auxiliary loss, or a dict as a cache. If inputs are
cast or watched, forward receives copies of the containers around them (tensors.py, `map_tensors`), and its changes must
reach the caller's own containers: after forward, a changed container is written back. An input is written back as the
caller's tensor, not as the cast or watched one. Backward may enter through added tensors, as through an output.
Additions by a recomputation repeat those of forward, so they are removed again; the next recomputation would otherwise
receive tensors whose graph is gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from shardkit.core.tensors import tensors_in


class HandedContainers:
    """The containers among the inputs of one forward, `given` to it, and the caller's `own` in their places.

    With `copies_only`, containers that forward receives unchanged do not count.
    """

    def __init__(self, own: tuple[Any, ...], given: tuple[Any, ...], *, copies_only: bool) -> None:
        self._found: dict[int, _Handed] = {}  # by the id of forward's container
        # Forward's value and the caller's in its place, by the id of the first, which is kept alive: ids are reused.
        self._owned: dict[int, tuple[Any, Any]] = {}
        self._note(own, given, copies_only)

    def _note(self, own: Any, given: Any, copies_only: bool) -> None:
        if given is not own:
            self._owned[id(given)] = given, own
        elif copies_only:
            return
        if isinstance(given, torch.Tensor | str | bytes | int | float) or given is None:
            return
        if isinstance(given, tuple):
            inner: Any = zip(own, given, strict=True)
        elif isinstance(given, list | dict) or (dataclasses.is_dataclass(given) and not isinstance(given, type)):
            if id(given) in self._found:
                return
            handed = self._found[id(given)] = _Handed(own, given, _entries(given))
            inner = zip(_entries(own).values(), handed.before.values(), strict=True)
        else:
            return
        for mine, one in inner:
            self._note(mine, one, copies_only)

    def added(self) -> list[torch.Tensor]:
        """The tensors that forward has added. Call it before `give_back`."""
        found: list[torch.Tensor] = []
        for handed in self._found.values():
            before = {id(one) for one in handed.before.values()}
            found += tensors_in([one for one in _entries(handed.given).values() if id(one) not in before])
        return [tensor for tensor in found if id(tensor) not in self._owned]

    def give_back(self, *, undo: bool) -> None:
        """Applies forward's changes to the caller's containers, or reverts them (`undo`)."""
        for handed in reversed(self._found.values()):  # innermost first
            now = _entries(handed.given)
            if list(now) == list(handed.before) and all(now[key] is one for key, one in handed.before.items()):
                continue
            if not undo:
                _become(handed.own, {key: self._owned.get(id(one), (one, one))[1] for key, one in now.items()})
            elif handed.given is handed.own:
                _become(handed.own, handed.before)


@dataclasses.dataclass
class _Handed:
    own: Any
    given: Any
    before: dict[Any, Any]


def _entries(container: Any) -> dict[Any, Any]:
    if isinstance(container, list):
        return dict(enumerate(container))
    if dataclasses.is_dataclass(container):
        return {field.name: getattr(container, field.name) for field in dataclasses.fields(container)}
    return dict(container)


def _become(container: Any, entries: dict[Any, Any]) -> None:
    if isinstance(container, list):
        container[:] = entries.values()
    elif dataclasses.is_dataclass(container):
        for name, one in entries.items():
            if getattr(container, name) is not one:
                setattr(container, name, one)
    else:
        for key in container.keys() - entries.keys():
            del container[key]
        for key, one in entries.items():
            if key not in container or container[key] is not one:
                container[key] = one
