"""shardkit side by side with stock FSDP2, FSDP1, DDP and the same computation without any communication.

    python benchmarks/compare.py                                    every configuration of benchmarks/METHOD.md
    python benchmarks/compare.py --model gpt-34m --world-size 2     one of them
    python benchmarks/compare.py --save                             and the results are kept in benchmarks/results
    python benchmarks/compare.py --model gpt-6m --world-size 4 --optimizer muon --systems shardkit,fsdp2,alone
    sudo python benchmarks/compare.py --model gpt-6m --world-size 4 --link 1gbit --systems shardkit,fsdp2

All systems of a configuration train at once, in processes of their own, and are timed in turn (A B C A B C ...), so
that whatever else the machine does meets all of them alike. See benchmarks/METHOD.md.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from side_by_side.crew import CrewFailure
from side_by_side.link import RATES, NoLink
from side_by_side.networks import OPTIMIZERS, WORKLOADS
from side_by_side.ratios import Row, absolute_table, ratio_table, rows_of
from side_by_side.run import Disagreement, Settings, compare
from side_by_side.surroundings import load, surroundings
from side_by_side.systems import COMPARED, ON_GPUS, SYSTEMS

RESULTS = Path(__file__).parent / "results" / "compare"
# Workloads and world sizes that are compared if none is given, by optimizer.
CONFIGURATIONS = {
    "adamw": [
        *(("gpt-34m", 2), ("gpt-34m-bf16", 2), ("gpt-34m", 4), ("deep-narrow", 1), ("deep-narrow", 2)),
        *(("lora", 2), ("uneven", 2), ("moe-like", 2)),
    ],
    "muon": [("gpt-6m", 2), ("gpt-6m", 4)],
}


def main() -> int:
    """Run every configuration asked for; 1 if systems disagree, one failed or none could run."""
    args = _arguments()
    runs: list[dict[str, Any]] = []
    for workload, world_size in _configurations(args):
        if args.device == "cuda" and world_size > (gpus := torch.cuda.device_count()):
            print(f"{workload}: skipped, as NCCL needs a GPU for each of {world_size} ranks; there are {gpus}")
            continue
        how = {name: getattr(args, name) for name in ("device", "rounds", "steps", "warmup")}
        try:
            settings = Settings(
                workload, world_size, tuple(args.systems), **how, optimizer=args.optimizer, link=args.link
            )
            runs.append(_run(settings))
        except (CrewFailure, Disagreement, NoLink, ValueError) as error:
            print(f"{workload}, {world_size} ranks: {error}", file=sys.stderr)
            return 1
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        if args.save:
            _save(runs[-1])
    return 0 if runs else 1


def _save(run: dict[str, Any]) -> None:
    """Writes a run to the one file of its configuration, in place of the run before; git keeps the history."""
    settings = run["settings"]
    configuration = [settings["workload"], settings["world_size"], settings["device"], settings["systems"][0]]
    configuration += [settings[name] for name in ("optimizer", "link") if settings[name] not in ("adamw", None)]
    (RESULTS / f"{'_'.join(map(str, configuration))}.json").write_text(json.dumps(run, indent=1) + "\n")


def _run(settings: Settings) -> dict[str, Any]:
    facts = surroundings(settings.device, settings.optimizer, settings.link)
    measured = compare(settings, lambda text: print(text, file=sys.stderr, flush=True))
    facts["load_after"] = load()
    rows = rows_of(measured, settings.device)
    _print(settings, facts, rows)
    return {
        "surroundings": facts,
        "settings": dataclasses.asdict(settings),
        "rows": [dataclasses.asdict(row) for row in rows],
        "measured": {name: dataclasses.asdict(one) for name, one in measured.items()},
    }


def _print(settings: Settings, facts: dict[str, Any], rows: list[Row]) -> None:
    first, *others = settings.systems
    print(f"\n{settings.workload}, {settings.world_size} ranks, {settings.rounds} rounds of {settings.steps} steps")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print("\n" + absolute_table(rows, settings.systems))
    if others:
        print("\n" + ratio_table(rows, first, others))
    sys.stdout.flush()


def _configurations(args: argparse.Namespace) -> list[tuple[str, int]]:
    if args.model is not None:
        return [(args.model, args.world_size or 2)]
    every = CONFIGURATIONS[args.optimizer]
    if args.device == "cuda":  # a model that fills the GPUs, and one that the host bounds
        every = [("llama-1b", max(1, torch.cuda.device_count())), ("deep-narrow", 1)]
    return [(model, world) for model, world in every if args.world_size in (None, world)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", choices=WORKLOADS, help="default: those of benchmarks/METHOD.md; on GPUs a large and a deep model"
    )
    parser.add_argument("--world-size", type=int, help="default: 2, or all of those")
    parser.add_argument(
        "--systems",
        type=_systems,
        help=f"of {','.join(SYSTEMS)}; first / others (the first {len(COMPARED)}, on GPUs {len(ON_GPUS)})",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--link", choices=RATES, help="halves of the ranks in two network namespaces (needs root)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each system (7)")
    parser.add_argument("--steps", type=int, default=3, help="steps timed in a turn (3)")
    parser.add_argument("--warmup", type=int, default=2, help="turns before anything counts (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--save", action="store_true", help="keep each run in benchmarks/results/compare")
    args = parser.parse_args()
    if args.systems is None:
        args.systems = list(COMPARED if args.device == "cpu" else ON_GPUS)
    return args


def _systems(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SYSTEMS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SYSTEMS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
