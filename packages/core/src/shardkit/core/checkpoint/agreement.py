"""Exchange between ranks: small objects to agree on, bytes of tensors, and errors, so that no rank waits for another.

They also compare values. One rank writes a plain value for all ranks, so stages of a pipeline whose modules share
names would all be restored as the first, and so would optimizer state that a custom optimizer keeps for each rank's
shard. Buffers are not compared: running statistics may differ between ranks, and the first rank's are kept, as in
stock. Nor are values of `user` that are not DTensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.leaves import MODEL, OPTIMIZER, SCHEDULER, Captured, LeafPath, name_of
from shardkit.core.checkpoint.plan import boxes_of, is_in_group
from shardkit.core.digests import number_of, numbers_of
from shardkit.core.mesh import groups_of_copies
from shardkit.core.runtime.collective import agree
from shardkit.core.tensors import bytes_of

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """The ranks of one process group, or this process alone where torch.distributed is not initialised.

    Ranks are group ranks throughout. Objects travel by pickle, between the processes of one job only.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Peers:
        """The ranks of `group`, or of the default group."""
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls(None, 0, 1)
        group = group or dist.group.WORLD
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def gather(self, item: T) -> list[T] | None:
        """Every rank's item on rank 0, None elsewhere. Collective."""
        if self.size == 1:
            return [item]
        items: list[T] | None = cast(list[T], [None] * self.size) if self.rank == 0 else None
        dist.gather_object(item, items, group=self.group, group_dst=0)
        return items

    def from_rank0(self, item: T | None) -> T:
        """Rank 0's item on every rank. Collective."""
        box = [item]
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return cast(T, box[0])

    def device_for(self, device_type: str) -> torch.device:
        """The device that tensors must be on to be sent, for tensors on `device_type`.

        gloo sends only CPU memory between two ranks, so tensors on an accelerator go through CPU memory.
        """
        backends = dict(part.split(":", 1) for part in dist.get_backend_config(self.group).split(",") if ":" in part)
        if backends.get(device_type, "gloo") == "gloo" and "cpu" in backends:
            return torch.device("cpu")
        chosen = device_type if device_type in backends else next(iter(backends), device_type)
        if chosen == "cpu":
            return torch.device("cpu")
        return torch.device(chosen, torch.get_device_module(chosen).current_device())

    def exchange(
        self, sends: Iterable[tuple[int, torch.Tensor]] = (), receives: Iterable[tuple[int, torch.Tensor]] = ()
    ) -> None:
        """Sends and receives contiguous tensors as bytes, so every dtype works. Returns when all transfers are done."""
        operations = [dist.P2POp(dist.isend, bytes_of(sent), group=self.group, group_peer=to) for to, sent in sends]
        operations += [dist.P2POp(dist.irecv, bytes_of(got), group=self.group, group_peer=by) for by, got in receives]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copies rank 0's contiguous tensor to every rank, in place. Collective."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(bytes_of(tensor), group=self.group, group_src=0)


def highest(peers: Peers, values: list[int]) -> list[int]:
    """The highest of each number over the ranks (int64). Collective, one small all-reduce."""
    if peers.size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=peers.device_for("cpu"))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=peers.group)
    return cast(list[int], tensor.tolist())


def gather_everywhere(peers: Peers, item: T) -> list[T]:
    """Every rank's item on every rank; for rare use. Collective."""
    items = [item] * peers.size
    if peers.size > 1:
        dist.all_gather_object(items, item, group=peers.group)
    return items


def raise_together(peers: Peers, error: Exception | None, what: str) -> None:
    """Raises on every rank if any rank passes an error, else returns. Collective.

    Raises DamagedCheckpointError if all errors are of that class, else CheckpointError. The message names the ranks
    that failed and the reason of the first.
    """
    if highest(peers, [int(error is not None)]) == [0]:
        return
    mine = None if error is None else (isinstance(error, DamagedCheckpointError), _text(error))
    failed = {rank: one for rank, one in enumerate(gather_everywhere(peers, mine)) if one is not None}
    first = min(failed)
    ranks = "" if peers.size == 1 else f" on rank{'s' * (len(failed) > 1)} {', '.join(map(str, sorted(failed)))}"
    kind = DamagedCheckpointError if all(damaged for damaged, _ in failed.values()) else CheckpointError
    raise kind(f"{what} failed{ranks}: {failed[first][1]}") from error


def _text(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or 'while writing'})"
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Box:
    """A box of a tensor, or another value; two ranks that hold the same box should hold the same values."""

    path: LeafPath
    look: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Fingerprints = dict[Box, int]


