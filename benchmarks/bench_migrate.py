"""Offline conversion in a process of its own: its memory, its MB/s, its CPU time. A checkpoint of 1 GB (256 tensors of
4 MB), and one tensor of 512 MB whose rows lie scattered over the file. LOCAL files are of four ranks and one flat
parameter, with use_orig_params=True ("local") and False ("flat"); two-dimensional ones of 2 x 2 ranks with a quarter of
each tensor.

The bound on resident memory, 600 MB with everything that Python and torch take (about 250 MB), is asserted.
"""

import functools
import json
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from tests.support import rank_mesh, run_ranks

TENSORS, ROWS, COLUMNS = 256, 1000, 1000
BOUND = 600e6

_CONVERT = f"""
import json, re, sys, time
from pathlib import Path
from shardkit.legacy_fsdp_compat.migrate import LocalRanks, Wrapping, convert, open_checkpoint
source, target, to = sys.argv[1:]
shapes = {{f"layer.{{number}}.weight": ({ROWS}, {COLUMNS}) for number in range({TENSORS})}}
start, cpu = time.perf_counter(), time.process_time()
checkpoint = open_checkpoint(source, shapes if Path(source).name in ("local", "flat") else None)
wrapping = Wrapping(shapes, {{"": (None,)}}, frozenset(), to == "local")
ranks = LocalRanks(4, wrapping) if to in ("local", "flat") else None
convert(checkpoint, target, "local" if ranks else to, ranks=ranks)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
# Not ru_maxrss: that of a child begins with its parent's.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({{"seconds": seconds, "cpu": cpu, "peak": peak, "bytes": checkpoint.nbytes}}))
"""


def run(source, target, to):
    """One conversion in a process of its own."""
    command = [sys.executable, "-c", _CONVERT, str(source), str(target), to]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Gives the checkpoint in one of the forms that are read differently, made at its first use."""
    directory = tmp_path_factory.mktemp("migrate")

    @functools.cache
    def made(name):
        path = directory / name
        if name == "full":
            torch.save({f"layer.{number}.weight": torch.randn(ROWS, COLUMNS) for number in range(TENSORS)}, path)
        elif name == "scattered":
            torch.save({"weight": torch.randn(16_000, 8_000).t()}, path)
        elif name == "two-dimensional":
            path.mkdir()
            run_ranks(4, write_two_dimensional, path)
        else:
            run(made("full"), path, name)
        return path

    return made


def write_two_dimensional(rank, world_size, directory):
    """A rank's file, as FSDP1 over tensor parallelism saves SHARDED."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    quarters = (torch.randn(ROWS // 2, COLUMNS // 2) for _ in range(TENSORS))
    values = {
        f"layer.{number}.weight": DTensor.from_local(quarter, mesh, (Shard(0), Shard(1)), run_check=False)
        for number, quarter in enumerate(quarters)
    }
    torch.save(values, directory / f"rank{rank}.pt")


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("full", "dcp"),
        ("full", "safetensors"),
        ("dcp", "full"),
        ("scattered", "dcp"),
        ("full", "local"),
        ("full", "flat"),
        ("local", "dcp"),
        ("flat", "dcp"),
        ("two-dimensional", "dcp"),
    ],
)
def test_convert(benchmark, sources, tmp_path, source, to):
    """Written and read back; MB/s counts the checkpoint once."""
    seen = benchmark.pedantic(run, (sources(source), tmp_path / "out", to), rounds=1)
    benchmark.extra_info["peak resident MB"] = round(seen["peak"] / 1e6)
    benchmark.extra_info["CPU s"] = round(seen["cpu"], 1)
    benchmark.extra_info["MB/s"] = round(seen["bytes"] / 1e6 / seen["seconds"])
    print(f"{source} -> {to}: {benchmark.extra_info}")
    assert seen["bytes"] > 5e8
    assert seen["peak"] < BOUND
