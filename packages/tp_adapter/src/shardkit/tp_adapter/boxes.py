"""Local tensors that tell torch.distributed.checkpoint which boxes of the whole tensor they hold.

DTensor passes the three queries of a checkpoint (`__create_write_items__`, `__create_chunk_list__`,
`__get_tensor_shard__`) to its local tensor if that answers them. A plain tensor does not, and is taken for a single
box. A rank's part of a fused weight lies in several places, so it would be saved in the wrong place or refused. Such
local tensors are therefore `BoxedTensor`s. This needs no communication: a rank knows its boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardkit.core.parameters.region import Box, Region
from shardkit.tp_adapter.torch_compat import no_torch_function, over_memory_of

__all__ = ["Boxes", "BoxedTensor"]

# Operators whose result has the same elements in the same places, or new ones for them (optimizer states).
_SAME_PLACES = frozenset(
    {
        "_pin_memory",
        "_to_copy",
        "clone",
        "detach",
        "empty_like",
        "full_like",
        "lift_fresh",
        "new_empty",
        "new_zeros",
        "ones_like",
        "view",
        "zeros_like",
    }
)


@dataclass(frozen=True)
class Boxes:
    """Where the elements of a rank's tensor lie in the whole tensor.

    Attributes:
        shape: shape of the whole tensor.
        region: the elements that the rank holds.
        places: where the runs of `region` lie in the rank's tensor, run for run. None: one after the other, and the
            rank's tensor holds nothing else.
    """

    shape: torch.Size
    region: Region
    places: Region | None = None

    def __iter__(self) -> Iterator[tuple[torch.Size, torch.Size, Box]]:
        """Offset and size of each box in the whole tensor, and its location in the rank's tensor."""
        if not self.region.numel:
            return
        packed = [box for _, box in self.region.boxes()]
        held = packed if self.places is None else [box for box, _ in self.places.boxes()]
        for (in_whole, _), in_local in zip(self.region.boxes(), held, strict=True):
            offset = torch.Size(one.start for one in in_whole)
            yield offset, torch.Size(one.stop - one.start for one in in_whole), in_local

    def packed(self) -> Boxes:
        """The boxes of a copy that holds nothing else."""
        return Boxes(self.shape, self.region)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable

    def write_items(self, fqn: str, dtype_of: torch.Tensor) -> list[WriteItem]:
        """The answer to `__create_write_items__`; `dtype_of` is any tensor with the same properties."""
        properties = TensorProperties.create_from_tensor(dtype_of)
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offset, size), properties, self.shape),
            )
            for offset, size, _ in self
        ]

    def chunk_list(self) -> list[ChunkStorageMetadata]:
        """The answer to `__create_chunk_list__`."""
        return [ChunkStorageMetadata(offset, size) for offset, size, _ in self]

    def tensor_shard(self, local: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
        """The answer to `__get_tensor_shard__`: a view of the rank's plain tensor `local`."""
        for offset, _, in_local in self:
            if offset == index.offset:
                return local[in_local]
        raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset}; load with CheckpointManager")


class BoxedTensor(torch.Tensor):
    """A plain tensor that also knows its boxes and answers a checkpoint's queries.

    Operators see a plain tensor and return plain tensors, except those that keep every element in its place. So the
    detached parameter in a state dict and an optimizer's `zeros_like(parameter)` keep their boxes. Copies of a state
    dict keep them too: `copy.deepcopy`, `torch.save`, and the staging of an asynchronous save, which calls
    `new_empty([])` and sets its memory and size afterwards.
    """

    boxes: Boxes

    __torch_function__ = no_torch_function

    @classmethod
    def of(cls, local: torch.Tensor, boxes: Boxes) -> Self:
        """`local`, of shape `boxes.region.shape`, with its boxes; the memory is shared."""
        boxed = over_memory_of(cls, local)
        boxed.boxes = boxes
        return boxed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function that is called like this one
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        source = args[0] if args else None
        if (
            isinstance(source, BoxedTensor)
            and type(result) is torch.Tensor
            and result.shape == source.shape
            and str(func).split(".")[1] in _SAME_PLACES
        ):
            return type(source).of(result, source.boxes)
        return result

    def plain(self) -> torch.Tensor:
        """A plain tensor over the same memory."""
        return self.as_subclass(torch.Tensor).detach()

    def new_empty(self, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """As for any tensor, but results of no dims, or of this shape, have the boxes: copies begin with them."""
        new = super().new_empty(size, *args, **kwargs)
        begins_copy = tuple(new.shape) in ((), tuple(self.shape))
        return type(self).of(new, self.boxes) if begins_copy and not isinstance(new, BoxedTensor) else new

    # -- the questions of torch.distributed.checkpoint ----------------------------------------------------------------

    def __create_write_items__(self, fqn: str, owner: torch.Tensor) -> list[WriteItem]:
        return self.boxes.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.boxes.chunk_list()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.boxes.tensor_shard(self.plain(), index)


torch.serialization.add_safe_globals([Boxes, BoxedTensor, Region])  # for torch.load(weights_only=True)
