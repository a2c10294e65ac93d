"""`LogicalTensor`: a tensor of a logical tensor's whole size, of which this rank holds some boxes."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from shardkit.core.region import Region
from shardkit.tp_adapter.boxes import Boxes
from shardkit.tp_adapter.torch_compat import no_torch_function, wrapper_of

__all__ = ["LogicalTensor"]

# What copies a state dict, makes room for a copy, or fills one.
_COPYING = frozenset(
    {
        "_pin_memory",
        "_to_copy",
        "clone",
        "copy_",
        "detach",
        "empty_like",
        "fill_",
        "lift_fresh",
        "new_empty",
        "zero_",
        "zeros_like",
    }
)


class LogicalTensor(torch.Tensor):
    """Some boxes of one logical tensor: a view of the fused parameter's (or optimizer state's) memory.

    Shape and size are those of the whole logical tensor, as `torch.distributed.checkpoint` compares them with a
    checkpoint's. It can be saved, loaded into, copied and staged; there is no other arithmetic on it, as no placements
    of DTensor would describe it.

    Attributes:
        local: what this rank holds, a plain tensor of shape `boxes.region.shape`.
        boxes: where that lies.
    """

    local: torch.Tensor
    boxes: Boxes

    __torch_function__ = no_torch_function

    @classmethod
    def of(cls, local: torch.Tensor, boxes: Boxes) -> Self:
        """The logical tensor of shape `boxes.shape`; the memory is that of `local`."""
        logical = wrapper_of(cls, boxes.shape, local)
        logical.local, logical.boxes = local, boxes
        return logical

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function that is called like this one
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, name = args[0] if args else None, str(func).split(".")[1]
        if name not in _COPYING or not isinstance(first, LogicalTensor):
            raise NotImplementedError(
                f"{func} was called with {[one for one in args if isinstance(one, LogicalTensor)]}, which "
                "can only be saved, loaded into and copied; compute with the fused parameter"
            )
        if name == "new_empty":
            args = (first, list(first.local.shape), *args[2:])
        result = func(*(one.local if isinstance(one, LogicalTensor) else one for one in args), **(kwargs or {}))
        return first if result is first.local else cls.of(result, first.boxes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = type(self).of(self.local.clone(), self.boxes)
        copied: Self = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.local, self.boxes)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = [f"{tuple(size)} at {tuple(offset)}" for offset, size, _ in self.boxes]
        return f"LogicalTensor(shape={tuple(self.shape)}, held here: {', '.join(boxes) or 'nothing'})"

    def __create_write_items__(self, fqn: str, owner: torch.Tensor) -> list[WriteItem]:
        return self.boxes.write_items(fqn, self.local)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.boxes.chunk_list()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.boxes.tensor_shard(self.local, index)


def _rebuilt(local: torch.Tensor, boxes: Boxes) -> LogicalTensor:
    return LogicalTensor.of(local, boxes)


torch.serialization.add_safe_globals([Boxes, Region, _rebuilt])  # for torch.load(weights_only=True)
