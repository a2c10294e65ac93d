"""`LogicalTensor`: a tensor of a logical tensor's whole size, of which this rank holds some boxes.

It is a view. In a weight packed group by group, rows of other logical tensors lie between its rows, so its memory is
the fused tensor's and its boxes give their places in it. A copy, pickled or not, has only its own elements.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.region import Region
from shardkit.tp_adapter.boxes import Boxes
from shardkit.tp_adapter.torch_compat import no_torch_function, wrapper_of

__all__ = ["LogicalTensor"]

# Operators that copy a state dict, allocate such a copy, fill one, or return the same tensor.
_COPYING = frozenset({"_pin_memory", "_to_copy", "clone", "empty_like", "new_empty", "zeros_like"})
_FILLING = frozenset({"copy_", "fill_", "zero_"})
_SAME = frozenset({"detach", "lift_fresh"})


class LogicalTensor(torch.Tensor):
    """Some boxes of one logical tensor: a view of the fused parameter's (or optimizer state's) memory.

    Shape and size are those of the whole logical tensor, because `torch.distributed.checkpoint` compares them with a
    checkpoint's. It can be saved, loaded into, copied and staged. It supports no other arithmetic, because no
    placements of DTensor describe it. `copy_` accepts a plain tensor of the whole shape (each rank takes its part) or
    of the shape of `packed()`, a number, or a logical tensor with the same boxes; it raises ValueError for others.

    Attributes:
        local: a plain tensor of shape `boxes.region.shape`, unless `boxes.places` gives the places of this rank's part
            in it.
        boxes: where it lies in the whole tensor.
    """

    local: torch.Tensor
    boxes: Boxes

    __torch_function__ = no_torch_function

    @classmethod
    def of(cls, local: torch.Tensor, boxes: Boxes) -> Self:
        """The logical tensor of shape `boxes.shape`, over the memory of `local`."""
        logical = wrapper_of(cls, boxes.shape, local)
        logical.local, logical.boxes = local, boxes
        return logical

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function that is called like this one
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first, name, kwargs = args[0] if args else None, str(func).split(".")[1], kwargs or {}
        if name not in _COPYING | _FILLING | _SAME or not isinstance(first, LogicalTensor):
            raise NotImplementedError(
                f"{func} was called with {[one for one in args if isinstance(one, LogicalTensor)]}, which "
                "can only be saved, loaded into and copied; compute with the fused parameter"
            )
        if name in _FILLING:
            return first._fill(func, args[1:], kwargs)
        if name in _SAME:
            return cls.of(func(first.local), first.boxes)
        shape = [list(first.boxes.region.shape)] if name == "new_empty" else []
        return cls.of(func(first.packed(), *shape, *args[1 + len(shape) :], **kwargs), first.boxes.packed())

    def packed(self) -> torch.Tensor:
        """This rank's part, a plain tensor of shape `boxes.region.shape`: a copy if other elements lie between."""
        return self.local if self.boxes.places is None else self.boxes.places.take(self.local)

    def whole(self) -> torch.Tensor:
        """A plain copy of the logical tensor, which this rank must hold whole, as in full state dicts. Not collective.

        Raises:
            ValueError: if this rank holds only a part.
        """
        if self.boxes.region.shape != tuple(self.shape):
            raise ValueError(
                f"{self!r} is held in parts; gather the fused tensors first, as shardkit.core.full_state_dict does, "
                "and pass what that gives to logical_state_dict"
            )
        whole = self.local.new_empty(self.shape)
        self.boxes.region.put(whole, self.packed())
        return whole

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """An operator that writes into this tensor, from another or from a number."""
        held = [self._held_of(one) for one in args]
        if self.boxes.places is None:
            func(self.local, *held, **kwargs)
            return self
        for in_local, in_packed in self.boxes.places.boxes():
            parts = [one[in_packed] if isinstance(one, torch.Tensor) and one.ndim else one for one in held]
            func(self.local[in_local], *parts, **kwargs)
        return self

    def _held_of(self, source: Any) -> Any:
        """This rank's part of an operator's argument: a plain tensor of the shape of `packed()`, or not a tensor."""
        if not isinstance(source, torch.Tensor) or not source.ndim:
            return source
        seen = f"a {type(source).__name__} of shape {tuple(source.shape)}"
        if isinstance(source, LogicalTensor):
            if source.boxes.packed() == self.boxes.packed():
                return source.packed()
            seen = repr(source)
        elif not isinstance(source, DTensor):
            if source.shape == self.shape:
                return self.boxes.region.take(source)
            if source.shape == self.boxes.region.shape:
                return source
        raise ValueError(
            f"{self!r} got {seen}, expected a plain tensor of its whole shape {tuple(self.shape)} or of this "
            f"rank's part, {self.boxes.region.shape}, or a logical tensor with the same boxes. Check that both have "
            "the same name; pass full_tensor() of a DTensor, and whole() of a logical tensor that is entirely here"
        )

    def __copy__(self) -> Self:
        return self.of(self.local, self.boxes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copied: Self = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.packed(), self.boxes.packed())

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
