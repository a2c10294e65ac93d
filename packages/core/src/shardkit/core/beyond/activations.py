"""Activations on the host: what autograd saves in forward waits for its backward in pinned memory, or in files.

    pass       one forward of the module, and the backward through it; several may wait, as in a pipeline
    segment    what forward saves from the end of one block to the end of the next: it leaves, and comes back, together
    saved      what autograd holds in the place of a tensor
    span       bytes of one storage that saved tensors reach: they move once, however many tensors lie in them
    page       a piece of host memory, of one size for all; the spans of a pass lie in its pages one after the other

Note [What stays]
Parameters, buffers and views of them, because the module holds them anyhow. The memory of an unsharded parameter is
freed and filled again under the tensor that autograd saved (parameters/param.py, Note [Storage that comes and goes]),
so a copy would be one more, and stale. Also: what is smaller than `min_bytes`, lies on another device, or has no plain
storage. All of these are held through `detach()`: autograd's own tensor would be a circle if it is an output.

Note [Writes after saving]
Autograd compares version counters, but not where hooks have replaced the tensor. So a saved keeps a tensor without
memory that shares the version counter of the one that has left, and backward raises as autograd does. A copy may read
memory in which a write after saving has changed something; nobody ever gets that copy.

Note [Order on streams]
All copies of a module run on one stream of its own, in the order in which they were asked for. So a page can be reused
as soon as nobody needs it: the copy that writes to it comes after the one that read it.

    leaving      the copy begins when the streams that have saved the tensors have done what was queued on them. These
                 wait for it at the end of the next segment, and only then are the tensors dropped: the allocator gives
                 memory to the next tensor of its stream at once. So two segments are on the device in forward.
    coming back  the memory is the current stream's, which may still work in it for its last owner: the copy waits for
                 that stream. Whoever unpacks a tensor makes its own stream wait for the copy. A span that nobody has
                 unpacked makes the stream that owns its memory wait before it is dropped.

A segment is asked for when backward first needs something of the one before it, in backward's order: of the block that
ran after it. So two segments are on the device in backward, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardkit.core.parameters.param import param_over
from shardkit.core.torch_compat import (
    in_backward,
    is_traceable_wrapper_subclass,
    local_of,
    no_dynamo,
    top_saved_tensors_hooks,
)

__all__ = ["ActivationOffload", "offload_activations"]

PAGE = 2**22
"""Bytes of a page: large enough for the speed of the bus; a power of two, as torch rounds pinned memory up to one."""
_ALIGNED = 512  # as the device's allocator does: kernels that depend on it do the same work on what comes back


def offload_activations(
    module: nn.Module,
    *,
    keep: int | Callable[[str, nn.Module], bool] = 1,
    min_bytes: int = 2**20,
    host_bytes: int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> ActivationOffload:
    """Moves what forward saves for backward to pinned host memory, block by block, and back one block ahead of its use.

    Results do not change, by a single bit. Blocks are the entries of the outermost `nn.ModuleList`, `nn.ModuleDict` and
    `nn.Sequential` in `module`; what is saved between two blocks counts as the second one's, and what is saved after
    the last block stays. It makes no difference whether `fully_shard` is called before or after.

    Args:
        module: the model, or a stage of a pipeline. Only its forward counts: a loss outside of it keeps its tensors.
        keep: how many of the last blocks keep their tensors on the device, as backward needs these at once; or a
            function of the name and the block that says whether it does.
        min_bytes: smaller tensors stay on the device.
        host_bytes: limit of the host memory. Tensors that do not fit stay on the device. None: as much as is needed.
        directory: for models on a CPU, where the tensors go to files in this directory, which have no names. Without it
            nothing is moved on a CPU.

    Returns:
        a handle, with the bytes that are taken on the host, and `remove()`.

    Raises:
        ValueError: if `module` has no blocks, or an argument makes no sense.
    """
    blocks = dict(_blocks(module))
    if not blocks:
        raise ValueError(
            f"offload_activations found no blocks in {type(module).__name__}: no nn.ModuleList, nn.ModuleDict or "
            "nn.Sequential with entries; pass the module that holds the blocks in one of these"
        )
    if callable(keep):
        kept = frozenset(index for index, (name, block) in enumerate(blocks.items()) if keep(name, block))
    elif isinstance(keep, int) and not isinstance(keep, bool) and keep >= 0:
        kept = frozenset(range(max(0, len(blocks) - keep), len(blocks)))
    else:
        raise ValueError(
            f"keep is {keep!r}; pass the number of last blocks that keep their tensors, from 0 on, or a function of the"
            " name and the block"
        )
    for name, value in (("min_bytes", min_bytes), ("host_bytes", host_bytes)):
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} is {value!r}; pass a number of bytes from 0 on")
    if directory is not None and not Path(directory).is_dir():
        raise ValueError(f"directory {os.fspath(directory)!r} is not there; make it, or pass another one")
    offload = ActivationOffload(kept, min_bytes, host_bytes, None if directory is None else os.fspath(directory))
    offload.watch(module, list(blocks.values()))
    return offload


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The entries of the outermost containers, in order, with their names below the outermost module."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield prefix + name, child
        else:
            yield from _blocks(child, f"{prefix}{name}.")


# -- host memory -------------------------------------------------------------------------------------------------------


class _Pool:
    """Pages: pinned memory, or mapped files. As many as were ever needed at once."""

    def __init__(self, directory: str | None, limit: int | None) -> None:
        self.free: list[torch.Tensor] = []
        self.count = 0
        self._directory = directory
        self._limit = limit

    def take(self) -> _Page | None:
        """A free page or a new one, None beyond the limit."""
        with contextlib.suppress(IndexError):  # other threads take pages, too
            return _Page(self, self.free.pop())
        if self._limit is not None and (self.count + 1) * PAGE > self._limit:
            return None
        try:
            memory = self._new()
        except (OSError, RuntimeError) as error:  # of the file system, and of torch's allocator
            place = "pinned host memory" if self._directory is None else f"directory {self._directory!r}"
            raise RuntimeError(
                f"activations take {self.count * PAGE} bytes of {place}, and the next {PAGE} cannot be had: {error}; "
                "pass a smaller host_bytes to offload_activations, or a larger keep"
            ) from error
        self.count += 1
        return _Page(self, memory)

    def _new(self) -> torch.Tensor:
        if self._directory is None:
            return torch.empty(PAGE, dtype=torch.uint8, device="cpu", pin_memory=True)
        descriptor, path = tempfile.mkstemp(prefix="shardkit-activations-", dir=self._directory)
        try:
            Path(path).unlink()  # at once: nothing is left behind, however the process ends
            os.posix_fallocate(descriptor, 0, PAGE)  # a full disk is an error here, and no SIGBUS at a later write
            return torch.frombuffer(mmap.mmap(descriptor, PAGE), dtype=torch.uint8)
        finally:
            os.close(descriptor)


class _Page:
    """A page that spans lie in; it goes back to the pool with the last of them."""

    def __init__(self, pool: _Pool, memory: torch.Tensor) -> None:
        self.memory = memory
        self._pool = pool

    def __del__(self) -> None:
        self._pool.free.append(self.memory)


class _Piece(NamedTuple):
    """A part of a page."""

    page: _Page
    begin: int
    nbytes: int

    @property
    def memory(self) -> torch.Tensor:
        return self.page.memory[self.begin : self.begin + self.nbytes]


# -- what autograd holds -----------------------------------------------------------------------------------------------


class _Span:
    """Bytes of a storage, from `begin` on, and where they are: in pieces of pages, and on the device while needed."""

    def __init__(self, begin: int, nbytes: int, pieces: list[_Piece]) -> None:
        self.begin = begin
        self.nbytes = nbytes
        self.pieces = pieces
        self.here: torch.Tensor | None = None
        self.arrival: Any = None  # an event; None on a CPU
        self.owner: Any = None  # the stream that `here` was allocated on
        self.awaited = True  # whether `owner` has waited for the arrival

    def drop(self) -> None:
        """Frees the memory on the device: see Note [Order on streams]."""
        if not self.awaited:
            self.owner.wait_event(self.arrival)
            self.awaited = True
        self.here = None

    def __del__(self) -> None:
        self.drop()


class _Saved:
    """A tensor that autograd has saved: itself, or where it lies in a span once it has left.

    `tensor` is without memory then, and shares the version counter of the tensor that was saved.
    """

    def __init__(self, tensor: torch.Tensor, forward: _Pass) -> None:
        self.tensor = tensor.detach()
        self.version: int | None = tensor._version  # None: not counted
        self.forward = forward
        self.index = len(forward.segments)
        self.span: _Span | None = None

    def measure(self) -> int:
        """Notes where a plain tensor lies in its storage; returns the bytes that it reaches."""
        self.dtype, self.size, self.stride = self.tensor.dtype, self.tensor.size(), self.tensor.stride()
        reach = sum((int(size) - 1) * int(stride) for size, stride in zip(self.size, self.stride, strict=True))
        self.begin = int(self.tensor.storage_offset()) * self.dtype.itemsize
        self.end = self.begin + (reach + 1) * self.dtype.itemsize if self.tensor.numel() else self.begin
        return self.end - self.begin

    def restore(self) -> torch.Tensor:
        """The tensor, on its device."""
        self.forward.enter(self.index)
        if self.span is None:
            return self.tensor
        memory = self.forward.arrived(self.span)
        offset = (self.begin - self.span.begin) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), offset, self.size, self.stride)


class _Wrapped:
    """A tensor of a class such as DTensor, whose tensors inside are saved one by one.

    Operators of the class write to those without counting it, so only the version of the whole says anything.
    """

    def __init__(self, tensor: torch.Tensor, parts: dict[str, Any], meta: Any) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self._parts = parts  # tensors, saved, and what else the class asks for
        self._meta = meta
        self._geometry = tensor.size(), tensor.stride()
        for name, part in parts.items():
            if isinstance(part, _Saved):
                part.version = None
                setattr(self.tensor, name, part.tensor)  # which will be without memory

    def restore(self) -> torch.Tensor:
        """The tensor, around tensors on their device."""
        parts = {name: part.restore() if isinstance(part, _Saved) else part for name, part in self._parts.items()}
        kind: Any = type(self.tensor)
        made: torch.Tensor = kind.__tensor_unflatten__(parts, self._meta, *self._geometry)
        return made


@no_dynamo
def _unpack(saved: _Saved | _Wrapped) -> torch.Tensor:
    """Autograd needs a tensor."""
    if saved.tensor._version != saved.version:  # Note [Writes after saving]
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{saved.tensor.dtype} tensor is at version {saved.tensor._version}; expected version {saved.version} "
            "instead. Use the operation that is not in place, or write to a clone()"
        )
    return saved.restore()


class _Leaving(NamedTuple):
    """A segment on its way to the host: Note [Order on streams]."""

    tensors: list[torch.Tensor]
    streams: list[Any]
    done: Any

    def drop(self) -> None:
        """The streams that own the memory wait for the copies; then it may be freed."""
        for stream in self.streams:
            stream.wait_event(self.done)
        self.tensors.clear()


class _Pass:
    """One forward, and the backward through it: it lives as long as what autograd has saved in it."""

    def __init__(self, tier: _Tier) -> None:
        self.segments: list[list[weakref.ref[_Span]]] = []
        self.seen: set[str] = set()  # types of devices that tensors were saved on
        self._tier = tier
        self._pending: list[weakref.ref[_Saved]] = []  # of the segment that forward is in
        self._streams: list[Any] = []  # that have saved them
        self._leaving: _Leaving | None = None
        self._page: _Page | None = None  # the one that is being filled, up to here
        self._filled = PAGE
        # Spans by their storage. A storage that is referred to, if weakly, has an address that no other one gets.
        self._moved: dict[StorageWeakRef, list[tuple[weakref.ref[_Span], torch.Tensor, int]]] = {}
        self._entered = -1  # by backward
        self._here: set[int] = set()  # segments that are back on the device

    # -- forward -------------------------------------------------------------------------------------------------------

    def send(self, saved: _Saved) -> None:
        """A saved tensor leaves at the end of this segment."""
        self._pending.append(weakref.ref(saved))
        stream = self._tier.current_stream()
        if stream is not None and stream not in self._streams:
            self._streams.append(stream)

    def end_segment(self, *, leaves: bool) -> None:
        """A block has ended, or forward has: what leaves is sent."""
        self.settle()
        pending = [saved for reference in self._pending if leaves and (saved := reference()) is not None]
        streams, self._pending, self._streams = self._streams, [], []
        self.segments.append([])
        by_storage: dict[StorageWeakRef, list[_Saved]] = {}
        for saved in pending:
            if saved.version in (None, saved.tensor._version):  # else it is never asked for, or raises
                by_storage.setdefault(StorageWeakRef(saved.tensor.untyped_storage()), []).append(saved)
        sent: list[tuple[torch.Tensor, _Span]] = []
        for storage, group in by_storage.items():
            sent += self._spans(storage, self._not_moved_yet(storage, group))
        if sent:
            self._leaving = self._tier.send(sent, streams)

    def settle(self) -> None:
        """The segment that has been sent may be freed."""
        if self._leaving is not None:
            self._leaving.drop()
            self._leaving = None

    def _not_moved_yet(self, storage: StorageWeakRef, group: list[_Saved]) -> list[_Saved]:
        """Those that lie in no span of an earlier segment; the others are in it from now on."""
        left = []
        for saved in group:
            for reference, counter, version in self._moved.get(storage, ()):
                span = reference()
                unwritten = counter._version == version == saved.version
                if span and unwritten and span.begin <= saved.begin and saved.end <= span.begin + span.nbytes:
                    self._put(saved, span)
                    break
            else:
                left.append(saved)
        return left

    def _spans(self, storage: StorageWeakRef, group: list[_Saved]) -> Iterator[tuple[torch.Tensor, _Span]]:
        """Spans for saved tensors of one storage, each with the bytes that it is a copy of."""
        together: list[list[_Saved]] = []
        end = -1
        for saved in sorted(group, key=lambda one: one.begin):
            if saved.begin // _ALIGNED * _ALIGNED < end:
                together[-1].append(saved)
            else:
                together.append([saved])
            end = max(end, saved.end)
        for members in together:
            begin = members[0].begin // _ALIGNED * _ALIGNED
            nbytes = max(saved.end for saved in members) - begin
            pieces = self._place(nbytes)
            if pieces is None:
                continue
            origin = members[0].tensor
            raw = torch.empty(0, dtype=torch.uint8, device=origin.device)
            raw.set_(origin.untyped_storage(), begin, (nbytes,), (1,))
            span = _Span(begin, nbytes, pieces)
            if members[0].version is not None:
                self._moved.setdefault(storage, []).append((weakref.ref(span), origin, members[0].version))
            for saved in members:
                self._put(saved, span)
            yield raw, span

    def _put(self, saved: _Saved, span: _Span) -> None:
        saved.span = span
        saved.tensor.data = saved.tensor.new_empty(0)  # keeps its version counter
        if all(one() is not span for one in self.segments[-1]):
            self.segments[-1].append(weakref.ref(span))

    def _place(self, nbytes: int) -> list[_Piece] | None:
        """Room on the host, None if there is no more."""
        pieces = []
        while nbytes:
            if self._filled >= PAGE:
                page = self._tier.pool.take()
                if page is None:
                    return None
                self._page, self._filled = page, 0
            assert self._page is not None
            pieces.append(_Piece(self._page, self._filled, min(nbytes, PAGE - self._filled)))
            self._filled += -(-pieces[-1].nbytes // _ALIGNED) * _ALIGNED
            nbytes -= pieces[-1].nbytes
        return pieces

    # -- backward ------------------------------------------------------------------------------------------------------

    def enter(self, index: int) -> None:
        """Backward needs something of a segment: the one that it needs next comes, too, and others may go."""
        if index == self._entered:
            return
        self._entered = index
        wanted = {one for one in (index, index - 1) if 0 <= one < len(self.segments)}
        needed = {id(span) for one in wanted for span in self._alive(one)}
        for other in self._here - wanted:
            for span in self._alive(other):  # alive, as where the graph is retained: the pages have it
                if id(span) not in needed:
                    span.drop()
        self._here = wanted
        for one in sorted(wanted, reverse=True):
            self._bring(one)

    def _alive(self, index: int) -> list[_Span]:
        return [span for reference in self.segments[index] if (span := reference()) is not None]

    def _bring(self, index: int) -> None:
        missing = [span for span in self._alive(index) if span.here is None]
        if missing:
            self._tier.bring(missing)

    def arrived(self, span: _Span) -> torch.Tensor:
        """The memory of a span that is on its way to the device, for work on the current stream."""
        if span.here is None:  # dropped by a backward that goes to and fro
            self._tier.bring([span])
        assert span.here is not None
        if span.arrival is not None:
            current = self._tier.current_stream()
            current.wait_event(span.arrival)
            if current == span.owner:
                span.awaited = True
            else:  # the memory is another stream's, which may get it back while this one reads it
                span.here.record_stream(current)
        return span.here


class _Tier:
    """Where tensors go, those of one device, and the stream on which they move."""

    def __init__(self, pool: _Pool, directory: str | None) -> None:
        self.pool = pool
        self.device: torch.device | None = None
        self._directory = directory
        self._module: Any = None  # of the device: streams
        self._stream: Any = None
        self._lock = threading.Lock()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device whose tensors move: that of the first one."""
        if self.device is None and tensor.device.type != ("meta" if self._directory else "cpu"):
            with self._lock:  # threads may run forward at once
                if self.device is None:
                    self._begin(tensor.device)
        return tensor.device == self.device

    def _begin(self, device: torch.device) -> None:
        if self._directory is not None and device.type != "cpu":
            raise ValueError(
                f"offload_activations got directory {self._directory!r}, and the activations are on {device}; leave it "
                "out: pinned host memory takes them, and files are for models on a CPU"
            )
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device=device)
        self.device = device  # last: other threads look at it first

    def current_stream(self) -> Any:
        """The current stream of the device, None on a CPU."""
        return None if self._module is None else self._module.current_stream(self.device)

    def is_captured(self) -> bool:
        """Whether a CUDA graph captures: a replay would write to pages that others have by then."""
        return bool(getattr(self._module, "is_current_stream_capturing", bool)())

    def send(self, spans: list[tuple[torch.Tensor, _Span]], streams: list[Any]) -> _Leaving:
        """Copies bytes to the host, behind what is queued on `streams`."""
        for stream in streams:
            self._stream.wait_stream(stream)
        with self._on_stream():
            for raw, span in spans:
                for piece, part in zip(span.pieces, raw.split([one.nbytes for one in span.pieces]), strict=True):
                    piece.memory.copy_(part, non_blocking=True)
        done = None if self._stream is None else self._stream.record_event()
        return _Leaving([raw for raw, _ in spans], streams, done)

    def bring(self, spans: list[_Span]) -> None:
        """Copies spans to the device, into memory of the current stream."""
        owner = self.current_stream()
        for span in spans:
            span.here = torch.empty(span.nbytes, dtype=torch.uint8, device=self.device)
        if self._stream is not None:
            self._stream.wait_stream(owner)
        with self._on_stream():
            for span in spans:
                assert span.here is not None
                for piece, part in zip(span.pieces, span.here.split([one.nbytes for one in span.pieces]), strict=True):
                    part.copy_(piece.memory, non_blocking=True)
        if self._stream is not None:
            arrival = self._stream.record_event()
            for span in spans:
                span.arrival, span.owner, span.awaited = arrival, owner, False

    def _on_stream(self) -> contextlib.AbstractContextManager[None]:
        stream: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext() if self._stream is None else self._module.stream(self._stream)
        )
        return stream


