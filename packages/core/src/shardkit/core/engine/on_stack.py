"""Checks whether a module's forward is still running.

torch calls always-called forward hooks after an `Exception`, but not after a `KeyboardInterrupt` or a `SystemExit`. In
that case the frame that called the hooks has left the stack.
"""

import sys
from types import FrameType

__all__ = ["calling_frame", "is_on_stack", "runs_elsewhere"]

# The callers of a module's hooks: torch, or a method made by `register_fsdp_forward_method`.
_CALLERS = ("torch.nn.modules.module", "shardkit.core.module")


def calling_frame() -> FrameType | None:
    """The frame that runs the module whose hook calls this, None if an unknown caller called the hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _CALLERS:
        frame = frame.f_back
    return frame


def is_on_stack(frame: FrameType) -> bool:
    """Whether `frame` runs in this thread."""
    return _is_below(frame, sys._getframe(1))


def runs_elsewhere(frame: FrameType) -> bool:
    """Whether `frame` runs in another thread."""
    return any(_is_below(frame, top) for top in sys._current_frames().values()) and not is_on_stack(frame)


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None
