"""The contents of a report: version 1 of the schema, as dataclasses. docs/how-to/profile.md describes the JSON.

All times are in seconds since the recording began on the first rank to begin, all sizes in bytes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

SCHEMA = "shardkit.report"
VERSION = 1

CollectiveKind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce"]
Phase: TypeAlias = Literal["forward", "backward", "optimizer", "other"]

CATEGORIES = (
    "sharded_parameters",
    "unsharded_parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "other",
)
"""Of memory, in the order of charts. `activations` are tensors that autograd saved for backward, inputs included;
`other` are the model's buffers."""


@dataclass(frozen=True)
class Run:
    """The environment of the recorded run.

    `clock`: "host" if all ranks read one clock, "wall" if their hosts' clocks were compared. `missing_ranks` left no
    record. `activations`: whether tensors saved by autograd were counted.
    """

    created: str
    command: list[str]
    shardkit: str
    torch: str
    python: str
    device: str
    backend: str
    world_size: int
    missing_ranks: list[int]
    recorded_steps: int
    clock: Literal["host", "wall"]
    activations: bool


@dataclass(frozen=True)
class Group:
    """A process group that collectives ran on: global ranks in the group's order."""

    name: str
    ranks: list[int]


@dataclass(frozen=True)
class PlaceOfRank:
    """The process of a rank.

    `boot` identifies a host and its boot; after a "/" follows the container, if it has a process namespace.
    """

    host: str
    boot: str
    pid: int

    @staticmethod
    def of_this_process() -> PlaceOfRank:
        host = socket.gethostname()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return PlaceOfRank(host, f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}", os.getpid())
        except OSError:
            return PlaceOfRank(host, host, os.getpid())


@dataclass(frozen=True)
class Step:
    """One step: from a root forward to the next one that follows an optimizer step.

    `forward`, `backward` and `optimizer` are the times of the parts. `exposed` is the time spent waiting for
    communication and on local work with arrived data; `blocked` is the idle part of it. `launch` is the host's time to
    start communication.
    """

    index: int
    begin: float
    end: float
    forward: float
    backward: float
    optimizer: float
    exposed: float
    blocked: float
    launch: float


@dataclass
class Operation:
    """One collective as seen by one rank; created while the rank's log is read, and constant after that.

    `number` counts the collectives of its kind on its group, equally on all ranks. `end` is when the rank saw that it
    was done, on a CPU possibly only when it needed the result; `end_seen` says that it was waiting then, so that `end`
    is the true end. `moving` is local work that moved the data (shared memory), 0 if the network did. `waited_by` is
    the module that waited.
    """

    kind: CollectiveKind
    fqn: str
    phase: Phase
    step: int
    group: int
    number: int
    bytes: int
    wire_bytes: int
    padding_bytes: int
    dtype: str
    transport: str
    start: float
    end: float
    end_seen: bool
    exposed: float
    blocked: float
    moving: float
    launch: float
    waited_by: str


@dataclass(frozen=True)
class Wait:
    """A wait without a collective: for peers to read this rank's shards ("release"), or for set-up."""

    operation: str
    fqn: str
    module: str
    phase: Phase
    step: int
    begin: float
    seconds: float


@dataclass(frozen=True)
class Span:
    """A module in a phase ("forward", "backward", "recompute"), or the "optimizer" (with an empty `fqn`)."""

    fqn: str
    phase: str
    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class ModuleOfRank:
    """A sharded module on one rank: how often its parameters had been prefetched, and its peaks of memory.

    `holders` are the classes of the modules that hold its parameters, such as "Linear".
    """

    fqn: str
    holders: list[str]
    prefetch_hits: int
    prefetch_misses: int
    unsharded_peak: int
    gradients_peak: int
    communication_peak: int
    activations_peak: int


@dataclass(frozen=True)
class Series:
    """A quantity over time: `values[i]` from `times[i]` on. Raises ValueError unless both have one length."""

    times: list[float]
    values: list[int]

    def __post_init__(self) -> None:
        if len(self.times) != len(self.values):
            raise ValueError(f"a series has {len(self.times)} times and {len(self.values)} values; expected as many")


