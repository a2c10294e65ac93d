"""`CheckedLoadPlanner`: refuses a checkpoint whose boxes do not cover a whole tensor."""

from __future__ import annotations

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from shardkit.core.checkpoint.coverage import coverage_problem
from shardkit.tp_adapter.logical_tensor import LogicalTensor

__all__ = ["CheckedLoadPlanner"]


class CheckedLoadPlanner(DefaultLoadPlanner):
    """The default planner of `torch.distributed.checkpoint.load`, with a check of the boxes of each tensor.

    torch reads the boxes that exist: a hole leaves elements of the loaded tensor unchanged, without an error. Use it as
    `dcp.load(state_dict, checkpoint_id=..., planner=CheckedLoadPlanner())`.

    Raises:
        ValueError: (inside the CheckpointException of `dcp.load`) if boxes of a loaded tensor leave a hole, overlap or
            stick out; the message has its FQN and the placements of the target.
    """

    def create_local_plan(self) -> LoadPlan:
        """This rank's plan. Not collective; every rank reaches the same conclusion."""
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


def _target(value: object) -> str:
    if isinstance(value, LogicalTensor):
        return f"a logical tensor, {value!r}"
    placements = getattr(value, "placements", None)
    return "a plain tensor" if placements is None else f"a DTensor with placements {tuple(placements)}"
