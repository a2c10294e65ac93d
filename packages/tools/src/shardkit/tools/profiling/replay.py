"""From a recorder's log to the record of its rank."""

from __future__ import annotations

import datetime as dt
import os
import platform
import socket
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch

from shardkit.core import __version__
from shardkit.core.events import PrefetchHit, PrefetchMiss
from shardkit.tools.profiling.log import Entry
from shardkit.tools.profiling.memory import Memory
from shardkit.tools.profiling.operations import DeviceClock, Operations
from shardkit.tools.profiling.recorder import Recorder
from shardkit.tools.profiling.spans import Spans
from shardkit.tools.profiling.whereabouts import Whereabouts, last_complete
from shardkit.tools.report.record import RankRecord
from shardkit.tools.report.schema import ModuleOfRank, Overhead, PlaceOfRank, Rank, Run

__all__ = ["record_of"]


def record_of(recorder: Recorder, *, activations: bool) -> RankRecord:
    """What a recorder that has stopped makes known. Not collective.

    What comes after the last optimizer step is left out: it is no whole step. There are no steps if the recording ended
    within its warm-up, or before a root's forward had ended.
    """
    overhead = recorder.overhead
    entries = recorder.entries
    complete = last_complete(entry for _, entry in entries)
    end = recorder.ended
    if complete is not None and not recorder.full:
        entries = entries[:complete]
        end = entries[-1][0]
    clock = None if recorder.anchor is None else DeviceClock(recorder.anchor)
    operations, spans, memory = Operations(clock, recorder.groups), Spans(), Memory(entry for _, entry in entries)
    prefetches = _replay(entries, complete is not None, operations, spans, memory)
    steps = spans.steps(0.0, recorder.began, end, operations.launches) if recorder.warm else []
    rank = Rank(
        rank=recorder.world.rank,
        place=_place(),
        begin=recorder.began,
        end=end,
        truncated=recorder.truncated,
        steps=steps,
        operations=operations.operations(0.0),
        waits=operations.waits,
        spans=spans.spans,
        modules=_modules(prefetches, memory, recorder.holders),
        memory=memory.result(0.0),
        shard_bytes=_by_module(recorder.shards, memory),
        overhead=Overhead(overhead, overhead / max(recorder.ended - recorder.began, 1e-9), len(recorder.entries)),
    )
    run = _run(recorder, len(steps), activations=activations)
    return RankRecord.of(run, time.time() - time.perf_counter(), operations.groups, rank)


def _replay(
    entries: list[tuple[float, Entry]], trains: bool, operations: Operations, spans: Spans, memory: Memory
) -> Counter[tuple[str, type]]:
    where = Whereabouts(trains)
    prefetches: Counter[tuple[str, type]] = Counter()
    for now, entry in entries:
        new_step = where.follow(entry)
        operations.follow(now, entry, where)
        spans.follow(now, entry, where, new_step=new_step)
        memory.follow(now, entry, where)
        if isinstance(entry, PrefetchHit | PrefetchMiss):
            prefetches[entry.fqn, type(entry)] += 1
    return prefetches


def _by_module(shards: dict[str, int], memory: Memory) -> dict[str, int]:
    held: Counter[str] = Counter()
    for fqn, size in shards.items():
        held[memory.owner(fqn)] += size
    return dict(held)


def _modules(prefetches: Counter[tuple[str, type]], memory: Memory, holders: dict[str, str]) -> list[ModuleOfRank]:
    of_module: dict[str, set[str]] = defaultdict(set)
    for fqn, holder in holders.items():
        of_module[memory.owner(fqn)].add(holder)
    names = dict.fromkeys([*memory.module_peaks, *(fqn for fqn, _ in prefetches)])
    return [
        ModuleOfRank(
            fqn=name,
            holders=sorted(of_module[name]),
            prefetch_hits=prefetches[name, PrefetchHit],
            prefetch_misses=prefetches[name, PrefetchMiss],
            unsharded_peak=memory.module_peaks[name]["unsharded_parameters"],
            gradients_peak=memory.module_peaks[name]["gradients"],
            communication_peak=memory.module_peaks[name]["communication"],
            activations_peak=memory.module_peaks[name]["activations"],
        )
        for name in names
    ]


def _run(recorder: Recorder, steps: int, *, activations: bool) -> Run:
    return Run(
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command=list(sys.argv),
        shardkit=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=_device_name(recorder.device),
        backend=recorder.world.backend,
        world_size=recorder.world.size,
        missing_ranks=[],
        recorded_steps=steps,
        clock="host",
        activations=activations,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type


def _place() -> PlaceOfRank:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return PlaceOfRank(socket.gethostname(), boot, os.getpid())