@dataclass(frozen=True)
class MemoryOfRank:
    """Memory over time. `categories` are counted tensors by `CATEGORIES`; `resident` is counted by the system.

    `modules` is memory that comes and goes with each sharded module: its unsharded parameters, gradients in flight,
    communication buffers, and tensors saved in its forward; names in brackets are outside of modules. `peak` is the
    largest sum of the categories, at `peak_time`, in module `peak_module` and its `peak_phase`, composed of
    `peak_categories`. Raises ValueError for missing categories.
    """

    categories: dict[str, Series]
    modules: dict[str, Series]
    resident: Series
    peak: int
    peak_time: float
    peak_module: str
    peak_phase: str
    peak_categories: dict[str, int]
    resident_peak: int

    def __post_init__(self) -> None:
        for what in ("categories", "peak_categories"):
            if missing := set(CATEGORIES) - set(getattr(self, what)):
                raise ValueError(f"{what} lack {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class Overhead:
    """The cost of recording on this rank: `seconds`, their `share` of the recorded time (0 to 1), entries written."""

    seconds: float
    share: float
    entries: int


@dataclass(frozen=True)
class Rank:
    """All data of one rank. `shard_bytes` are the bytes of its shards by group label.

    `owned` are bytes of parameters on `Owned` placements by FQN, 0 for those of other owners. `capacity` is the memory
    of the rank's device, or on a CPU of its host, which its ranks share; 0 if not known.
    """

    rank: int
    place: PlaceOfRank
    begin: float
    end: float
    truncated: bool
    steps: list[Step]
    operations: list[Operation]
    waits: list[Wait]
    spans: list[Span]
    modules: list[ModuleOfRank]
    memory: MemoryOfRank
    shard_bytes: dict[str, int]
    overhead: Overhead
    owned: dict[str, int] = field(default_factory=dict)
    capacity: int = 0


@dataclass(frozen=True)
class Collective:
    """All operations of one kind, FQN, phase and group, over all steps and ranks.

    `count` is their number on each rank. `exposed` is in seconds per step, of the rank that waited longest;
    `exposed_by_skew` is the part of it before the last rank came. `skew` is the mean time from the first rank's start
    to the last one's; `last` counts how often each rank came last by more than a tenth of a millisecond.
    `algorithm_bandwidth` is in bytes per second from the last rank's start to the end; `bus_bandwidth` is that per link
    (times (n-1)/n, for all-reduce 2(n-1)/n). Both are null if no rank saw the end.
    """

    kind: CollectiveKind
    fqn: str
    phase: Phase
    group: int
    transport: str
    dtype: str
    count: int
    bytes: int
    wire_bytes: int
    padding_bytes: int
    exposed: float
    exposed_by_skew: float
    waited_by: str
    skew: float
    last: dict[str, int]
    algorithm_bandwidth: float | None
    bus_bandwidth: float | None


@dataclass(frozen=True)
class Estimate:
    """The prediction for the same run, to compare with the measurement. Null: not predicted."""

    source: str
    peak_memory: int | None
    resident_memory: int | None
    step_time: float | None
    exposed: float | None
    wire_bytes: int | None
    collectives: int | None
    categories: dict[str, int]


@dataclass(frozen=True)
class Report:
    """A run: records of all ranks and figures over them; `notes` are for the reader. Raises ValueError if invalid."""

    schema: str
    version: int
    run: Run
    groups: list[Group]
    ranks: list[Rank]
    collectives: list[Collective]
    notes: list[str]
    estimate: Estimate | None

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("there are no ranks; expected at least one")
        if any(not group.ranks for group in self.groups):
            raise ValueError("a group has no ranks")
        used = [one.group for rank in self.ranks for one in rank.operations]
        if any(not 0 <= group < len(self.groups) for group in (*used, *(one.group for one in self.collectives))):
            raise ValueError(f"an operation is of a group that is none of the {len(self.groups)} groups")
