"""How the model behind LOCAL files was wrapped, as the files show it: what it takes to write such files again."""

from __future__ import annotations

from typing import Any

import torch

from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import LeafPath
from shardkit.legacy_fsdp_compat.flat_layout import FLAT_NAME, FlatLayout
from shardkit.legacy_fsdp_compat.migrate.model_shapes import ModelShapes
from shardkit.legacy_fsdp_compat.migrate.rank_files import RankFile
from shardkit.legacy_fsdp_compat.migrate.torch_files import StoredShards
from shardkit.legacy_fsdp_compat.migrate.wrapping import Wrapping, alignment_of, flat_key

__all__ = ["found_config"]

_CANDIDATES = (None, "bfloat16", "float32", "float64", "float8_e4m3fn")
"""A `param_dtype` for each size of elements, for alignment follows the size alone."""


def found_config(files: list[RankFile], base: LeafPath, shapes: ModelShapes, cut: set[str]) -> dict[str, Any] | None:
    """What `--config` takes, of the model at `base` whose parameters `cut` are sharded; None for files that FSDP1's own
    layouts do not explain.
    """
    names = shapes.given
    buffers = frozenset(name for name in names if shapes.ties.get(name, name) not in cut)
    keys = dict.fromkeys(path[-1] for file in files for path in file.leaves if path[:-1] == base)
    units = [str(key).removesuffix(FLAT_NAME).removesuffix(".") for key in keys if str(key).endswith(FLAT_NAME)]
    use_orig_params = any((*base, name) in file.leaves for name in cut for file in files)
    try:
        wrapping = Wrapping(names, dict.fromkeys(units, (None,)), buffers, use_orig_params)
        if not use_orig_params:
            return wrapping.as_config()
        found = {unit: tuple(one for one in _CANDIDATES if _fits(files, base, wrapping, unit, one)) for unit in units}
        return Wrapping(names, found, buffers, True).as_config() if all(found.values()) else None
    except CheckpointError:  # ties across units with use_orig_params=True, which only ours runs
        return None


def _fits(files: list[RankFile], base: LeafPath, wrapping: Wrapping, unit: str, param_dtype: str | None) -> bool:
    """Whether every rank's pieces lie in its flat tensor as this `param_dtype` would have them."""
    names, path = wrapping.members[unit], (*base, flat_key(unit))
    dtype = files[0].leaves[path].dtype
    if param_dtype is not None and alignment_of(param_dtype, dtype) == alignment_of(None, dtype):
        return False  # that is None already
    shapes = ModelShapes.of(wrapping.shapes).own
    layout = FlatLayout(tuple(shapes[name] for name in names), len(files), alignment_of(param_dtype, dtype))
    return all(
        layout.numel == file.leaves[path].whole[0]
        and all(
            _lies_at(file.leaves[*base, name], file.leaves[path], *layout.within_shard(index, file.rank))
            for index, name in enumerate(names)
        )
        for file in files
    )


def _lies_at(piece: torch.Tensor, flat: StoredShards, low: int, high: int) -> bool:
    """Whether a piece is as long as [low, high), and begins there where it is a view of the flat tensor."""
    if piece.numel() != high - low or low == high:
        return piece.numel() == high - low
    ((_, tensor, _),) = flat.parts
    shared = piece.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return not shared or piece.storage_offset() - tensor.storage_offset() == low
