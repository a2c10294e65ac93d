"""Offline conversion in a process of its own: its memory, its MB/s. A checkpoint of 1 GB (256 tensors of 4 MB), and one
tensor of 512 MB whose rows lie scattered over the file. Into LOCAL files for four ranks as one flat parameter.

The bound on resident memory, 600 MB with everything that Python and torch take (about 250 MB), is asserted.
"""

import json
import subprocess
import sys

import pytest
import torch

from shardkit.legacy_fsdp_compat.migrate import convert, open_checkpoint

TENSORS, ROWS, COLUMNS = 256, 1000, 1000
BOUND = 600e6

_CONVERT = """
import json, re, sys, time
from pathlib import Path
from shardkit.legacy_fsdp_compat.migrate import LocalRanks, Wrapping, convert, open_checkpoint
source, target, to = sys.argv[1:]
start = time.perf_counter()
checkpoint = open_checkpoint(source)
shapes = {name: stored.shape for (name,), stored in checkpoint.tensors.items()}
ranks = LocalRanks(4, Wrapping(shapes, {"": (None,)}, frozenset(), True)) if to == "local" else None
convert(checkpoint, target, to, ranks=ranks)
seconds = time.perf_counter() - start
# Not ru_maxrss: that of a child begins with its parent's.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({"seconds": seconds, "peak": peak, "bytes": checkpoint.nbytes}))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The checkpoint in both forms that are read differently."""
    directory = tmp_path_factory.mktemp("migrate")
    torch.save(
        {f"layer.{number}.weight": torch.randn(ROWS, COLUMNS) for number in range(TENSORS)}, directory / "full.pt"
    )
    convert(open_checkpoint(directory / "full.pt"), directory / "dcp", "dcp")
    torch.save({"weight": torch.randn(16_000, 8_000).t()}, directory / "scattered.pt")
    return {
        name: directory / file for name, file in [("full", "full.pt"), ("dcp", "dcp"), ("scattered", "scattered.pt")]
    }


@pytest.mark.parametrize(
    ("source", "to"),
    [("full", "dcp"), ("full", "safetensors"), ("full", "local"), ("dcp", "full"), ("scattered", "dcp")],
)
def test_convert(benchmark, sources, tmp_path, source, to):
    """Written and read back; MB/s counts the checkpoint once."""

    def run():
        command = [sys.executable, "-c", _CONVERT, str(sources[source]), str(tmp_path / "out"), to]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    seen = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info["peak resident MB"] = round(seen["peak"] / 1e6)
    benchmark.extra_info["MB/s"] = round(seen["bytes"] / 1e6 / seen["seconds"])
    print(f"{source} -> {to}: {benchmark.extra_info}")
    assert seen["bytes"] > 5e8
    assert seen["peak"] < BOUND
