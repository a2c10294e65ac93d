"""One rank of a job: joins its world, runs the job's checks in order and writes a line of JSON before and after each.

    python -m tests.gpu.rank JOB.json RANK
    python -m tests.gpu.rank --facts           prints what the machine has, as JSON

A failed comparison leaves the ranks in step, so the next check goes on. Any other error ends the process.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)

_MEETING = timedelta(seconds=60)


def facts() -> dict[str, Any]:
    """The GPU and the versions; `gpu` is None where there is none."""
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "gpu_bytes": properties.total_memory}
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def main() -> None:
    path, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads(path.read_text())
    lines = path.with_suffix(f".{rank}.lines").open("a", buffering=1)

    import torch.distributed as dist

    from tests.gpu.worlds import Skip, enter

    store = str(path.with_suffix(".store"))
    place = enter(job["kind"], rank, job["ranks"], store, Path(job["directory"]))
    meeting = dist.FileStore(store + ".meeting", place.world) if job["kind"] != "mirror" else None
    for check in job["checks"]:
        number = check["number"]
        if meeting is not None:
            meeting.set(f"{number}/{rank}", "here")
            meeting.wait([f"{number}/{other}" for other in range(place.world)], _MEETING)
        print(json.dumps({"check": number}), file=lines)
        print(f"-- {check['name']}", flush=True)
        began, state, note, figures, ends = time.perf_counter(), "ok", "", None, False
        try:
            module, _, name = check["function"].partition(":")
            figures = getattr(importlib.import_module(f"tests.gpu.{module}"), name)(place, *check["args"])
            if isinstance(figures, dict) and "wrong" in figures:
                state, note = "failed", figures.pop("wrong")
        except Skip as why:
            state, note = "skipped", str(why)
        except Exception as error:  # noqa: BLE001 (whatever it is, the row says it)
            state, note, ends = "failed", f"{type(error).__name__}: {error}", not isinstance(error, AssertionError)
            traceback.print_exc()
        told = {"check": number, "state": state, "note": note[:4000], "figures": figures, "ends": ends}
        print(json.dumps(told | {"seconds": round(time.perf_counter() - began, 2)}), file=lines)
        if ends:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # an orderly end could wait for the other ranks
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["--facts"]:
        print(json.dumps(facts()))
    else:
        main()
