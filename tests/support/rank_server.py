"""What the server that ranks are forked from does, once for all of them: import what each needs, and freeze it.

A rank finds it there when it is forked. Its collections do not visit what is frozen, so it shares those pages, too.
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
