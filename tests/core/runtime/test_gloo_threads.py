"""A process ends cleanly though a thread of gloo still has to free tensors."""

import subprocess
import sys
from pathlib import Path

import pytest

# Freeing a tensor takes long here, in gloo's thread and without the GIL, which the thread then wants back.
RANK = """
import hashlib, sys, threading, weakref
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from shardkit.core import fully_shard

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
model = fully_shard(nn.Linear(2, 2), mesh=mesh)
letting_go = threading.Event()

def let_go():
    letting_go.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 600_000)

tensor = torch.ones(3)
store = dist.distributed_c10d._get_default_store()
if rank:
    store.wait(["only gloo has the tensor"])
    dist.all_reduce(tensor)
else:
    weakref.finalize(tensor, let_go).atexit = False
    work = dist.all_reduce(tensor, async_op=True)
    del tensor, work
    store.set("only gloo has the tensor", "")
    letting_go.wait(30)
    assert letting_go.is_set()
    print("done")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux tells which threads run")
def test_a_thread_of_gloo_may_finish_before_the_interpreter_ends(tmp_path: Path):
    store, pipes = str(tmp_path / "store"), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, store, rank], text=True, **pipes) for rank in "01"]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert "done" in said[0] and ranks[0].returncode == 0, said
