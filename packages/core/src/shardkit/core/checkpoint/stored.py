"""Tensors that lie in files, read by rows: what every offline conversion streams from, and nothing ever holds whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.leaves import Path as LeafPath
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.opening import open_index
from shardkit.core.checkpoint.reading import read_box
from shardkit.core.checkpoint.sources import Source, open_file
from shardkit.core.region import Region

__all__ = ["HF_INDEX", "StoredTensor", "stored_tensors", "tensors_of_files"]

HF_INDEX = "model.safetensors.index.json"
_SLAB_BYTES = 2**25


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of some file. `read(first, stop)` gives rows of dim 0; a 0-dim tensor is its one row 0."""

    path: LeafPath
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], torch.Tensor]

    @property
    def name(self) -> str:
        """Its flat name."""
        return name_of(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows of dim 0."""
        return self.shape[0] if self.shape else 1

    def slabs(self, first: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """Rows [first, stop) in contiguous tensors of about 32 MiB; a row that is longer by itself."""
        stop = self.rows if stop is None else stop
        row = self.nbytes // self.rows if self.rows else 0
        step = max(1, _SLAB_BYTES // max(1, row))
        for low in range(first, stop if self.nbytes else first, step):
            yield self.read(low, min(low + step, stop)).resolve_conj().resolve_neg().contiguous()


def stored_tensors(directory: Path, index: Index | None = None) -> list[StoredTensor]:
    """The tensors of a checkpoint, by name; reading verifies."""
    found = open_index(directory) if index is None else index

    def reader(name: str) -> Callable[[int, int], torch.Tensor]:
        entry = found.tensors[name]

        def read(first: int, stop: int) -> torch.Tensor:
            rest = entry.shape[1:]
            offsets, sizes = ((first, *[0] * len(rest)), (stop - first, *rest)) if entry.shape else ((), ())
            tensor: torch.Tensor = read_box(directory, found, entry, offsets, sizes)
            return tensor

        return read

    return [StoredTensor(entry.path, entry.dtype, entry.shape, reader(name)) for name, entry in found.tensors.items()]


def tensors_of_files(
    path: Path, prefix: LeafPath, key: str | None = None, left_out: Callable[[str], object] = lambda _: None
) -> list[StoredTensor]:
    """The tensors of a safetensors file, a directory of those with a Hugging Face index, or a torch.save file.

    Args:
        path: the file or directory.
        prefix: goes before the names.
        key: of a torch.save file, where in its dict the tensors are; None if they are all that it holds.
        left_out: is told the names of what is there and no tensor.

    Links are followed: the Hugging Face Hub keeps what it has downloaded as links. Names that the index gives lead to
    files of its directory only.

    Raises:
        CheckpointError: for anything else, and for tensors that the index names and no file has.
    """
    if key is not None or not path.is_dir():
        source = _opened(path, key)
        for name in source.objects:
            left_out(name)
        return _of_source(source, prefix)
    if not (path / HF_INDEX).is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{path} has no {HF_INDEX} and {len(files)} safetensors files, expected one of both")
        return _of_source(_opened(files[0]), prefix)
    try:
        weight_map = json.loads((path / HF_INDEX).read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path / HF_INDEX} is no index: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(named.values())):
        if Path(file).name != file:
            raise DamagedCheckpointError(f"{path / HF_INDEX} names the file {file!r}, expected one beside it")
        found.update({name_of(one.path[len(prefix) :]): one for one in _of_source(_opened(path / file), prefix)})
    missing = sorted(named.keys() - found.keys())
    if missing:
        raise DamagedCheckpointError(f"{path}: no file has {missing[0]}, which is in {HF_INDEX}")
    return [found[name] for name in named]


def _opened(path: Path, key: str | None = None) -> Source:
    if not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing, or no file")
    try:
        return open_file(path, key)
    except (ImportError, CheckpointError):
        raise
    except Exception as error:  # torch and safetensors raise what they like
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error


def _of_source(source: Source, prefix: LeafPath) -> list[StoredTensor]:
    def reader(name: str, shape: tuple[int, ...]) -> Callable[[int, int], torch.Tensor]:
        def read(first: int, stop: int) -> torch.Tensor:
            runs = tuple((((first, stop),) if not dim else ((0, size),)) for dim, size in enumerate(shape))
            return source.read(name, Region(runs))

        return read

    return [
        StoredTensor((*prefix, name), entry.dtype, entry.shape, reader(name, entry.shape))
        for name, entry in source.entries.items()
    ]
