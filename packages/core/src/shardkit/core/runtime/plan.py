"""Plans, and the transports that run them: which items are sent in place or packed, and where everything lies.

Note [In-place gather]: item `i` is gathered into a flat tensor with one slot for each rank. If dim 0 is cut, the
concatenated slots are the unsharded tensor (a prefix of it, if padded). A rank writes its chunk into its slot, the
others' chunks arrive in theirs, and nothing is copied. Items cut on another dim have no such slots, and a separate
message does not pay for small items; both go through one packed buffer and are copied out of it.

A plan is made once, by all ranks alike, and used at every step; programs find every size and offset in it. The
transport for which it was made runs it: `plan.transport.gather(plan, ...)` and `plan.transport.reduce(plan, ...)`.

Note [Chunks as strides]: chunks of one shape on consecutive ranks lie at equal distances, both in the packed buffer and
in the whole tensor. So one strided view on each side covers all of them, and one copy moves them. A step takes a few
views for each item, whether 8 or 8,000 ranks take part.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from shardkit.core import events
from shardkit.core.events import StorageKind
from shardkit.core.runtime.lanes import Program, Reduction
from shardkit.core.runtime.sharding import ChunkLayout, dense_strides, runs_together
from shardkit.core.torch_compat import chunk_cat, foreach_copy_, foreach_zero_

SMALL_BYTES = 32 * 1024
"""Chunks below this many bytes are packed: to copy them in and out costs about as much as a message of its own."""

# Items of a byte buffer start at multiples of this, so that each can be viewed as its own dtype. 16 suits the widest
# dtype (complex128) and vectorized copies.
_ALIGNMENT = 16

# On a CPU, a buffer of up to this many elements is filled faster by a concatenation and a cast of the whole than by a
# copy of each chunk that casts: chunks of many ranks are short. Without a cast the copies are faster.
_CONCATENATED = 1 << 18

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
    """Moves the items of plans between the ranks of one process group; `transport_for` in choice.py selects one.

    Attributes:
        name: its name in events.
        collective: whether the backend's collectives move the bytes. They take equal, padded rows and sum on the way,
            so small items, and items that have no such rows, are packed into one buffer. If not, every item goes
            direct, and gradients are sent without summing to their owner, which sums them.
        coalesces: whether collectives move a list of tensors in place in one launch; if not, plans pack everything.
        peers_read_shards: whether peers read this rank's shards in place, until `wait_until_read`.
        registered_memory: memory that is allocated inside is registered with the network, if the user asked for that.
    """

    name = "custom"
    collective = False
    coalesces = True
    peers_read_shards = False
    registered_memory: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

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
        `layout.flat_numel` elements. When the program is done, `flats[i][:numel].view(shape)` is the unsharded tensor;
        elements behind it are undefined.

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

    def buffer(self, numel: int, dtype: torch.dtype, label: str, kind: StorageKind) -> torch.Tensor:
        """A 1-D buffer for packed items or gradients, or for the output of a reduction; events report it as `kind`."""
        with self.registered_memory():
            buffer = torch.empty(numel, dtype=dtype, device=self.device)
        report_allocated(buffer, label, kind)
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
    `packed_dtype`. `wire_dtype` is the items' common dtype, or `torch.uint8` if they differ.

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
    wire_dtype: torch.dtype
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
    def lengths(self) -> tuple[tuple[int, ...], ...]:  # for each item, the indices of its dim that each rank holds
        return tuple(item.layout.lengths() for item in self.items)

    @cached_property
    def row_numels(self) -> tuple[int, ...]:
        return tuple(map(sum, self.piece_sizes))

    @cached_property
    def nbytes(self) -> int:
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


def report_allocated(memory: torch.Tensor | int, fqn: str, kind: StorageKind) -> None:
    """Reports a temporary buffer that was just allocated, or bytes of gradients that a reduction has taken over."""
    if events.hub.active:
        nbytes = memory if isinstance(memory, int) else memory.numel() * memory.itemsize
        events.emit(events.StorageAllocated(fqn, nbytes, kind))


def report_freed(memory: torch.Tensor | int, fqn: str, kind: StorageKind) -> None:
    """Reports that a temporary buffer, or gradients, are dropped now."""
    if events.hub.active:
        nbytes = memory if isinstance(memory, int) else memory.numel() * memory.itemsize
        events.emit(events.StorageFreed(fqn, nbytes, kind))


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
    started: Callable[..., events.Event] = events.ReduceStarted
    finished: Callable[..., events.Event] = events.ReduceFinished
    if isinstance(plan, GatherPlan):
        started, finished = events.GatherStarted, events.GatherFinished
    wire, sent = plan.wire_nbytes if wire_nbytes is None else wire_nbytes, dtype or plan.wire_dtype
    described = (plan.label, plan.fqns, plan.nbytes, wire, sent, plan.transport.group)
    more = {"padding_bytes": plan.padding_nbytes, "transport": plan.transport.name}
    events.emit(started(*described, **more))
    yield
    events.emit(finished(*described, time.perf_counter() - launched, **more))


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
        wire_dtype=dtypes.pop() if len(dtypes) == 1 else torch.uint8,
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
    return transport.coalesces and layout.has_equal_slots and layout.padded_local_numel * itemsize >= SMALL_BYTES


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


# -- the packed buffer: a row for each rank ---------------------------------------------------------------------------


class Block(NamedTuple):
    """The chunks of `item` on consecutive ranks from `first` on: equal in shape and not empty.

    `size` is (ranks, *shape of a chunk). In the buffer the first chunk starts at element `at`, with strides `stride`,
    in elements of the item's dtype. In the whole tensor it begins at index `begin` of dim `dim`; a dense one has the
    strides `dense`.
    """

    item: int
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    at: int
    dense: tuple[int, ...]
    dim: int
    begin: int

    def of_whole(self, whole: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """The chunks in a whole tensor with strides `stride`, as a view of `size`."""
        step = stride[self.dim]
        return strided(whole, self.size, (self.size[1 + self.dim] * step, *stride), self.begin * step)


Gap: TypeAlias = tuple[tuple[int, int], tuple[int, int], int]
"""Unused room in consecutive ranks' rows, as `strided` takes it: size, strides, and where it begins."""


