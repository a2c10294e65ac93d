"""What a path holds: finds out the kind of a checkpoint and opens it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardkit.legacy_fsdp_compat.migrate.dcp_files import METADATA, read_dcp
from shardkit.legacy_fsdp_compat.migrate.flat_files import read_safetensors
from shardkit.legacy_fsdp_compat.migrate.local_files import Shapes, is_local, local_checkpoint
from shardkit.legacy_fsdp_compat.migrate.rank_files import read_rank_files, sharded_checkpoint
from shardkit.legacy_fsdp_compat.migrate.stored import Checkpoint, CheckpointError, joined, paths_of, whole
from shardkit.legacy_fsdp_compat.migrate.torch_files import StoredShards, load_torch_file, release_pages

__all__ = ["open_checkpoint", "shapes_of_file", "shapes_of_model"]

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}


def open_checkpoint(source: str | Path | Sequence[str | Path], shapes: Shapes | None = None) -> Checkpoint:
    """Opens a checkpoint of any kind; no values are read.

    Args:
        source: a file (FULL, safetensors), a directory (of torch.distributed.checkpoint, of rank files, or with one of
            those files), or the list of the rank files.
        shapes: for LOCAL: name -> shape of every parameter and buffer, in order of the model.

    Raises:
        CheckpointError: for anything that is no checkpoint, or an incomplete one.
    """
    if not isinstance(source, str | Path):
        return _rank_files([Path(one) for one in source], shapes)
    path = Path(source)
    if path.is_file():
        return _file(path, shapes)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist")
    if (path / METADATA).exists():
        return read_dcp(path)
    files = sorted(one for one in path.iterdir() if one.suffix in _TORCH_SUFFIXES or one.suffix == ".safetensors")
    if not files:
        found = sorted(one.name for one in path.iterdir())[:8]
        raise CheckpointError(
            f"{path} holds {found}; expected {METADATA} (torch.distributed.checkpoint), or files ending in "
            f"{', '.join(sorted(_TORCH_SUFFIXES))} or .safetensors"
        )
    return _file(files[0], shapes) if len(files) == 1 else _rank_files(files, shapes)


def _file(path: Path, shapes: Shapes | None) -> Checkpoint:
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:9] == b"{":
        return read_safetensors(path)
    value = load_torch_file(path)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a dict")
    leaves = dict(paths_of(dict(value)))
    if any(isinstance(leaf, StoredShards) for leaf in leaves.values()):
        return _rank_files([path], shapes)
    checkpoint = Checkpoint("FULL", [str(path)])
    for key, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            checkpoint.tensors[key] = whole(joined(key), leaf, str(path), release_pages)
        else:
            checkpoint.objects[key] = leaf
    return checkpoint


def _rank_files(paths: Sequence[Path], shapes: Shapes | None) -> Checkpoint:
    files = read_rank_files(paths)
    return local_checkpoint(files, shapes) if is_local(files) else sharded_checkpoint(files)


def shapes_of_file(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes from a full checkpoint of the model, or from JSON that maps names to lists of numbers.

    Of a nested checkpoint the part below "model" or "state_dict" counts. Tied parameters must stand there once.
    """
    path = Path(path)
    if path.suffix == ".json":
        return {name: tuple(shape) for name, shape in json.loads(path.read_text()).items()}
    found = open_checkpoint(path).tensors
    below = [key for key in ("model", "state_dict") if any(one[0] == key for one in found)]
    if below:
        return {joined(key[1:]): one.shape for key, one in found.items() if key[0] == below[0]}
    return {joined(key): one.shape for key, one in found.items()}


def shapes_of_model(factory: str) -> dict[str, tuple[int, ...]]:
    """Shapes from `module:function`, which builds the model; it is called on the meta device, so nothing is allocated.

    Raises:
        CheckpointError: if that cannot be imported or gives no module.
    """
    module, _, name = factory.partition(":")
    try:
        build: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(f"--model {factory}: {error}; expected MODULE:FUNCTION that can be imported") from error
    with torch.device("meta"):
        model = build()
    if not isinstance(model, torch.nn.Module):
        raise CheckpointError(f"--model {factory} returned a {type(model).__name__}, expected a torch.nn.Module")
    named = [*model.named_parameters(), *model.named_buffers()]
    order = list(model.state_dict())
    kept = {name: tuple(tensor.shape) for name, tensor in named if name in order}
    return {name: kept[name] for name in order if name in kept}
