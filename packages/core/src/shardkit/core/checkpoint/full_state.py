"""Full state dicts of sharded modules, both ways: what single-device code, exporters and pretrained weights use."""

from shardkit.core.checkpoint.gather import full_state_dict
from shardkit.core.checkpoint.load import IncompatibleKeys, load_full_state_dict

__all__ = ["IncompatibleKeys", "full_state_dict", "load_full_state_dict"]
