"""Optimizer state and shards in files of this rank, of which a bounded part is in memory.

Note [State in files]
The state of each parameter group lies in one file, and so do its shards if they are asked for. Files are mapped into
memory: tensors are views of the mapping, so everybody may read them at any time, and a step writes to them as to any
other memory. Before a group is stepped or gathered, those that were used last leave memory until there is room, and the
file of the next one is read ahead. As the groups are used in the same order each time, the first ones stay, and each of
the others is read once in a step. The kernel writes behind.

A file never has a name, so nothing is left behind, whatever becomes of the process. Its blocks are allocated when it is
made: a disk that is full is an error then, and not the end of the process in the middle of a step.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch

from shardkit.core.engine.group import FSDPParamGroup, Residence
from shardkit.core.runtime.mapped import MappedFile
from shardkit.core.runtime.shared.segment import aligned
from shardkit.core.torch_compat import local_of

__all__ = ["FileTier"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class FileTier:
    """A directory for optimizer state, and how many bytes of it each rank keeps in memory.

    Args:
        path: the directory, on a disk of this host; it is made if it does not exist. Each rank has files of its own.
        resident: bytes, as a number or such as "2GiB". The files of the largest parameter group must fit, and with
            `parameters` the shards of two others, which are gathered meanwhile. If more are gathered at once, or stay
            unsharded on a mesh of one rank, their shards come on top.
        parameters: whether the shards lie in files, too, of all groups that have parameters of the optimizer.

    Raises:
        ValueError: if `resident` is not a number of bytes.
        OSError: if the directory cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike[str], resident: int | str, *, parameters: bool = False) -> None:
        self.path = Path(path)
        self.resident = _bytes_of(resident)
        self.parameters = parameters
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
        except OSError as error:
            raise OSError(
                error.errno,
                f"{path} cannot hold files of optimizer state ({error.strerror}); choose a directory that this process "
                "may write to",
            ) from error
        self._files: WeakKeyDictionary[FSDPParamGroup, WeakSet[MappedFile]] = WeakKeyDictionary()
        self._shards: WeakKeyDictionary[FSDPParamGroup, ReferenceType[MappedFile]] = WeakKeyDictionary()
        self._largest_shards = 0
        # The thread that steps, and the one that gathers, note which files are in memory.
        self._lock = threading.Lock()
        self._in_memory: list[ReferenceType[MappedFile]] = []  # in the order in which they were last used
        self._in_step: WeakSet[MappedFile] = WeakSet()
        self._gathered: list[MappedFile] = []  # the shards of the last gather
        self._steps, self._gathers = _Order(), _Order()

    def begin_step(self, group: FSDPParamGroup, tensors: Sequence[torch.Tensor]) -> None:
        """Before a group is stepped: reads the files of `tensors`, and has those of the next one read meanwhile.

        Raises:
            OSError: if the disk fails; nothing of the group is stepped then.
        """
        used = (file for file in self._files.get(group, ()) if any(one in file for one in tensors))
        self._in_step = files = WeakSet(used)  # not files of earlier state, which a state dict may hold
        self._hold(files)
        for file in files:
            file.read_in(to_write=True)
        following = self._steps.follow(group)
        self._read_ahead(() if following is None else self._files.get(following, ()))

    def put(self, group: FSDPParamGroup, tensors: Sequence[torch.Tensor], label: str) -> list[torch.Tensor]:
        """After the step of a group: its state in files; tensors that are there already are returned as they are.

        Those that an earlier file had, before a state dict was loaded, free it.

        Raises:
            ValueError: if they would not fit into `resident` bytes.
            OSError: if the disk is full, or fails.
        """
        moved, _ = self._move(group, tensors, f"optimizer state of the parameter group of '{label}'")
        self._in_step = WeakSet()
        return moved

    def place(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Moves shards to files; those that are there already, or gathered, stay. Raises as `put` does.

        Raises:
            ValueError: for shards in pinned memory, which would be copied back there.
        """
        for group in groups:
            if group.is_unsharded:
                continue
            for one in group.params:
                local_of(one.sharded_param)  # waits for a step of another optimizer on what is copied below
            params = [one for one in group.params if type(one.shard.local_tensor) is torch.Tensor]
            params = [one for one in params if one.shard.local_tensor.device.type == "cpu"]
            if pinned := next((one for one in params if one.pinned), None):
                raise ValueError(
                    f"the shard of parameter '{pinned.fqn}' lies in pinned memory, and FileTier(parameters=True) moves "
                    "it to a file; shard it with CPUOffloadPolicy(pin_memory=False)"
                )
            moved, file = self._move(group, [one.shard.local_tensor for one in params], _shards_in(group))
            for param, local in zip(params, moved, strict=True):
                if local is not param.shard.local_tensor:
                    param.adopt_shard(local)
            if file is not None:
                if group not in self._shards:
                    group.before_gather.append(partial(self._begin_gather, ref(group)))
                with self._lock:
                    self._shards[group] = ref(file)
                self._largest_shards = max(self._largest_shards, file.nbytes)

    def _begin_gather(self, reference: ReferenceType[FSDPParamGroup]) -> None:
        if (group := reference()) is not None:
            shards = self._shards_of(group)
            self._gathered = shards
            self._hold(shards)
            for file in shards:
                file.what = _shards_in(group)  # by now modules know their names
                file.read_in(to_write=False)
            self._read_ahead(self._shards_of(self._gathers.follow(group)))

    def _shards_of(self, group: FSDPParamGroup | None) -> list[MappedFile]:
        file = None if group is None else self._shards.get(group, lambda: None)()
        return [] if file is None else [file]

    def _move(
        self, group: FSDPParamGroup, tensors: Sequence[torch.Tensor], what: str
    ) -> tuple[list[torch.Tensor], MappedFile | None]:
        """The tensors in files, and the file that was made for those that were not, if any."""
        files = self._files.setdefault(group, WeakSet())
        fresh = [one for one in tensors if one.numel() and not any(one in file for file in files)]
        if not fresh:
            return [*tensors], None
        nbytes = sum(aligned(one.nbytes) for one in fresh)
        beside = sum(one.nbytes for one in self._shards_of(group)) + 2 * self._largest_shards
        if nbytes + beside > self.resident:
            rest = f" beside {beside} of shards" if beside else ""
            raise ValueError(
                f"the {what} takes {nbytes} bytes{rest}, and resident={self.resident}; raise resident, or shard "
                "smaller modules"
            )
        file = MappedFile(self.path, nbytes, what)
        with self._lock:
            if self._in_step:  # no gather may take the memory that it is copied to
                self._in_step.add(file)
        self._hold([file])
        files.add(file)
        placed = dict(zip(map(id, fresh), file.copies(fresh), strict=True))
        return [placed.get(id(one), one) for one in tensors], file

    def _hold(self, files: Iterable[MappedFile]) -> None:
        """Notes that files are in memory from now on; those that were used last make room, but not those in use."""
        for file in files:
            with self._lock:
                alive = (one for reference in self._in_memory if (one := reference()) is not None)
                held = [one for one in alive if one is not file]
                lacking = file.nbytes + sum(one.nbytes for one in held) - self.resident
                read = (one for group in self._shards if _reads_shards(group) for one in self._shards_of(group))
                in_use = {*self._in_step, *self._gathered, *read}
                for one in [one for one in reversed(held) if one not in in_use]:
                    if lacking > 0:
                        one.leave_memory()
                        held.remove(one)
                        lacking -= one.nbytes
                self._in_memory = [ref(one) for one in (*held, file)]

    def _read_ahead(self, files: Iterable[MappedFile]) -> None:
        for file in files:
            if ref(file) not in self._in_memory:
                file.read_ahead()


def _shards_in(group: FSDPParamGroup) -> str:
    return f"shards of the parameter group of '{group.label}'"


def _reads_shards(group: FSDPParamGroup) -> bool:
    """Whether a gather is under way, which may copy the shards at its end, or forward reads them themselves."""
    if group.residence is Residence.GATHERING:
        return True
    return group.is_unsharded and any(param.shard.aliased for param in group.params)


class _Order:
    """Learns which group is used after which two others, so that it can be read ahead."""

    def __init__(self) -> None:
        self._after: WeakKeyDictionary[FSDPParamGroup, dict[Any, ReferenceType[FSDPParamGroup]]] = WeakKeyDictionary()
        self._last: tuple[Any, Callable[[], FSDPParamGroup | None]] = None, lambda: None

    def follow(self, group: FSDPParamGroup) -> FSDPParamGroup | None:
        """Notes that a group is used; returns the one that came next before, None if it is not known."""
        before, last = self._last
        if (known := last()) is not None:
            self._after.setdefault(known, {})[before] = ref(group)
        self._last = last, ref(group)
        return self._after.get(group, {}).get(last, lambda: None)()


def _bytes_of(value: int | str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value).lower())
    number = math.floor(float(found[1]) * _UNITS[found[2]]) if found else 0
    if number <= 0:
        raise ValueError(f'resident={value!r} is not a number of bytes; give one above 0, such as 2**31 or "2GiB"')
    return number
