"""The main job, killed at random moments and started again by torchrun: `python -m tests.faults.main_job [--kills N]`.

The job ends with the same checkpoint, to the last bit, and the same losses as one that nothing disturbed, or this ends
with 1. SIGKILL ends one rank or both.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from shardkit.core.checkpoint.command import main as checkpoint
from tests.faults.job import WORLD

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lm"
FLAGS = [
    *("--device=cpu", "--layers=2", "--width=64", "--heads=2", "--context=64", "--batch=2", f"--nproc={WORLD}"),
    *("--val-every=100", "--save-every=5", "--sample=0"),
]


def start(out: Path, steps: int, restarts: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(EXAMPLE), *FLAGS, f"--steps={steps}", f"--out={out}", f"--restarts={restarts}"]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def ranks_of(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(job.pid).children()
    return [one for one in children if any(part.endswith("train.py") for part in one.cmdline())]


def disturb(job: subprocess.Popen[bytes], out: Path, kills: int, generator: random.Random) -> list[str]:
    """Kill the given number of times, each time a random while after the ranks have begun to train again."""
    done: list[str] = []
    seen: set[int] = set()
    while job.poll() is None and len(done) < kills:
        try:
            ranks = ranks_of(job)
            fresh = len(ranks) == WORLD and not seen & {one.pid for one in ranks}
            if not fresh or not trains(out, seen=bool(done)):
                time.sleep(0.02)
                continue
            time.sleep(generator.uniform(0, 2.5))
            victims = ranks if generator.random() < 0.3 else [generator.choice(ranks)]
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)
        except (psutil.Error, ProcessLookupError):
            continue
        seen |= {one.pid for one in ranks}
        steps = [int(path.name[5:]) for path in (out / "checkpoints").glob("step-??????")]
        done.append(f"{len(victims)} rank(s), newest checkpoint {max(steps, default=0)}")
        print(f"kill {len(done)}: {done[-1]}", flush=True)
        mark(out)
    return done


def mark(out: Path) -> None:
    """Remember how far the file of losses was, to see when the next attempt writes to it."""
    (out.parent / "mark").write_text(str((out / "metrics.jsonl").stat().st_mtime_ns))


def trains(out: Path, seen: bool) -> bool:
    metrics = out / "metrics.jsonl"
    if not metrics.exists():
        return False
    return not seen or str(metrics.stat().st_mtime_ns) != (out.parent / "mark").read_text()


def losses(out: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(one["step"], one["train_loss"]) for one in records if "train_loss" in one]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="main-job-") as name:
        out = Path(name) / "undisturbed"
        assert start(out, options.steps, 0).wait() == 0
        other = Path(name) / "killed"
        job = start(other, options.steps, options.kills)
        kills = disturb(job, other, options.kills, random.Random(options.seed))
        code = job.wait()
        same = code == 0 and losses(out) == losses(other)
        same = same and checkpoint(["diff", str(out / "checkpoints"), str(other / "checkpoints")]) == 0
        names = sorted(path.name for path in (other / "checkpoints").iterdir())
    print(f"{len(kills)} kills; exit code {code}; {'the same to the last bit' if same else 'DIFFERENT'}; left: {names}")
    raise SystemExit(not same or len(kills) < options.kills)


if __name__ == "__main__":
    main()
