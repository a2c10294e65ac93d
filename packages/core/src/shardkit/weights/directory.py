"""Receives versions into directories of safetensors, which others load as they load a checkpoint of Hugging Face."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint.safetensors_files import SafetensorsLayout
from shardkit.weights.receiver import WeightReceiver
from shardkit.weights.targets import Target

_PARTIAL, _REMOVED = ".incomplete", ".removed"


class DirectoryReceiver(WeightReceiver):
    """Writes each version into a directory `version-<number>` of its own, which appears when it is complete.

    Bytes are written into the files as they come; extra memory is two buckets.

    Args:
        address: as for `WeightReceiver`.
        directory: where the versions appear; nobody else writes there.
        like: tensors of the names, shapes and dtypes that the files are to have, such as the state dict of a model on
            the meta device.
        names: from a name in `like` to that of the tensor of the senders, and in the files; None leaves it out.
        beside: a directory whose other files, such as `config.json`, are copied into each version.
        keep: how many versions to keep; older ones are removed.
        file_bytes: the most bytes of tensors in one file; a larger tensor gets a file of its own.
        options: the other arguments of `WeightReceiver`.

    Raises:
        OSError: if the files cannot be created.
        ValueError: as `WeightReceiver`; for a dtype that safetensors lacks.
    """

    def __init__(
        self,
        address: str,
        directory: str | os.PathLike[str],
        like: Mapping[str, torch.Tensor],
        *,
        names: Callable[[str], str | None] = str,
        beside: str | os.PathLike[str] | None = None,
        keep: int = 2,
        file_bytes: int = 5 * 10**9,
        **options: Any,
    ) -> None:
        self.directory, self._beside, self._keep = Path(directory), beside, keep
        named = {name: like[here] for here in like if (name := names(here)) is not None}
        wide_first = sorted(named.items(), key=lambda one: -one[1].itemsize)  # so that all are aligned
        self._looks = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wide_first}
        self._files = SafetensorsLayout.of(self._looks, file_bytes)
        super().__init__(address, self._create(), in_place=True, **options)
        self._created = True

    def receive(self, timeout: float | None = None) -> int:
        """Waits for the next version and writes it; returns its number. Raises as `WeightReceiver.receive`."""
        if not self._created and self._round is None:  # else one that is complete is to be finished
            self._set_targets(self._create())
            self._created = True
        return super().receive(timeout)

    def path(self, version: int) -> Path:
        """The directory of a version."""
        return self.directory / f"version-{version}"

    def _create(self) -> list[Target]:
        """New files, and targets that lie in them."""
        partial = self.directory / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if self._beside is not None:
            ignored = shutil.ignore_patterns(
                "*.safetensors", "*.safetensors.index.json", "version-*", _PARTIAL, f"{_REMOVED}*"
            )
            shutil.copytree(self._beside, partial, ignore=ignored, dirs_exist_ok=True)
        self._files.create(partial)
        self._files.write_index(partial)
        mapped: dict[str, torch.Tensor] = {}
        for file, (head, nbytes) in self._files.heads.items():
            with (partial / file).open("r+b") as opened:
                # A full disk is an error here; later it would end the process.
                os.posix_fallocate(opened.fileno(), 0, len(head) + nbytes)
            mapped[file] = torch.from_file(str(partial / file), True, len(head) + nbytes, dtype=torch.uint8)
        targets = []
        for name, (file, offset) in self._files.places.items():
            dtype, shape = self._looks[name]
            nbytes = math.prod(shape) * dtype.itemsize
            targets.append(Target(name, None, mapped[file][offset : offset + nbytes].view(dtype).view(shape)))
        return targets

    def _write(self, taken: Any) -> None:
        """All bytes of a version are in the files: makes them visible."""
        partial, final = self.directory / _PARTIAL, self.path(taken.version)
        if partial.exists():  # else the call before was interrupted after that
            for file in self._files.heads:
                with (partial / file).open("r+b") as opened:
                    os.fsync(opened.fileno())
            if final.exists():  # a trainer that has gone back sends a number again
                self._remove(final)
            partial.rename(final)
        self._created = False
        found = sorted(self.directory.glob("version-*"), key=lambda one: one.stat().st_mtime_ns)
        for old in found[: -self._keep]:
            self._remove(old)

    def _remove(self, version: Path) -> None:
        """Nobody sees a half of it: it is renamed first. Files that stay are deleted later, as those that a loader has
        mapped from a network file system.
        """
        version.rename(Path(tempfile.mkdtemp(prefix=_REMOVED, dir=self.directory), version.name))
        for hidden in self.directory.glob(f"{_REMOVED}*"):
            shutil.rmtree(hidden, ignore_errors=True)
