"""What it costs that glibc maps large blocks one by one, as plans have it, against the heap that it learns to use.

    python benchmarks/mapped_blocks.py --ranks 2 --seconds 60 --threshold 262144

The same processes train under both settings in turn (`benchmarks/pairs.py` says how): a threshold that no tensor
reaches, as glibc learns it, which gives back no more than it would then; and the one that is asked for. Resident memory
is the most that the kernel saw during the timed steps, on rank 0.
"""

import argparse
import ctypes
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_profiler import training_step
from benchmarks.estimate_accuracy import resident
from benchmarks.pairs import compared, on_ranks, rounds, timed_block

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LEARNT = 32 * 2**20


def steps_in_turn(rank: int, ranks: int, seconds: float, threshold: int, trim: int) -> dict:
    torch.set_num_threads(1)
    glibc = ctypes.CDLL(None)
    _, _, step = training_step(ranks)
    for _ in range(3):
        step()
    blocks, held = [], {False: [], True: []}
    for mapped in rounds(seconds):
        glibc.mallopt(M_MMAP_THRESHOLD, threshold if mapped else LEARNT)
        glibc.mallopt(M_TRIM_THRESHOLD, trim if mapped else 2 * LEARNT)
        glibc.malloc_trim(0)
        resident(reset=True)
        blocks.append(timed_block(step))
        held[mapped].append(resident())
    return {"blocks": blocks, "held": [statistics.median(held[mapped]) for mapped in (False, True)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threshold", type=int, default=256 * 1024)
    parser.add_argument("--trim", type=int, default=128 * 1024, help="free bytes at the end of the heap that may stay")
    options = parser.parse_args()
    found = on_ranks(steps_in_turn, options.ranks, options.seconds, options.threshold, options.trim)
    heap, mapped = (held / 2**20 for held in found[0]["held"])
    result = compared([one["blocks"] for one in found])
    print(f"blocks from {options.threshold} bytes on: {result}; resident {heap:.0f} MiB -> {mapped:.0f} MiB")


if __name__ == "__main__":
    main()
