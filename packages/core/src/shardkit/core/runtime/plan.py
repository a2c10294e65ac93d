"""Plans, and the transports that run them: which items are sent in place or packed, and where everything lies.

Note [In-place gather]: item `i` is gathered into a flat tensor with one slot for each rank. If dim 0 is cut, the
concatenated slots are the unsharded tensor (a prefix of it, if padded). A rank writes its chunk into its slot, the
others' chunks arrive in theirs, and nothing is copied. Items cut on another dim have no such slots, and a separate
message does not pay for small items; both go through one packed buffer and are copied out of it.

A plan is made once, by all ranks alike, and used at every step; programs find every size and offset in it. The
transport for which it was made runs it: `plan.transport.gather(plan, ...)` and `plan.transport.reduce(plan, ...)`.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.events import StorageKind
from shardkit.core.runtime.lanes import Program, Reduction
from shardkit.core.runtime.packing import Packing, Place, pack, shaped
from shardkit.core.runtime.sharding import ChunkLayout, runs_together
from shardkit.core.runtime.storage import note_allocated

SMALL_BYTES = 32 * 1024
"""Chunks below this many bytes are packed: to copy them in and out costs about as much as a message of its own."""

_UNHEARD = contextlib.nullcontext()


@dataclass(frozen=True)
class ReduceItem:
    """One gradient to reduce: its parameter's FQN and how it is cut."""

    fqn: str
    layout: ChunkLayout


@dataclass(frozen=True)
class GatherItem(ReduceItem):
    """One parameter to gather, with its unsharded dtype."""

    dtype: torch.dtype
    compressible: bool = True


@dataclass(frozen=True)
class Mean:
    """How the ranks' terms become a mean, or whatever factor the user set.

    Attributes:
        op: SUM, or AVG (only without divisors) for the sum divided by the world size, or another operation that a
            collective backend knows.
        before: divides each term.
        after: divides the sum.
    """

    op: Any = dist.ReduceOp.SUM
    before: float | None = None
    after: float | None = None

    def as_sum(self, world_size: int) -> Mean:
        """The same for one who sums: AVG is a sum that is divided."""
        if self.op != dist.ReduceOp.AVG:
            return self
        assert self.before is None and self.after is None, "AVG takes no divisors"
        return Mean(after=float(world_size))

    def add_up(self, own: torch.Tensor, earlier: Iterable[torch.Tensor], later: Iterable[torch.Tensor]) -> None:
        """Makes this rank's `own` terms the result: SUM, with the terms of the ranks before and after it.

        Terms are like `own`, and are written to. Note [Rank order]: floating-point addition is not associative, so a
        sum in order of arrival would differ from run to run. It is `((t0 + t1) + t2) + ...`, in order of ranks.
        """

        def divided(term: torch.Tensor) -> torch.Tensor:
            return term if self.before is None else term.div_(self.before)

        divided(own)
        before_own: torch.Tensor | None = None
        for term in map(divided, earlier):
            before_own = term if before_own is None else before_own.add_(term)
        if before_own is not None:
            own.add_(before_own)
        for term in map(divided, later):
            own.add_(term)
        if self.after is not None:
            own.div_(self.after)


