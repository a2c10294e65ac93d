"""The server that ranks are forked from: it imports their modules once for all of them, and freezes the objects.

A forked rank finds them in place. Its garbage collections do not visit frozen objects, so it shares those pages, too.
"""

import gc

import torch._dynamo  # which the first step of an optimizer imports
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

import shardkit.core
from tests.support.rank_process import rewrite_assertions

__all__ = ["shardkit", "torch"]

rewrite_assertions()
gc.collect()
gc.freeze()
