"""State of sharded modules as full tensors, in memory and on disk."""

from shardkit.core.checkpoint.full_state import IncompatibleKeys, full_state_dict, load_full_state_dict

__all__ = ["IncompatibleKeys", "full_state_dict", "load_full_state_dict"]
