"""`CheckedLoadPlanner`: a checkpoint whose boxes do not make up the whole of a tensor is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from shardkit.tp_adapter.logical_tensor import LogicalTensor

__all__ = ["CheckedLoadPlanner", "coverage_problem"]


class CheckedLoadPlanner(DefaultLoadPlanner):
    """The default planner of `torch.distributed.checkpoint.load`, which first looks at the boxes of each tensor.

    torch reads what boxes there are: a hole leaves elements of the loaded tensor as they were, silently. Use as
    `dcp.load(state_dict, checkpoint_id=..., planner=CheckedLoadPlanner())`.

    Raises:
        ValueError: (inside the CheckpointException of `dcp.load`) if boxes of a tensor that is loaded leave a hole,
            overlap or stick out, with its FQN and the placements that it is loaded into.
    """

    def create_local_plan(self) -> LoadPlan:
        """This rank's plan. Not collective; every rank comes to the same conclusion."""
        assert self.metadata is not None, "dcp.load sets the planner up"
        for fqn, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(fqn)
            if isinstance(saved, TensorStorageMetadata) and (problem := coverage_problem(saved.size, saved.chunks)):
                raise ValueError(
                    f"{fqn}: the checkpoint's boxes of shape {tuple(saved.size)} {problem}; to load into "
                    f"{_target(value)}. "
                    "The checkpoint is damaged, or was written by ranks that did not hold the tensor whole: save again"
                )
        return super().create_local_plan()


def coverage_problem(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """What keeps boxes from making up a tensor of `shape` exactly once, None if nothing does."""
    boxes = [
        (tuple(chunk.offsets), tuple(at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True)))
        for chunk in chunks
        if math.prod(chunk.sizes)
    ]
    for start, stop in boxes:
        if any(low < 0 or high > size for low, high, size in zip(start, stop, shape, strict=True)):
            return f"stick out of it: {_text(start, stop)}"
    boxes.sort()
    for index, (start, stop) in enumerate(boxes):
        for other_start, other_stop in boxes[index + 1 :]:
            if shape and other_start[0] >= stop[0]:
                break  # sorted: all that follow begin behind this one
            if all(max(a, b) < min(c, d) for a, b, c, d in zip(start, other_start, stop, other_stop, strict=True)):
                return f"overlap: {_text(start, stop)} and {_text(other_start, other_stop)}"
    covered = sum(math.prod(b - a for a, b in zip(start, stop, strict=True)) for start, stop in boxes)
    if covered != math.prod(shape):
        return f"leave holes: they hold {covered} of its {math.prod(shape)} elements"
    return None


def _target(value: object) -> str:
    if isinstance(value, LogicalTensor):
        return f"a logical tensor, {value!r}"
    placements = getattr(value, "placements", None)
    return "a plain tensor" if placements is None else f"a DTensor with placements {tuple(placements)}"


def _text(start: Sequence[int], stop: Sequence[int]) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in zip(start, stop, strict=True)) + "]"
