"""Whole tensors from foreign files: safetensors, Hugging Face directories, torch.save; or from a dict in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, damage_of
from shardkit.core.checkpoint.leaves import MODEL, LeftOut, decode_path
from shardkit.core.checkpoint.stored import Checkpoint, whole
from shardkit.core.checkpoint.torch_files import load_torch_file

HF_INDEX = "model.safetensors.index.json"
PATHS_NOTE, OBJECTS_NOTE = "shardkit.leaves", "shardkit.values"
"""In the metadata of safetensors: paths of tensors by name, and values that are not tensors, as JSON."""

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def mapped_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The mapped tensors of a safetensors file, and the texts in its metadata. Raises ImportError without
    `safetensors`, ValueError for a dtype that torch lacks, and DamagedCheckpointError if the header is damaged or does
    not match the file.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"reading {path} needs the package safetensors; run: pip install safetensors") from error
    try:
        # Any: the package is not annotated.
        opened: Any = safe_open(str(path), framework="pt")
        for name in opened.keys():  # noqa: SIM118 (no mapping)
            kind = opened.get_slice(name).get_dtype()
            if kind not in SAFETENSORS_DTYPES:
                raise ValueError(f"{name}: dtype {kind} in {path}, expected one of {', '.join(SAFETENSORS_DTYPES)}")
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path} ({path.stat().st_size} bytes) is damaged: {error}") from error
    return tensors, opened.metadata() or {}


def read_safetensors(path: Path, left_out: LeftOut) -> Checkpoint:
    """A safetensors file, without the left out entries; one written by shardkit has paths and objects too. Raises
    CheckpointError if it is not such a file, is truncated, or has an unknown dtype.
    """
    try:
        tensors, notes = mapped_safetensors(path)
        paths = {name: decode_path(found) for name, found in json.loads(notes.get(PATHS_NOTE, "{}")).items()}
        objects = {decode_path(found): value for found, value in json.loads(notes.get(OBJECTS_NOTE, "[]"))}
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    checkpoint = Checkpoint("safetensors", [str(path)])
    found = {paths.get(name, (name,)): tensor for name, tensor in tensors.items()}
    for place, value in (*left_out.rest(found), *left_out.rest(objects)):
        checkpoint.add(place, value, path)
    return checkpoint


@dataclass(frozen=True)
class Source:
    """Full tensors by name. Tensors of a file are mapped: a part is read from disk when it is copied."""

    tensors: dict[str, torch.Tensor]  # in order
    objects: dict[str, Any]  # values that are not tensors: a module's extra state
    # equal on two ranks whose sources are the same file; None if only this process can read it
    fingerprint: str | None = None

    @classmethod
    def of(cls, state: Mapping[Any, Any], file: Path | None = None) -> Source:
        """The source for a dict. Raises TypeError unless it is a flat dict of dense tensors."""
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
                    if value.is_meta:
                        raise TypeError(f"{name}: {origin} has a tensor without values (meta device); load them first")
                    raise TypeError(
                        f"{name}: {origin} has a tensor of layout {value.layout}, {value.dtype}, expected a dense one; "
                        "convert it with to_dense() or dequantize()"
                    )
                tensors[name] = value
            elif isinstance(value, Mapping) and name.rpartition(".")[2] != "_extra_state":
                raise TypeError(
                    f"{name}: {origin} is nested, expected a flat dict of name -> tensor; "
                    f"if the model is under this key, pass source[{name!r}] (import: --key {name})"
                )
            else:
                objects[name] = value
        if file is None:
            return cls(tensors, objects)
        # The fingerprint ignores values: reading them all would defeat a lazy source.
        stat, looks = file.stat(), sorted((name, tuple(one.shape), str(one.dtype)) for name, one in tensors.items())
        seen = repr((stat.st_size, stat.st_mtime_ns, looks))
        return cls(tensors, objects, hashlib.sha256(seen.encode()).hexdigest())


def open_source(source: object) -> Source | None:
    """The source for a user's argument, a mapping or a path; None for anything else.

    A path is a file, a directory of safetensors, or the index of one. Raises as `open_file` and `_files_of`.
    """
    if isinstance(source, Mapping):
        return Source.of(source)
    if not isinstance(source, str | os.PathLike):
        return None
    path = Path(source)
    if _files_of(path)[0] == [path]:
        return open_file(path)
    parts = _parts_of(path)
    tensors = {name: tensor for part in parts.values() for name, tensor in part.tensors.items()}
    seen = repr([part.fingerprint for part in parts.values()])
    return Source(tensors, {}, hashlib.sha256(seen.encode()).hexdigest())


def open_file(path: Path, key: str | None = None) -> Source:
    """The source for a file, whose kind is read from its first bytes, not its name. Nothing in it is executed.

    `key` names the entry of the dict in a torch.save file that holds the tensors; None if they are the whole dict.
    Raises OSError if the file cannot be opened; ValueError if its kind is unknown, it is not a dict, or it has no
    `key`; CheckpointError, ImportError, TypeError as `load_torch_file`, `mapped_safetensors` and `Source.of`.
    """
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"PK\x03\x04"):
        state = load_torch_file(path)
        if not isinstance(state, Mapping):
            raise ValueError(f"{path} holds a {type(state).__name__}, expected a dict of name -> tensor")
        if key is not None and not isinstance(state.get(key), Mapping):
            raise ValueError(f"no dict under {key!r}, only {', '.join(map(str, state))}; give one of these keys")
        return Source.of(state if key is None else state[key], path)
    if head[8:9] == b"{":
        if key is not None:
            raise ValueError(f"{path} is a safetensors file, all of it tensors: leave out the key {key!r}")
        return Source.of(mapped_safetensors(path)[0], path)
    raise ValueError(
        f"{path} is neither a safetensors file nor one written by torch.save in its zip format (the default since "
        "torch 1.6); write it again with torch.save(torch.load(path, weights_only=True), path)"
    )


def weights_of_files(path: Path, left_out: LeftOut, key: str | None = None) -> Checkpoint:
    """The tensors of a safetensors file, of a directory with a Hugging Face index, or of a torch.save file, by their
    names below "model".

    `key` is as in `open_file`; a note lists values that are not tensors. Links are followed, because the Hugging Face
    Hub stores downloads as links. Names in the index may only lead to files of its directory. Raises CheckpointError
    for anything else, and if no file has a tensor that the index names.
    """
    parts = _parts_of(path, key)
    kind = "safetensors" if all(file.suffix == ".safetensors" for file in parts) else "FULL"
    checkpoint = Checkpoint(kind, [str(file) for file in parts])
    for file, part in parts.items():
        checkpoint.notes += [f"left out, no tensor: {name}" for name in part.objects]
        found = {(MODEL, name): whole((MODEL, name), one, str(file)) for name, one in part.tensors.items()}
        checkpoint.tensors |= left_out.rest(found)
    return checkpoint


def _parts_of(path: Path, key: str | None = None) -> dict[Path, Source]:
    """The contents of each file at a path; if an index leads there, only tensors that it lists."""
    files, named = _files_of(path) if key is None else ([path], {})
    parts = {file: _opened(file, key) for file in files}
    if named:
        kept = {file: {n: one for n, one in parts[file].tensors.items() if named.get(n) == file.name} for file in files}
        if missing := sorted(named.keys() - set().union(*kept.values())):
            raise DamagedCheckpointError(f"{path}: no file has {missing[0]}, which is in its index")
        parts = {file: replace(part, tensors=kept[file]) for file, part in parts.items()}
    return parts


def _files_of(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files with the weights at a path, itself if it is one, and by name the file of each tensor, if an index says.

    Raises CheckpointError for a directory without an index and with none or several safetensors files.
    """
    index = path / HF_INDEX if path.is_dir() else path
    if index.name.endswith(".index.json") and index.is_file():
        named = _weight_map(index)
        return [index.parent / name for name in sorted(set(named.values()))], named
    if not path.is_dir():
        return [path], {}
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        raise CheckpointError(
            f"{path} has no {HF_INDEX} and {len(files)} safetensors files; name one file, or add the index"
        )
    return files, {}


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by name, in the directory of a Hugging Face index."""
    with damage_of(str(index), "is not an index"):
        weight_map = json.loads(index.read_bytes())["weight_map"]
        named = {str(name): str(file) for name, file in weight_map.items()}
        if odd := [file for file in named.values() if Path(file).name != file]:
            raise DamagedCheckpointError(f"names the file {odd[0]!r}, expected one beside it")
    return named


def _opened(path: Path, key: str | None = None) -> Source:
    if not path.is_file():
        raise DamagedCheckpointError(f"{path} does not exist, or is not a file")
    try:
        return open_file(path, key)
    except (ImportError, CheckpointError):
        raise
    except Exception as error:  # torch and safetensors may raise anything
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