class Transport(ABC):
    """Moves the items of plans between the ranks of one process group: `collective`, `shared`, ...

    Attributes:
        name: its name in events.
        collective: whether the backend's collectives move the bytes. They take equal, padded rows and sum on the way,
            so small items, and items that have no such rows, are packed into one buffer. If not, every item goes
            direct, and gradients are sent without summing to their owner, which sums them.
        direct: whether collectives move a list of tensors in place in one launch; if not, plans pack everything.
        peers_read_shards: whether peers read this rank's shards in place, until `wait_until_read`.
    """

    name = "custom"
    collective = False
    direct = True
    peers_read_shards = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.world_size = group.size()

    @abstractmethod
    def gather(self, plan: GatherPlan, sources: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> Program:
        """The program that gathers `plan`'s items. Collective over the group, in launch order.

        `sources[i]` is this rank's chunk, of shape `items[i].layout.local_shape(rank)`, of any dtype (cast when
        written) and on any device. `flats[i]` is a 1-D tensor of `items[i].dtype` on the group's device, allocated, of
        `layout.flat_numel` elements if the item is cut on dim 0 and of `numel` if not. When the program is done,
        `flats[i][:numel].view(shape)` is the unsharded tensor; elements behind it are undefined.

        Where programs run on streams, the call allocates buffers, on the current stream: so there `gather` and `reduce`
        are functions that return a generator, and a program calls `note_sources_read` of lanes.py once it has read its
        sources, whose memory is used again, and `hold` for inputs of a reduction that its works read.
        """

    @abstractmethod
    def reduce(self, plan: ReducePlan, grads: list[torch.Tensor], mean: Mean) -> Reduction:
        """The program that reduces `plan`'s gradients. Collective over the group, in launch order.

        `grads[i]` is the full gradient, of shape `items[i].layout.shape` and of `grad_dtype`, of any strides; it is
        never written. Gradients that have to be packed are packed now, on the current stream, and dropped from the
        list, as stock does: they would take memory while the next ones are computed.

        The program returns `plan.allocate_output()`, filled: `plan.output_views(output)` are the reduced chunks, the
        sum over ranks in `reduce_dtype`, divided as `mean` says.
        """

    def registered_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Memory that is allocated inside is registered with the network, if the user asked for that."""
        return contextlib.nullcontext()

    def buffer(self, numel: int, dtype: torch.dtype, label: str, kind: StorageKind) -> torch.Tensor:
        """A 1-D buffer for packed items or gradients, or for the output of a reduction; events report it as `kind`."""
        with self.registered_memory():
            buffer = torch.empty(numel, dtype=dtype, device=self.device)
        note_allocated(buffer, label, kind)
        return buffer

    def gather_buffer_bytes(self, plan: GatherPlan) -> int:
        """Bytes that a running gather of `plan` takes besides the unsharded tensors."""
        return 0 if plan.packing is None else plan.packing.numel * plan.packed_dtype.itemsize

    def for_gather(self, items: Sequence[GatherItem]) -> Transport:
        """The best transport for gathering `items`: this one, or the one below it."""
        return self

    def for_reduction(
        self, items: Sequence[ReduceItem], wire_dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> Transport:
        """The best transport for gradients that would be sent in `wire_dtype` and are summed in `reduce_dtype`."""
        return self

    def wait_until_read(self) -> None:  # noqa: B027 - on a network nobody reads them
        """Waits until no peer reads this rank's shards in an operation that is over for this rank.

        Raises:
            RuntimeError: if a peer is gone, or does not come; has the name of the group that it was to read.
        """


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """How a group is gathered.

    `direct` holds indices of items that are gathered in place; `packing` is the packed buffer for the others, of dtype
    `packed_dtype`. `dtype` is the items' common dtype, or `torch.uint8` if they differ.

    `own_slots` are (item, start, numel, shape) of this rank's non-empty chunk in the flat tensor of each direct item,
    `own_row` the pieces of its row of the packed buffer. No chunk fills `slot_padding`, (item, start, numel).
    """

    items: tuple[GatherItem, ...]
    transport: Transport
    label: str
    rank: int
    direct: tuple[int, ...]
    packing: Packing | None
    packed_dtype: torch.dtype
    dtype: torch.dtype
    own_slots: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    own_row: tuple[Place, ...]
    slot_padding: tuple[tuple[int, int, int], ...]

    @cached_property
    def fqns(self) -> tuple[str, ...]:
        return tuple(item.fqn for item in self.items)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the unsharded tensors, without padding."""
        return sum(item.layout.numel * item.dtype.itemsize for item in self.items)

    @cached_property
    def wire_nbytes(self) -> int:
        """Bytes that this rank sends in one gather: its slot of every buffer, to each peer."""
        own = 0 if self.packing is None else self.packing.row_numel * self.packed_dtype.itemsize
        for item in (self.items[i] for i in self.direct):
            layout, padded = item.layout, self.transport.collective
            own += (layout.padded_local_numel if padded else layout.local_numel(self.rank)) * item.dtype.itemsize
        return own * (self.transport.world_size - 1)

    @cached_property
    def padding_nbytes(self) -> int:
        """Bytes after the unsharded tensors, and in the packed buffer, that hold no element."""
        cut = [(item.layout, item.dtype.itemsize) for item in self.items]
        behind = sum((layout.flat_numel - layout.numel) * size for layout, size in cut if layout.dim == 0)
        if self.packing is None:
            return behind
        packed = sum(cut[i][0].numel * cut[i][1] for i in self.packing.items)
        return behind + self.packing.numel * self.packed_dtype.itemsize - packed


@dataclass(frozen=True, eq=False)
class ReducePlan:
    """How a group's gradients are reduced.

    `direct` holds indices of gradients whose rows are sent to their owners in place; `packing` is the packed buffer for
    the others. Gradients have `grad_dtype`, are sent in `wire_dtype` and summed in `reduce_dtype`.

    The output is one flat tensor of `output_numel` elements, with the padding that a collective needs: this rank's
    chunks of the direct items, then its row of the packed ones. `places[i]` is (index in `output_sizes`, shape) of item
    `i`'s chunk. `direct_nbytes` are the bytes of the gradients that are sent in place.

    `members` are the items' places in their group. Ranks compare them to check that they reduce the same parameters,
    whose names may differ.
    """

    items: tuple[ReduceItem, ...]
    transport: Transport
    label: str
    rank: int
    grad_dtype: torch.dtype
    wire_dtype: torch.dtype
    reduce_dtype: torch.dtype
    direct: tuple[int, ...]
    packing: Packing | None
    output_sizes: tuple[int, ...]
    places: tuple[tuple[int, tuple[int, ...]], ...]
    members: tuple[int, ...]
    output_numel: int
    direct_nbytes: int

    @cached_property
    def fqns(self) -> tuple[str, ...]:
        return tuple(item.fqn for item in self.items)

    @cached_property
    def piece_sizes(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the elements of its chunk of every item; for transports that send to each rank separately."""
        layouts = [item.layout for item in self.items]
        sizes: list[tuple[int, ...]] = []
        for first, ranks in runs_together(layouts):
            sizes += [tuple(layout.local_numel(first) for layout in layouts)] * ranks
        return tuple(sizes)

    @cached_property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """For each item, the indices of its dim that each rank holds, as `piece_sizes`."""
        return tuple(item.layout.lengths() for item in self.items)

    @cached_property
    def row_numels(self) -> tuple[int, ...]:
        """For each rank, the elements of all its chunks."""
        return tuple(map(sum, self.piece_sizes))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the full gradients in `grad_dtype`."""
        return sum(item.layout.numel for item in self.items) * self.grad_dtype.itemsize

    @cached_property
    def wire_nbytes(self) -> int:
        """Bytes that this rank sends in one reduction: to each peer, the peer's chunks."""
        layouts = [self.items[i].layout for i in self.direct]
        numel = sum(layout.numel - layout.local_numel(self.rank) for layout in layouts)
        if self.packing is not None:
            numel += self.packing.numel - self.packing.row_numel
        return numel * self.wire_dtype.itemsize

    @cached_property
    def padding_nbytes(self) -> int:
        """Bytes of the packed buffer that hold no element."""
        if self.packing is None:
            return 0
        used = sum(self.items[i].layout.numel for i in self.packing.items)
        return (self.packing.numel - used) * self.wire_dtype.itemsize

    def output_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's chunk of each item's reduced gradient: dense views of `flat`, of `local_shape(rank)`."""
        pieces = flat.split_with_sizes(self.output_sizes)
        return [shaped(pieces[index], shape) for index, shape in self.places]

    def allocate_output(self) -> torch.Tensor:
        """A 1-D output of `output_numel` elements from the transport's allocator; the contents are undefined."""
        return self.transport.buffer(self.output_numel, self.reduce_dtype, self.label, "reduce_output")

    def pack(self, grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The packed buffer, filled; None if all gradients are sent in place."""
        if self.packing is None:
            return None
        packed = self.transport.buffer(self.packing.numel, self.wire_dtype, self.label, "packed")
        self.packing.fill(packed, grads)
        return packed


def reported(
    plan: GatherPlan | ReducePlan, launched: float, wire_nbytes: int | None = None, dtype: torch.dtype | None = None
) -> contextlib.AbstractContextManager[None]:
    """Reports the gather or reduction in the block as events: its start and, unless it raises, its end.

    `launched` is when its program began. Compressed data overrides `wire_nbytes` and `dtype`.
    """
    return _reported(plan, launched, wire_nbytes, dtype) if events.hub.active else _UNHEARD


@contextlib.contextmanager
def _reported(
    plan: GatherPlan | ReducePlan, launched: float, wire_nbytes: int | None, dtype: torch.dtype | None
) -> Iterator[None]:
    started: Callable[..., events.Event]
    finished: Callable[..., events.Event]
    if isinstance(plan, GatherPlan):
        started, finished, sent = events.GatherStarted, events.GatherFinished, plan.dtype
    else:
        started, finished, sent = events.ReduceStarted, events.ReduceFinished, plan.wire_dtype
    wire = plan.wire_nbytes if wire_nbytes is None else wire_nbytes
    described = (plan.label, plan.fqns, plan.nbytes, wire, dtype or sent, plan.transport.group)
    padding, name = plan.padding_nbytes, plan.transport.name
    events.emit(started(*described, padding_bytes=padding, transport=name))
    yield
    seconds = time.perf_counter() - launched
    events.emit(finished(*described, seconds, padding_bytes=padding, transport=name))


def plan_gather(items: Sequence[GatherItem], transport: Transport, label: str, rank: int) -> GatherPlan:
    """Plans the gather of `items`. Not collective, but every rank must plan the same items."""
    transport = transport.for_gather(items)
    layouts = tuple(item.layout for item in items)
    direct = tuple(i for i, item in enumerate(items) if _goes_direct(item.layout, item.dtype.itemsize, transport))
    packed = tuple(sorted({*range(len(items))} - {*direct}))
    dtypes, packed_dtypes = {item.dtype for item in items}, {items[i].dtype for i in packed}
    mixed = len(packed_dtypes) > 1
    packed_dtype = packed_dtypes.pop() if len(packed_dtypes) == 1 else torch.uint8
    widths = tuple(item.dtype.itemsize if mixed else 1 for item in items)
    packing = pack(layouts, packed, widths, aligned=mixed) if packed else None
    slots = [(i, rank * layouts[i].padded_local_numel, layouts[i].local_shape(rank)) for i in direct]
    filled = [(i, start, math.prod(shape), shape) for i, start, shape in slots]
    room = [(i, start + numel, layouts[i].padded_local_numel - numel) for i, start, numel, _ in filled]
    return GatherPlan(
        items=tuple(items),
        transport=transport,
        label=label,
        rank=rank,
        direct=direct,
        packing=packing,
        packed_dtype=packed_dtype,
        dtype=dtypes.pop() if len(dtypes) == 1 else torch.uint8,
        own_slots=tuple(slot for slot in filled if slot[2]),
        own_row=() if packing is None else packing.row(rank),
        slot_padding=tuple(gap for gap in room if gap[2] > 0),
    )


def plan_reduce(
    items: Sequence[ReduceItem],
    transport: Transport,
    label: str,
    rank: int,
    grad_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    members: Sequence[int] | None = None,
) -> ReducePlan:
    """Plans the reduction of the gradients of `items`. Not collective, but every rank must plan the same items.

    `members` are their places in their group; None if they are the whole group.
    """
    transport = transport.for_reduction(items, _wire_dtype(transport, grad_dtype, reduce_dtype), reduce_dtype)
    layouts = tuple(item.layout for item in items)
    wire_dtype = _wire_dtype(transport, grad_dtype, reduce_dtype)
    as_is = grad_dtype == wire_dtype
    direct = tuple(i for i, layout in enumerate(layouts) if _reduces_direct(layout, wire_dtype, as_is, transport))
    packed = tuple(sorted({*range(len(items))} - {*direct}))
    packing = pack(layouts, packed, (1,) * len(items), aligned=False) if packed else None
    sizes, places = _output_order(layouts, direct, packing, rank, padded=transport.collective)
    return ReducePlan(
        items=tuple(items),
        transport=transport,
        label=label,
        rank=rank,
        grad_dtype=grad_dtype,
        wire_dtype=wire_dtype,
        reduce_dtype=reduce_dtype,
        direct=direct,
        packing=packing,
        output_sizes=sizes,
        places=places,
        members=tuple(range(len(items)) if members is None else members),
        output_numel=sum(sizes),
        direct_nbytes=sum(layouts[i].numel for i in direct) * grad_dtype.itemsize,
    )


def _wire_dtype(transport: Transport, grad_dtype: torch.dtype, reduce_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are sent, before any compression.

    If the owner sums, gradients narrower than `reduce_dtype` are sent unchanged: half the bytes for bf16 gradients, and
    still a sum in fp32. Others are cast first. A collective sums on the way, so it always needs `reduce_dtype` on the
    wire.
    """
    return grad_dtype if not transport.collective and grad_dtype.itemsize < reduce_dtype.itemsize else reduce_dtype


def _goes_direct(layout: ChunkLayout, itemsize: int, transport: Transport) -> bool:
    if not transport.collective:
        return True
    return transport.direct and layout.has_equal_slots and layout.padded_local_numel * itemsize >= SMALL_BYTES


def _reduces_direct(layout: ChunkLayout, wire_dtype: torch.dtype, as_is: bool, transport: Transport) -> bool:
    if not _goes_direct(layout, wire_dtype.itemsize, transport):
        return False
    # A collective reads world_size equal rows from the gradient itself, which excludes padding and casts.
    return not transport.collective or (as_is and layout.padded_numel == layout.numel)


def _output_order(
    layouts: Sequence[ChunkLayout], direct: Sequence[int], packing: Packing | None, rank: int, *, padded: bool
) -> tuple[tuple[int, ...], tuple[tuple[int, tuple[int, ...]], ...]]:
    """Sizes of the output's consecutive pieces, and for each item the index and shape of its piece."""
    sizes = [0]  # the first piece is that of items without elements
    places = [0] * len(layouts)
    for i in direct:
        used = layouts[i].local_numel(rank)
        places[i] = len(sizes)
        sizes += [used, layouts[i].padded_local_numel - used] if padded else [used]
    for item, numel, _ in () if packing is None else packing.row(rank):
        if item is not None:
            places[item] = len(sizes)
        sizes.append(numel)
    return tuple(sizes), tuple((places[i], layout.local_shape(rank)) for i, layout in enumerate(layouts))
