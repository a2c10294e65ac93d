"""ShardedTensors in files of torch.save, read without a process group.

Classes of ours stand in for those that the file names, and keep what it says. Everything else that it might run is
refused.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import torch

__all__ = ["ALLOWED", "StoredShards"]


class _Record:
    """Stands in for a class whose objects are only data."""

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)  # a dict, or (dict or None, slots)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update(part)


def _stand_in(name: str) -> type:
    return type(name, (_Record,), {})


class StoredShards(torch.Tensor):
    """Stands in for ShardedTensor. One whose part is a ShardedTensor, as 2-D FSDP1 once wrote, is flattened: what its
    ranks are is what the inner one says, as torch gave the outer one numbers of its own.

    Attributes:
        parts: this file's parts: (offsets, tensor, rank).
        boxes: every rank's part, as far as the file tells: (offsets, sizes, rank).
        whole: shape of the whole.
        nested: whether there was an inner one, so that other files have parts of which this one does not tell.
    """

    parts: list[tuple[tuple[int, ...], torch.Tensor, int]]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    whole: tuple[int, ...]
    nested: bool = False

    def __setstate__(self, state: Any) -> None:
        """Takes what ShardedTensor pickles: parts, metadata, process group, sharding, RRefs. Raises ValueError for
        anything else.
        """
        local, metadata = state[0], state[1]
        self.parts = [
            (_sizes(one.metadata.shard_offsets), one.tensor, _rank_of(one.metadata.placement)) for one in local
        ]
        self.boxes = [
            (_sizes(one.shard_offsets), _sizes(one.shard_sizes), _rank_of(one.placement))
            for one in metadata.shards_metadata
        ]
        self.whole = _sizes(metadata.size)
        if not all(isinstance(tensor, torch.Tensor) for _, tensor, _ in self.parts):
            raise ValueError("a ShardedTensor whose parts are no tensors")
        inner = [(offsets, tensor) for offsets, tensor, _ in self.parts if isinstance(tensor, StoredShards)]
        if inner:
            self.nested = True
            self.parts = [(_moved(at, by), part, rank) for by, one in inner for at, part, rank in one.parts]
            self.boxes = [(_moved(at, by), sizes, rank) for by, one in inner for at, sizes, rank in one.boxes]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """For messages: what a tensor prints is calculated."""
        return "a ShardedTensor"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """It is not for computing."""
        raise NotImplementedError(f"{function} on a stored ShardedTensor")


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if any(type(one) is not int or not 0 <= one < 2**56 for one in sizes):
        raise ValueError(f"{sizes!r:.80} where sizes or offsets should be")
    return sizes


def _moved(offsets: tuple[int, ...], by: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(offsets, by, strict=True)))


def _rank_of(placement: Any) -> int:
    rank = placement.__dict__.get("_rank")
    if rank is None:
        return -1
    if type(rank) is not int or not 0 <= rank < 2**31:
        raise ValueError(f"the rank {rank!r:.40}")
    return rank


class _MemoryFormat(_Record):
    """Stands in for the enum of memory formats, of which nothing is needed."""

    def __init__(self, value: object) -> None:
        self.value = value


_ProcessGroupState = _stand_in("ProcessGroupState")


def _attribute(cls: Any, name: str) -> Any:
    """`getattr` as pickles use it for what ShardedTensors need: a class inside theirs, and members of an enumeration,
    which some versions of Python (3.11.2) write by name.
    """
    if cls is _MemoryFormat:
        return _MemoryFormat(name)
    if (cls, name) != (StoredShards, "ProcessGroupState"):
        raise pickle.UnpicklingError(
            f"getattr({getattr(cls, '__name__', cls)}, {name!r}) is not allowed in a checkpoint"
        )
    return _ProcessGroupState


_SHARD = "torch.distributed._shard"
ALLOWED: list[Any] = [
    (StoredShards, f"{_SHARD}.sharded_tensor.api.ShardedTensor"),
    (_stand_in("Shard"), f"{_SHARD}.sharded_tensor.shard.Shard"),
    (_stand_in("ShardMetadata"), f"{_SHARD}.metadata.ShardMetadata"),
    (_stand_in("ShardedTensorMetadata"), f"{_SHARD}.sharded_tensor.metadata.ShardedTensorMetadata"),
    (_stand_in("TensorProperties"), f"{_SHARD}.sharded_tensor.metadata.TensorProperties"),
    (_MemoryFormat, f"{_SHARD}.sharded_tensor.metadata.MEM_FORMAT_ENCODING"),
    (_stand_in("ChunkShardingSpec"), f"{_SHARD}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec"),
    (_stand_in("EnumerableShardingSpec"), f"{_SHARD}.sharding_spec.api.EnumerableShardingSpec"),
    (_stand_in("remote_device"), "torch.distributed.remote_device._remote_device"),
    (_ProcessGroupState, f"{_SHARD}.sharded_tensor.api.ShardedTensor.ProcessGroupState"),
    (_attribute, "builtins.getattr"),
    (_attribute, "__builtin__.getattr"),
    OrderedDict,
]