def replicas_agree(captured: Captured, peers: Peers) -> bool:
    """Whether ranks that hold copies of one another's parts of parameters and other state hold the same values.

    All ranks must be alike in names and layouts. Collective.
    """
    copied: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
    state = (path for path in captured.shared.values if path[0] != MODEL)
    for path in (*captured.parameters, *state):
        value = captured.shared.values.get(path)
        if isinstance(value, DTensor):
            for group in groups_of_copies(value):
                copied[group] += [part for _, _, part in boxes_of(path, value) if type(part) is torch.Tensor]
    agreed = [
        agree(repr(numbers_of(parts)).encode(), group, Peers.of(group).device_for("cpu"))
        for group, parts in copied.items()
    ]
    return highest(peers, [int(not all(agreed))]) == [0]


def fingerprints(captured: Captured, *, alike: bool) -> Fingerprints:
    """Fingerprints of plain parameters and of the plain values of optimizers and schedulers. Not collective.

    If not all ranks are `alike` in names and layouts, those of sharded parameters too, and of copies of other DTensors,
    but not those of parameter groups: a checkpoint keeps groups whose options differ.
    """
    boxes: list[Box] = []
    parts: list[torch.Tensor] = []
    found: Fingerprints = {}
    parameters = dict.fromkeys(captured.parameters)
    state = {
        path: None
        for path, value in captured.shared.values.items()
        if path[0] in (OPTIMIZER, SCHEDULER) or (path[0] != MODEL and isinstance(value, DTensor))
    }
    for path in parameters | state:
        value = captured.shared.values.get(path)
        if is_in_group(path) and not alike:
            continue
        if isinstance(value, DTensor) and (alike or (path not in parameters and not groups_of_copies(value))):
            continue
        if not isinstance(value, torch.Tensor):
            found[Box(path, type(value).__name__, (), ())] = number_of(_text_of(value).encode())
            continue
        if value.layout is not torch.strided or value.device.type == "meta":
            continue  # planning rejects it, with its name
        look = f"{value.dtype} {tuple(value.shape)}"
        for offsets, sizes, part in boxes_of(path, value):
            boxes.append(Box(path, look, offsets, sizes))
            parts.append(part)
    return found | dict(zip(boxes, numbers_of(parts), strict=True))


def _text_of(value: object) -> str:
    """The same text for equal values on all ranks; the order of a set differs from process to process."""
    return repr(sorted(map(repr, value))) if isinstance(value, set) else repr(value)


def digest_of(found: Fingerprints) -> int:
    """A 60-bit number for all fingerprints."""
    return number_of(repr(list(found.items())).encode())


_NAMES_DIFFER = (
    "; make replicas equal with shardkit.core.broadcast_replicas(model); give modules that differ from rank to rank "
    "names that differ, or put them into per_rank="
)
_SAME_STATE = "; make it equal on all ranks, keep state of a shard as a DTensor, or put what differs into per_rank="


def check_same(everyone: Sequence[Fingerprints], remedy: str = _NAMES_DIFFER) -> None:
    """Raises CheckpointError if two ranks hold different values of one parameter, or different parameters by one name.
    `everyone` has the fingerprints of each rank, by rank.
    """
    looks: dict[LeafPath, dict[str, list[int]]] = {}
    numbers: dict[Box, dict[int, list[int]]] = {}
    for rank, found in enumerate(everyone):
        for box, number in found.items():
            looks.setdefault(box.path, {}).setdefault(box.look, []).append(rank)
            numbers.setdefault(box, {}).setdefault(number, []).append(rank)
    for path, by_look in looks.items():
        if len(by_look) > 1:
            told = ", ".join(f"ranks {_listed(ranks)} {look}" for look, ranks in by_look.items())
            what = remedy if _is_of_model(path) else _SAME_STATE
            raise CheckpointError(f"{name_of(path)}: ranks hold different values under this name: {told}{what}")
    for box, by_number in numbers.items():
        if len(by_number) > 1:
            first, *others = by_number.values()
            what = remedy if _is_of_model(box.path) else _SAME_STATE
            odd = sorted(rank for ranks in others for rank in ranks)
            raise CheckpointError(
                f"{name_of(box.path)}: ranks {_listed(odd)} hold other values than ranks {_listed(first)} under this "
                f"name, and only those of rank {first[0]} would be kept{what}"
            )


def _is_of_model(path: LeafPath) -> bool:
    return path[0] == MODEL or len(path) == 1  # as in a full state dict


def _listed(ranks: Sequence[int]) -> str:
    unique = list(dict.fromkeys(ranks))
    return f"{unique[:8]}" if len(unique) <= 8 else f"{unique[:8]} and {len(unique) - 8} more"