class Place(NamedTuple):
    """A piece of one rank's row, of `numel` elements of the buffer: its chunk of `item`; None: nothing."""

    item: int | None
    numel: int
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Packing:
    """The position of each chunk in the packed buffer; see Note [Chunks as strides].

    ::

        row of rank 0                  row of rank 1
        | a0 a0 a0 . | b0 b0 b0 b0 |   | a1 a1 . . | b1 b1 . . |    '.': padding, or alignment (bytes)

    `items` are the indices of the packed items; all rows have `row_numel` elements. `columns` are (item, elements) of
    each item in a row if every item is cut on dim 0, so that torch's operators for matrices apply; otherwise it is
    empty. A `ragged` buffer has no columns: each row holds its rank's chunks in sequence, because a tensor with one
    owner would leave its column empty elsewhere.
    """

    items: tuple[int, ...]
    blocks: tuple[Block, ...]
    gaps: tuple[Gap, ...]
    world_size: int
    row_numel: int
    columns: tuple[tuple[int, int], ...]
    ragged: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.world_size * self.row_numel

    def row(self, rank: int) -> tuple[Place, ...]:
        """All pieces of the row of `rank`, in sequence."""
        found: list[Place] = []
        end = rank * self.row_numel
        for block in self.blocks:
            if block.first <= rank < block.first + block.size[0]:
                width = self.row_numel // block.stride[0]
                at = (block.at + (rank - block.first) * block.stride[0]) * width
                chunk = Place(block.item, math.prod(block.size[1:]) * width, block.size[1:])
                found += [Place(None, at - end), chunk] if at > end else [chunk]
                end = at + chunk.numel
        unused = (rank + 1) * self.row_numel - end
        return (*found, Place(None, unused)) if unused else tuple(found)

    def fill(self, buffer: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
        """Copies the packed items of `wholes`, of any strides, to the rows of all ranks, cast; zeroes the padding."""
        if self._as_matrix(buffer):
            rows, packed = buffer.view(self.world_size, -1), [wholes[item] for item, _ in self.columns]
            casts = buffer.device.type == "cpu" and any(whole.dtype != buffer.dtype for whole in packed)
            if casts and not self.gaps and self.numel <= _CONCATENATED:
                rows.copy_(torch.cat([whole.reshape(self.world_size, -1) for whole in packed], 1))
            else:
                chunk_cat(packed, 0, self.world_size, out=rows)
            return
        targets = [strided(buffer, block.size, block.stride, block.at) for block in self.blocks]
        packed = [wholes[block.item] for block in self.blocks]
        chunks = [block.of_whole(whole, whole.stride()) for block, whole in zip(self.blocks, packed, strict=True)]
        foreach_copy_(targets, chunks)
        if self.gaps:
            foreach_zero_([strided(buffer, *gap) for gap in self.gaps])

    def copy_out(self, buffer: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Copies all ranks' rows to the items' flat tensors, each of which is a dense whole tensor.

        The flat tensor of an item cut on dim 0 must have room for the padding.
        """
        if self._as_matrix(buffer):
            rows = buffer.view(self.world_size, -1)
            out = [flats[item].view(self.world_size, -1) for item, _ in self.columns]
            torch.split_with_sizes_copy(rows, [size for _, size in self.columns], 1, out=out)
            return
        items = [as_dtype(buffer, flats[block.item].dtype) for block in self.blocks]
        chunks = [
            strided(item, block.size, block.stride, block.at) for item, block in zip(items, self.blocks, strict=True)
        ]
        foreach_copy_([block.of_whole(flats[block.item], block.dense) for block in self.blocks], chunks)

    def _as_matrix(self, buffer: torch.Tensor) -> bool:
        """Whether torch's operators for columns apply, and are the fastest way.

        On CUDA they are one kernel. On a CPU they also copy padding, which strided views skip.
        """
        return bool(self.columns) and (buffer.is_cuda or not self.gaps)


def strided(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], at: int) -> torch.Tensor:
    """The view of `tensor` that begins `at` elements after its first one."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + at)


def shaped(chunk: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense 1-D tensor as one of another shape. A view costs a microsecond, and most small chunks are 1-D already."""
    return chunk.view(shape) if len(shape) > 1 else chunk


def as_dtype(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The buffer of bytes as another dtype; the buffer itself if it is of that dtype."""
    return buffer if buffer.dtype == dtype else buffer.view(dtype)


@lru_cache(maxsize=64)
def pack(
    layouts: tuple[ChunkLayout, ...], items: tuple[int, ...], widths: tuple[int, ...], *, aligned: bool
) -> Packing | None:
    """The packing of `items` (indices into `layouts`), or None when they have no elements.

    `widths[i]` is the number of buffer elements in one element of item `i` (its bytes, in a byte buffer). `aligned`
    starts every piece at a multiple of 16. Equal groups, such as a model's layers, share one object.
    """
    filled = [item for item in items if layouts[item].numel]
    if not filled:
        return None
    ragged = any(layouts[item].owner is not None for item in filled)

    def room(item: int, rank: int) -> int:
        layout = layouts[item]
        numel = (layout.local_numel(rank) if ragged else layout.padded_local_numel) * widths[item]
        return -(-numel // _ALIGNMENT) * _ALIGNMENT if aligned else numel

    world = layouts[filled[0]].world_size
    gaps: list[Gap] = []
    places: list[tuple[int, int, int, int]] = []  # item, first rank, ranks, where the first one's chunk lies
    if not ragged:
        *columns, row = itertools.accumulate((room(item, 0) for item in filled), initial=0)
        for item, column in zip(filled, columns, strict=True):
            places += [(item, run.first, run.ranks, column + run.first * row) for run in layouts[item].runs]
    else:
        runs = runs_together([layouts[item] for item in filled])
        row = max(sum(room(item, first) for item in filled) for first, _ in runs)
        for first, count in runs:
            *columns, used = itertools.accumulate((room(item, first) for item in filled), initial=0)
            places += [(item, first, count, first * row + at) for item, at in zip(filled, columns, strict=True)]
            if row > used:
                gaps.append(((count, row - used), (row, 1), first * row + used))
    blocks: list[Block] = []
    for item, first, count, at in places:
        used = layouts[item].local_numel(first) * widths[item]
        unused = room(item, first) - used
        if used:
            blocks.append(_block(layouts[item], item, widths[item], first, count, row, at))
        if unused:
            gaps.append(((count, unused), (row, 1), at + used))
    dense = not ragged and not aligned and all(layouts[item].has_equal_slots for item in filled)
    sizes = tuple((item, room(item, 0)) for item in filled) if dense else ()
    return Packing(items, tuple(blocks), tuple(gaps), world, row, sizes, ragged)


def _block(layout: ChunkLayout, item: int, width: int, first: int, count: int, row: int, at: int) -> Block:
    """The block of an item whose elements are `width` of the buffer's, in rows `row` elements apart."""
    shape = layout.local_shape(first)
    return Block(
        item,
        first,
        size=(count, *shape),
        stride=(row // width, *dense_strides(shape)),
        at=at // width,
        dense=dense_strides(layout.shape),
        dim=layout.dim,
        begin=layout.offset(first),
    )