# -- hooks on modules --------------------------------------------------------------------------------------------------


class _Running(threading.local):
    """The forward that a thread runs: its pass, the hooks of autograd while it runs, and the addresses that stay."""

    forward: _Pass | None = None
    hooks: Any = None
    held: Callable[[], set[int]] = set


class ActivationOffload:
    """The offload of one module's activations: what `offload_activations` returns."""

    def __init__(self, kept: frozenset[int], min_bytes: int, host_bytes: int | None, directory: str | None) -> None:
        self._settings = kept, min_bytes, host_bytes, directory
        self._kept, self._min_bytes = kept, min_bytes
        self._pool = _Pool(directory, host_bytes)
        self._tier = _Tier(self._pool, directory)
        self._order: dict[int, int] = {}  # places of the blocks, by id
        self._running = _Running()
        self._handles: list[Any] = []
        self._warned = False
        self._idle = False  # on a CPU without a directory

    def __getstate__(self) -> Any:
        """A copy of the module, or a pickled one, moves its own activations to memory of its own."""
        return self._settings

    def __setstate__(self, settings: Any) -> None:
        self.__init__(*settings)  # type: ignore[misc]

    @property
    def host_bytes(self) -> int:
        """Bytes taken on the host or in the directory: as many as were needed at once so far."""
        return self._pool.count * PAGE

    def watch(self, module: nn.Module, blocks: list[nn.Module]) -> None:
        """Follows the forwards of a module and of its blocks."""
        self._handles = [module.register_forward_pre_hook(self._begin)]
        self._handles += [block.register_forward_hook(self._end_block) for block in blocks]
        self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def remove(self) -> None:
        """Later forwards keep their tensors on the device. Tensors that have left come back in their backward."""
        for handle in self._handles:
            handle.remove()

    @no_dynamo
    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._is_on_top():  # Ctrl-C has ended a forward: torch calls no hooks then. Or the module calls itself
            self._close()
        # Under hooks of others, such as those of a checkpoint around the module, these have their say. A forward in
        # backward is a recomputation: what it saves is needed at once.
        if (
            self._idle
            or not torch.is_grad_enabled()
            or top_saved_tensors_hooks()
            or in_backward()
            or self._tier.is_captured()
        ):
            return
        if not self._order:
            self._order = {id(block): index for index, (_, block) in enumerate(_blocks(module))}
        running = self._running
        running.held = functools.cache(functools.partial(_addresses, module))
        running.forward = _Pass(self._tier)
        running.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        running.hooks.__enter__()

    @no_dynamo
    def _end_block(self, module: nn.Module, args: Any, output: Any) -> None:
        index = self._order.get(id(module))
        forward = self._running.forward
        if forward is not None and index is not None and not in_backward():
            forward.end_segment(leaves=index not in self._kept)

    @no_dynamo
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_on_top():
            self._close()

    def _is_on_top(self) -> bool:
        """Whether a forward is open, and nobody has hooks of his own within it."""
        hooks, top = self._running.hooks, top_saved_tensors_hooks()
        return hooks is not None and top is not None and top[0] is hooks.pack_hook

    def _close(self) -> None:
        running = self._running
        forward, hooks = running.forward, running.hooks
        running.forward, running.hooks, running.held = None, None, set  # it refers to the module
        hooks.__exit__()
        assert forward is not None
        in_one_graph = not forward.segments
        forward.end_segment(leaves=False)
        if in_one_graph and not self._warned:
            self._warned = True
            warnings.warn(
                "offload_activations moves nothing: no block has ended within forward, as where it was called after a "
                "model of this class was compiled as a whole; call it before, or compile each block instead",
                stacklevel=2,
            )
        if self._tier.device is None and forward.seen == {"cpu"}:
            self._idle = True
            warnings.warn(
                "offload_activations moves nothing: the activations are in the memory of a CPU; pass directory= to "
                "have them in files",
                stacklevel=2,
            )

    @no_dynamo
    def _pack(self, tensor: torch.Tensor) -> _Saved | _Wrapped:
        """Autograd saves a tensor."""
        forward = self._running.forward
        assert forward is not None
        if type(tensor) is torch.Tensor or not is_traceable_wrapper_subclass(tensor):
            return self._save(forward, tensor)
        base = tensor if tensor._base is None else tensor._base
        names, meta = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        kinds = {type(part) for part in parts.values() if isinstance(part, torch.Tensor)}
        # A part of another class may be on its way from other ranks, as DTensor's can.
        if isinstance(base, nn.Parameter) or kinds != {torch.Tensor}:
            return _Saved(tensor, forward)
        for name, part in parts.items():
            # Nested tensors with other offsets, even equal ones, are not of one shape: integers stay what they are.
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                parts[name] = self._save(forward, part)
        return _Wrapped(tensor, parts, meta)

    def _save(self, forward: _Pass, tensor: torch.Tensor) -> _Saved:
        forward.seen.add(tensor.device.type)
        saved = _Saved(tensor, forward)
        if (
            type(tensor) is torch.Tensor  # a parameter is not
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())  # flags, which bytes do not have
            and saved.measure() >= max(1, self._min_bytes)
            and not isinstance(tensor._base, nn.Parameter)
        ):
            storage = tensor.untyped_storage()
            stays = storage.data_ptr() in self._running.held() or param_over(storage) is not None
            if not stays and self._tier.takes(tensor):
                forward.send(saved)
        return saved


def _addresses(module: nn.Module) -> set[int]:
    """Where the parameters and buffers of a module lie."""
    held = itertools.chain(module.parameters(), module.buffers())
    plain = (local_of(tensor) if isinstance(tensor, DTensor) else tensor for tensor in held)
    # Others have no memory of their own: lazy ones have none yet, sparse and quantized ones consist of several tensors.
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in plain
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    }
