"""Whether a module's forward that has begun is still running.

torch calls always-called forward hooks after an `Exception`, but not after a `KeyboardInterrupt` or a `SystemExit`: of
those the hooks never hear. What tells is the frame that called them, which has left the stack then.
"""

import sys
from types import FrameType

__all__ = ["calling_frame", "is_on_stack"]

# Where a module's hooks are called from: by torch, or by a method that `register_fsdp_forward_method` made.
_CALLERS = ("torch.nn.modules.module", "shardkit.core.module")


def calling_frame() -> FrameType | None:
    """The frame that runs the module whose hook this is called from, None if something unknown called the hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") not in _CALLERS:
        frame = frame.f_back
    return frame


def is_on_stack(frame: FrameType) -> bool:
    """Whether `frame` runs in this thread."""
    one: FrameType | None = sys._getframe(1)
    while one is not None and one is not frame:
        one = one.f_back
    return one is not None
