"""Where full tensors are read from: a dict in memory, a torch.save file or a safetensors file, piece by piece."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, name_of
from shardkit.core.checkpoint.safetensors_files import HF_INDEX, mapped_safetensors
from shardkit.core.checkpoint.stored import StoredTensor, whole
from shardkit.core.checkpoint.torch_files import load_torch_file
from shardkit.core.region import Region

__all__ = [
    "Entry",
    "Source",
    "open_file",
    "open_source",
    "tensors_of_files",
]


@dataclass(frozen=True)
class Entry:
    """One tensor of a source."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Source:
    """Full tensors by name. Those of a file are mapped: a region is read from disk when it is copied from.

    Attributes:
        tensors: in order.
        objects: what is there beside tensors: a module's extra state.
        fingerprint: equal on two ranks whose sources are the same file, None where only this process can read it.
    """

    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]
    fingerprint: str | None = None

    @classmethod
    def of(cls, state: Mapping[Any, Any], file: Path | None = None) -> Source:
        """What a dict holds. Raises TypeError for one that is no flat dict of dense tensors."""
        origin = "the source dict" if file is None else str(file)
        tensors, objects = {}, {}
        for name, value in state.items():
            if not isinstance(name, str):
                raise TypeError(f"{origin} has the key {name!r}, expected parameter names (str)")
            if isinstance(value, DTensor):
                raise TypeError(
                    f"{name}: {origin} holds a DTensor, expected full plain tensors; "
                    "load a sharded state with load_state_dict, or make it full with full_state_dict"
                )
            if isinstance(value, torch.Tensor):
                if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                    what = "no values (meta device)" if value.is_meta else f"layout {value.layout}, {value.dtype}"
                    raise TypeError(f"{name}: {origin} has a tensor of {what}, expected a dense one")
                tensors[name] = value
            elif isinstance(value, Mapping) and name.rpartition(".")[2] != "_extra_state":
                raise TypeError(
                    f"{name}: {origin} is nested, expected a flat dict of name -> tensor; "
                    f"if the model is under this key, pass source[{name!r}] (import: --key {name})"
                )
            else:
                objects[name] = value
        return cls(tensors, objects, None if file is None else _fingerprint(file, tensors))

    @property
    def entries(self) -> dict[str, Entry]:
        """What the tensors look like."""
        return {name: Entry(tuple(one.shape), one.dtype) for name, one in self.tensors.items()}

    def read(self, name: str, region: Region) -> torch.Tensor:
        """A region of a tensor: a view or a copy, not to be written to."""
        return region.take(self.tensors[name].detach())


def open_source(source: object) -> Source | None:
    """The source for what a user passes: a mapping, a path, or None for anything else. Raises as `open_file`."""
    if isinstance(source, Mapping):
        return Source.of(source)
    return open_file(Path(source)) if isinstance(source, str | os.PathLike) else None


def open_file(path: Path, key: str | None = None) -> Source:
    """The source for a file, whose kind is read off its first bytes, not its name; nothing in it is run.

    Args:
        path: of a file of torch.save or safetensors.
        key: of a file of torch.save, under which key of its dict the tensors are; None if they are all that it holds.

    Raises:
        OSError: for a file that cannot be opened.
        ValueError: for one of an unknown kind, or that is no dict, or has none under `key`.
        CheckpointError, ImportError, TypeError: as `load_torch_file`, `mapped_safetensors` and `Source.of`.
    """
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"PK\x03\x04"):
        state = load_torch_file(path)
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__}, expected a dict of name -> tensor")
        if key is not None and not isinstance(state.get(key), Mapping):
            raise ValueError(f"no dict under {key!r}, only {', '.join(map(str, state))}")
        return Source.of(state if key is None else state[key], path)
    if head[8:9] == b"{":
        if key is not None:
            raise ValueError(f"{path} is a safetensors file, all of it tensors: leave out the key {key!r}")
        return Source.of(mapped_safetensors(path)[0], path)
    raise ValueError(
        f"{path} is neither a safetensors file nor one written by torch.save in its zip format (the default since "
        "torch 1.6); write it again with torch.save(torch.load(path, weights_only=True), path)"
    )


def _fingerprint(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Of a file's size, time and index, not of its values: reading them all is what a lazy source avoids."""
    stat, looks = path.stat(), sorted((name, tuple(one.shape), str(one.dtype)) for name, one in tensors.items())
    return hashlib.sha256(repr((stat.st_size, stat.st_mtime_ns, looks)).encode()).hexdigest()


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
        return _of_source(source, prefix, path)
    if not (path / HF_INDEX).is_file():
        files = sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(f"{path} has no {HF_INDEX} and {len(files)} safetensors files, expected one of both")
        return _of_source(_opened(files[0]), prefix, files[0])
    try:
        weight_map = json.loads((path / HF_INDEX).read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path / HF_INDEX} is not an index: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(named.values())):
        if Path(file).name != file:
            raise DamagedCheckpointError(f"{path / HF_INDEX} names the file {file!r}, expected one beside it")
        tensors = _of_source(_opened(path / file), prefix, path / file)
        found.update({name_of(one.path[len(prefix) :]): one for one in tensors})
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


def _of_source(source: Source, prefix: LeafPath, path: Path) -> list[StoredTensor]:
    return [whole((*prefix, name), source.tensors[name], str(path)) for name in source.tensors]
