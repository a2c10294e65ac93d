"""The most bytes of tensors that a rank holds in a step: shardkit and stock FSDP2, into `results/tensors.json`.

    python benchmarks/tensor_peaks.py                    the configurations that `results/compare` has
    python benchmarks/tensor_peaks.py --model gpt-34m --world-size 2

Counts every storage that an operator has taken or returned, while it lives, after every operator; memory that ranks
share counts on the rank that owns it. So neither the allocator nor what else the machine does changes a figure.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from side_by_side.networks import WORKLOADS
from side_by_side.rank import Assignment, Trainer
from side_by_side.surroundings import surroundings

from tests.support import run_ranks
from tests.tools.measured import Meter

RESULTS = Path(__file__).parent / "results"
SAVED = RESULTS / "tensors.json"
STEPS = 3


def peak_of_a_rank(rank: int, world_size: int, system: str, workload: str) -> int:
    """Bytes, in the last of three steps."""
    torch.set_num_threads(1)
    with Meter() as meter:
        meter.looking = False  # adding up is slow
        trainer = Trainer(Assignment(system, workload, "adamw", rank, world_size, "cpu", "", None))
        trainer.first_steps(STEPS - 1)
        meter.looking = True
        trainer.turn(1)
    return meter.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=WORKLOADS)
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    saved: list[dict[str, Any]] = json.loads(SAVED.read_text())["runs"] if SAVED.exists() else []
    of = {(run["workload"], run["world_size"]): run for run in saved}
    wanted = [(options.model, options.world_size)]
    if options.model is None:
        settings = [json.loads(path.read_text())["settings"] for path in sorted((RESULTS / "compare").glob("*.json"))]
        wanted = [(one["workload"], one["world_size"]) for one in settings if one.get("link") is None]
    for workload, world_size in wanted:
        peaks = {
            system: max(run_ranks(world_size, peak_of_a_rank, system, workload, timeout=600.0, isolated=True))
            for system in ("shardkit", "fsdp2")
        }
        of[workload, world_size] = {"workload": workload, "world_size": world_size, "peaks": peaks}
        print(workload, world_size, {system: f"{peak / 2**20:.1f} MiB" for system, peak in peaks.items()}, flush=True)
    facts = surroundings("cpu", "adamw", None)
    facts = {name: facts[name] for name in ("date", "python", "torch", "commit")}
    runs = [of[key] for key in sorted(of)]
    SAVED.write_text(json.dumps({"surroundings": facts, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    # The ranks find functions by the name of this module, not as part of a script.
    from benchmarks import tensor_peaks

    tensor_peaks.main()
