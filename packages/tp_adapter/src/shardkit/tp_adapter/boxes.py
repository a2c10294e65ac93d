"""Local tensors that tell torch.distributed.checkpoint which boxes of the whole tensor they hold.

DTensor passes the three questions of a checkpoint (`__create_write_items__`, `__create_chunk_list__`,
`__get_tensor_shard__`) on to its local tensor, if that answers them. A plain one does not, and is taken for a single
box; what lies in several places, as a rank's part of a fused weight does, would be saved in the wrong place or refused.
So such local tensors are `BoxedTensor`s. Nothing is sent for that: a rank knows its boxes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardkit.core.region import Box, Region
from shardkit.tp_adapter.torch_compat import no_torch_function, over_memory_of

__all__ = ["Boxes", "BoxedTensor"]

# What makes a tensor of the same elements in the same places, or of new ones for these places (optimizer states).
_SAME_PLACES = frozenset(
    {
        "_pin_memory",
        "_to_copy",
        "clone",
        "detach",
        "empty_like",
        "full_like",
        "lift_fresh",
        "ones_like",
        "view",
        "zeros_like",
    }
)


@dataclass(frozen=True)
class Boxes:
    """Where the elements of a rank's tensor lie in the whole tensor."""

    shape: torch.Size
    region: Region

    def __iter__(self) -> Iterator[tuple[torch.Size, torch.Size, Box]]:
        """Offset and size of each box in the whole tensor, and where it lies in the rank's tensor."""
        if not self.region.numel:
            return
        for in_whole, in_local in self.region.boxes():
            offset = torch.Size(one.start for one in in_whole)
            yield offset, torch.Size(one.stop - one.start for one in in_whole), in_local


class BoxedTensor(torch.Tensor):
    """A plain tensor in every respect, which also knows its boxes and answers a checkpoint's questions.

    Operators see the plain tensor and give plain tensors, but for those that keep every element in its place: so the
    detached parameter in a state dict and an optimizer's `zeros_like(parameter)` know their boxes as well.
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

    # -- the questions of torch.distributed.checkpoint ----------------------------------------------------------------

    def __create_write_items__(self, fqn: str, owner: torch.Tensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self)
        return [
            WriteItem(
                MetadataIndex(fqn, offset),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(offset, size), properties, self.boxes.shape),
            )
            for offset, size, _ in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, size) for offset, size, _ in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        plain = self.plain()
        for offset, _, in_local in self.boxes:
            if offset == index.offset:
                return plain[in_local]
        raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset}")
