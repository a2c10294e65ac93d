"""Detects the kind of a checkpoint and opens it; converts FSDP1's checkpoints into every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardkit.core.checkpoint import conversion as core_conversion
from shardkit.core.checkpoint.conversion import Converted
from shardkit.core.checkpoint.directory import open_index
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath, LeftOut, name_of
from shardkit.core.checkpoint.reading import checkpoint_of
from shardkit.core.checkpoint.sources import read_safetensors
from shardkit.core.checkpoint.stock_metadata import METADATA
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.core.checkpoint.writers import DcpWriter, SafetensorsWriter, TorchWriter, Writer, objects_for_stock
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME
from shardkit.legacy_fsdp_compat.migrate.local_files import is_local, local_checkpoint
from shardkit.legacy_fsdp_compat.migrate.rank_files import (
    StoredShards,
    leaves_of_file,
    read_rank_files,
    sharded_checkpoint,
)
from shardkit.legacy_fsdp_compat.migrate.rank_writers import LocalRanks, LocalWriter, Ranks, ShardedWriter
from shardkit.legacy_fsdp_compat.migrate.wrapping import ModelShapes, Shapes, check_shapes, json_of

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt", ".tar"}


def open_checkpoint(
    source: str | Path | Sequence[str | Path], shapes: Shapes | None = None, *, without: Sequence[str] = ()
) -> Checkpoint:
    """Opens a checkpoint of any kind. Reads only the values of plain tensors that occur in several ranks' files; they
    must be equal.

    Args:
        source: a file (FULL, safetensors), a directory (of torch.distributed.checkpoint, of rank files, or with one of
            those files), or the list of the rank files.
        shapes: name -> shape of every parameter and buffer, in the model's order; for a tied one, the name it is tied
            to. LOCAL needs them; models in other checkpoints must match them.
        without: names to leave out, such as "rng" or "optim": values, or dicts with everything below.

    Raises:
        CheckpointError: if the source is not a checkpoint, is incomplete, does not match the shapes, or lacks a name to
            leave out.
    """
    of_model = None if shapes is None else ModelShapes.of(shapes)
    left_out = LeftOut(without)
    checkpoint = _open(source, of_model, left_out)
    left_out.check(source)
    if of_model is not None:
        check_shapes(checkpoint, of_model)
    return checkpoint


def _open(source: str | Path | Sequence[str | Path], shapes: ModelShapes | None, left_out: LeftOut) -> Checkpoint:
    if not isinstance(source, str | Path):
        return _rank_files([Path(one) for one in source], shapes, left_out)
    path = Path(source)
    if path.is_file():
        return _file(path, shapes, left_out)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; correct the path")
    if (path / METADATA).exists():
        return _directory(path, left_out)
    files = sorted(one for one in path.iterdir() if one.suffix in _TORCH_SUFFIXES or one.suffix == ".safetensors")
    for one in files:
        if one.is_symlink() and not one.resolve().is_relative_to(path.resolve()):
            raise CheckpointError(f"{one} is a link that leads out of its directory; name the file if it is meant")
    if not files:
        found = sorted(one.name for one in path.iterdir())[:8]
        raise CheckpointError(
            f"{path} holds {found}; expected {METADATA} (torch.distributed.checkpoint), or files ending in "
            f"{', '.join(sorted(_TORCH_SUFFIXES))} or .safetensors; give the directory that holds them"
        )
    return _file(files[0], shapes, left_out) if len(files) == 1 else _rank_files(files, shapes, left_out)


def _directory(path: Path, left_out: LeftOut) -> Checkpoint:
    """A directory of torch.distributed.checkpoint, or of core."""
    index = open_index(path, left_out)
    for name in index.tensors:
        if name.rpartition(".")[2] == FLAT_NAME:
            raise CheckpointError(
                f"'{name}' in {path} is a flat parameter of LOCAL_STATE_DICT, whose padding and order the files "
                "of ranks tell and a torch.distributed.checkpoint does not; load it where it was saved, and save it "
                "as SHARDED_STATE_DICT"
            )
    return checkpoint_of(path, index)


def _file(path: Path, shapes: ModelShapes | None, left_out: LeftOut) -> Checkpoint:
    if _is_safetensors(path):
        return read_safetensors(path, left_out)
    leaves = dict(left_out.rest(leaves_of_file(path)))
    if any(isinstance(leaf, StoredShards) for leaf in leaves.values()):
        return _rank_files([path], shapes, left_out)
    checkpoint = Checkpoint("FULL", [str(path)])
    for key, leaf in leaves.items():
        checkpoint.add(key, leaf, path)
    return checkpoint


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _rank_files(paths: Sequence[Path], shapes: ModelShapes | None, left_out: LeftOut) -> Checkpoint:
    files = read_rank_files(paths, left_out)
    return local_checkpoint(files, shapes) if is_local(files) else sharded_checkpoint(files)


def shapes_of_file(path: str | Path) -> dict[str, tuple[int, ...] | str]:
    """Shapes from a full checkpoint of the model, or from JSON: name -> list of numbers, or the name it is tied to.

    In a nested checkpoint the part below "model" or "state_dict" is used. Tied parameters are recognised by shared
    memory in a file of torch.save; other formats do not record ties.

    Raises:
        CheckpointError: if JSON holds anything else, and as `open_checkpoint`.
    """
    path = Path(path)
    if path.suffix == ".json":
        found = json_of(path)
        if not isinstance(found, dict):
            raise CheckpointError(
                f'{path} holds a {type(found).__name__}; write name -> shape there, such as {{"weight": [4, 3]}}'
            )
        return {name: tuple(shape) if isinstance(shape, list) else shape for name, shape in found.items()}
    checkpoint = open_checkpoint(path)
    return shapes_of_checkpoint(checkpoint) | _ties(path, _base_of_model(checkpoint))


def shapes_of_checkpoint(checkpoint: Checkpoint) -> dict[str, tuple[int, ...] | str]:
    """Shapes of the tensors below "model" or "state_dict" in a checkpoint, else of all of them. Ties are unknown."""
    base = _base_of_model(checkpoint)
    found = {key: one.shape for key, one in checkpoint.tensors.items() if key[: len(base)] == base}
    return {name_of(key[len(base) :]): shape for key, shape in found.items()}


def _base_of_model(checkpoint: Checkpoint) -> LeafPath:
    below = [key for key in ("model", "state_dict") if any(one[0] == key for one in checkpoint.tensors)]
    return (below[0],) if below else ()


def _ties(path: Path, base: LeafPath) -> dict[str, str]:
    """Name -> first name, of tensors that share their memory in a file of torch.save."""
    if not path.is_file() or _is_safetensors(path):
        return {}
    first: dict[Any, str] = {}
    ties = {}
    for key, leaf in leaves_of_file(path).items():
        if isinstance(leaf, torch.Tensor) and leaf.numel() and key[: len(base)] == base:
            name = name_of(key[len(base) :])
            known = first.setdefault((leaf.data_ptr(), leaf.shape, leaf.stride()), name)
            if known != name:
                ties[name] = known
    return ties


FORMATS: dict[str, Callable[..., Writer]] = {
    "dcp": lambda directory, checkpoint: DcpWriter(directory, checkpoint, objects_for_stock(checkpoint)),
    "safetensors": SafetensorsWriter,
    "full": TorchWriter,
}
"""Writers by format: a torch.distributed.checkpoint directory, a safetensors file, a file of torch.save. For files of
single ranks see `convert`."""

SHARDED, LOCAL = "sharded", "local"


def convert(
    checkpoint: Checkpoint,
    target: str | Path,
    to: str,
    *,
    ranks: Ranks | LocalRanks | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> Converted:
    """Writes `checkpoint` to the directory `target` in the format `to`, and reads it back to verify it.

    Args:
        checkpoint: the result of `open_checkpoint`; its files are only read.
        target: must not exist; appears when everything is written and verified.
        to: a key of `FORMATS`, or "sharded" or "local": a file of torch.save for each rank, like FSDP1's SHARDED or
            LOCAL.
        ranks: for "sharded" and "local", the number of ranks, and which names are parameters or how they are wrapped.
        progress: receives the number of bytes done; every tensor counts twice, written and read back.

    Raises:
        CheckpointError: if the target exists, an earlier attempt had another source, or the output read back differs.
    """
    shapes, make, described = None, FORMATS.get(to), "one"
    if to == SHARDED and isinstance(ranks, Ranks):
        make, described = partial(ShardedWriter, ranks=ranks), f"{ranks.count} of {sorted(ranks.parameters)}"
    elif to == LOCAL and isinstance(ranks, LocalRanks):
        make, described = (
            partial(LocalWriter, ranks=ranks),
            f"{ranks.count} of {json.dumps(ranks.wrapping.as_config())}",
        )
        shapes = ranks.wrapping.shapes
    elif make is None or ranks is not None:
        raise CheckpointError(
            f"unknown format '{to}' for {type(ranks).__name__}, expected one of {', '.join(FORMATS)}, '{SHARDED}' with "
            f"Ranks to write it for, or '{LOCAL}' with LocalRanks"
        )
    return core_conversion.convert(
        checkpoint,
        Path(target),
        partial(make, checkpoint=checkpoint),
        f"{to} for {described}",
        read_back=lambda directory: open_checkpoint(directory, shapes),
        report=to,
        durable=False,  # output lost in a power failure is converted again from the source
        progress=progress,
    )
