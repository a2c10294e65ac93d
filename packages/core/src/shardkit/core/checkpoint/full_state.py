"""Full state of sharded modules: as a dict, to safetensors, and from a dict or files; tensor by tensor."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.agreement import Fingerprints, Peers, check_same, fingerprints, raise_together
from shardkit.core.checkpoint.leaves import Captured, Leaves
from shardkit.core.checkpoint.safetensors_files import SafetensorsLayout, write_piece
from shardkit.core.checkpoint.sources import Source, open_source
from shardkit.core.materialize import allocate, homes
from shardkit.core.mesh import groups_of_copies
from shardkit.core.parameters.region import Region, region_of
from shardkit.core.torch_compat import like_dtensor, local_of

T = TypeVar("T")

_CAUGHT_BY_TYPE = (ImportError, FileNotFoundError, PermissionError, OSError, TypeError, ValueError)


def _told(error: Exception, where: str) -> Exception:
    """The error to raise on all ranks: its own type if users may want to catch that, else a RuntimeError."""
    kind = next((kind for kind in _CAUGHT_BY_TYPE if isinstance(error, kind)), None)
    return RuntimeError(f"{where}: {type(error).__name__}: {error}") if kind is None else kind(f"{where}: {error}")


def _named(source: object) -> str:
    return f"of type {type(source).__name__}" if isinstance(source, Mapping) else f"{str(source)!r} in {Path.cwd()}"


@dataclass(frozen=True)
class Slot:
    """This rank's part of one tensor of a module's state."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    region: Region
    device_type: str  # device type of the shards: the mesh's, even if they are offloaded to CPU
    meta: bool


@dataclass(frozen=True)
class Report:
    """The report of one rank to rank 0."""

    slots: dict[str, Slot] = field(default_factory=dict)
    objects: tuple[str, ...] = ()
    ties: tuple[tuple[str, ...], ...] = ()
    meshes: tuple[tuple[int, ...], ...] = ()  # the ranks of each mesh, once: there may be thousands
    fingerprint: str | None = None  # of the source
    values: Fingerprints = field(default_factory=dict)  # of plain parameters
    failure: Exception | None = None
    unreadable: Exception | None = None  # why this rank cannot read the source; matters on rank 0 only


@dataclass(frozen=True)
class ModuleState:
    """The tensors in a module's `state_dict()`, without detaching them, and its extra state."""

    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        """Reads `state_dict()`, so names and hooks are the usual ones."""
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, Any] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state":
                tensors[name] = value
            else:
                objects[name] = value
        return cls(tensors, objects)

    def report(self) -> Report:
        """The description of this rank's tensors. Raises as `region_of`, and RuntimeError for an unknown layout."""
        slots = {name: _slot_of(name, tensor) for name, tensor in self.tensors.items()}
        names_of: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names_of.setdefault(id(tensor), []).append(name)
        ties = tuple(tuple(names) for names in names_of.values() if len(names) > 1)
        meshes = dict.fromkeys(one.device_mesh for one in self.tensors.values() if isinstance(one, DTensor))
        ranks = tuple(tuple(mesh.mesh.flatten().tolist()) for mesh in meshes)
        return Report(slots, tuple(self.objects), ties, ranks)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local memory of a tensor, without autograd."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _check_agreement(reports: list[Report]) -> None:
    """Raises the first reason why ranks cannot continue together: one failed, or its tensors differ from rank 0's."""
    for rank, report in enumerate(reports):
        if report.failure is not None:
            raise type(report.failure)(f"rank {rank}: {report.failure}")
    first = _described(reports[0])
    for rank, report in enumerate(reports):
        mine = _described(report)
        lines = [
            f"  {name}: rank 0 has {first.get(name, 'no such tensor')}, rank {rank} {mine.get(name, 'none')}"
            for name in first | mine
            if mine.get(name) != first.get(name)
        ]
        if lines:
            raise RuntimeError(
                "the module differs between ranks, expected the same names, full shapes and dtypes everywhere:\n"
                + "\n".join(lines)
                + "\nbuild it the same way on all ranks, or pass group= with the ranks that share this module"
            )
    _check_meshes(reports)


def _described(report: Report) -> dict[str, str]:
    return {name: f"{slot.shape} {slot.dtype}" for name, slot in report.slots.items()}


def _check_meshes(reports: list[Report]) -> None:
    """Raises RuntimeError if no tensor's mesh connects some ranks with others: they may be stages of a pipeline."""
    joined: list[set[int]] = []
    for ranks in {mesh for report in reports for mesh in report.meshes}:
        touching = [one for one in joined if not one.isdisjoint(ranks)]
        joined = [one for one in joined if one.isdisjoint(ranks)] + [set(ranks).union(*touching)]
    if len(joined) > 1:
        raise RuntimeError(
            f"no parameter is shared by ranks {' and '.join(map(str, map(sorted, joined)))}, whose modules have the "
            "same names, as stages of a pipeline may have; pass group= with the ranks that share this module"
        )


def _slot_of(name: str, tensor: torch.Tensor) -> Slot:
    region = region_of(name, tensor)
    local = local_part(tensor)
    if local.numel() != region.numel or (local.numel() and tuple(local.shape) != region.shape):
        raise RuntimeError(
            f"{name}: this rank holds a piece of shape {tuple(local.shape)}, expected {region.shape} for placements "
            f"{getattr(tensor, 'placements', ())} of shape {tuple(tensor.shape)}; "
            "make it with `distribute_tensor`, or give `from_local` its shape and stride"
        )
    device_type = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
    return Slot(tuple(tensor.shape), tensor.dtype, region, device_type, local.is_meta)


def full_state_dict(
    module: nn.Module,
    *,
    rank0_only: bool = True,
    offload: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict of a sharded module with full plain tensors: parameters, persistent buffers, extra state.

    Collective over `group`. Gathers each tensor to rank 0, one at a time. With `rank0_only`, other ranks send their
    pieces, never hold a full tensor and get an empty dict; otherwise rank 0 sends each tensor to them. For a buffer, or
    what else is plain or replicated, rank 0's copy is used.

    Args:
        module: any module; its parameters are DTensors on any meshes (Shard, strided Shard, Replicate) or plain.
        rank0_only: whether rank 0 alone gets the result.
        offload: move the result to CPU, each tensor as soon as it is complete; otherwise it stays on the device of the
            parameter.
        group: the ranks that share the module, by default all; "rank 0" is the first of them.

    Returns:
        Name -> tensor as in `module.state_dict()`, in its order. No tensor shares memory with the module; tied
        parameters share theirs with each other.

    Raises:
        RuntimeError: on all ranks, if tensors are on the meta device, if modules differ between ranks, also in the
            values of a parameter that several hold, if no mesh connects the ranks, or if the ranks of `group` together
            do not hold a whole tensor.
        ValueError: for a placement that is neither Replicate nor sharding.
    """
    peers = Peers.of(group)
    state, report = _survey(module)
    if state is not None:
        report = replace(report, values=_values(state, peers.size))
    reports = peers.gather(report)
    owners_of = _agreed(peers, reports, _owners)
    assert state is not None, "a rank that cannot read its module has failed the others too"
    receives = peers.rank == 0 or not rank0_only
    done: dict[int, torch.Tensor | None] = {}  # None on a rank that only sends
    result: dict[str, Any] = {}
    for name, owners in owners_of.items():
        tensor, slot = state.tensors[name], report.slots[name]
        if id(tensor) not in done:
            full = _gather(name, local_part(tensor), slot, owners, peers, reports, everywhere=not rank0_only)
            done[id(tensor)] = None if full is None else full.to("cpu" if offload else local_part(tensor).device)
        if receives:
            result[name] = done[id(tensor)]
    if receives:
        result.update(state.objects)
    return result


def _survey(module: nn.Module) -> tuple[ModuleState | None, Report]:
    try:
        state = ModuleState.of(module)
        return state, state.report()
    except Exception as error:  # noqa: BLE001 (raised by all ranks together, after they have told each other)
        return None, Report(failure=_told(error, f"cannot read the state of {type(module).__name__}"))


def _values(state: ModuleState, ranks: int) -> Fingerprints:
    """Fingerprints of parameters that other ranks hold as well: plain, replicated, or on a mesh of some ranks only."""
    held = {
        (name,): value
        for name, value in state.tensors.items()
        if isinstance(value, nn.Parameter)
        and (not isinstance(value, DTensor) or value.device_mesh.size() < ranks or groups_of_copies(value))
    }
    return fingerprints(Captured(Leaves(held), Leaves(), tuple(held)), alike=False)


def _agreed(peers: Peers, reports: list[Report] | None, decide: Callable[[list[Report]], T]) -> T:
    """Decides on rank 0 from all reports; an error raised there is raised on every rank. Collective."""
    answer: T | Exception | None = None
    if reports is not None:
        try:
            answer = decide(reports)
        except Exception as error:  # noqa: BLE001 (raised by all ranks together)
            answer = error.with_traceback(None)
    agreed = cast("T | Exception", peers.from_rank0(answer))
    if not isinstance(agreed, Exception):
        return agreed
    try:
        raise agreed
    finally:
        del agreed, answer  # they hold the traceback, and so the callers' locals, until a garbage collection


def _owners(reports: list[Report]) -> dict[str, tuple[int, ...]]:
    """For each tensor, in order, the ranks whose pieces make it up."""
    _check_agreement(reports)
    check_same(
        [report.values for report in reports],
        "; make replicas equal with shardkit.core.broadcast_replicas(model), or pass group= with the ranks that share "
        "this module",
    )
    unmade = [name for name in reports[0].slots if any(report.slots[name].meta for report in reports)]
    if unmade:
        raise RuntimeError(
            f"tensors on the meta device have no values: {', '.join(unmade)}; call materialize or load them first"
        )
    owners: dict[str, tuple[int, ...]] = {}
    for name, slot in reports[0].slots.items():
        first_with: dict[Region, int] = {}
        for rank, report in enumerate(reports):
            if report.slots[name].region.numel:
                first_with.setdefault(report.slots[name].region, rank)
        held, needed = sum(region.numel for region in first_with), math.prod(slot.shape)
        if held != needed:
            raise RuntimeError(
                f"{name}: the ranks of the group hold {held} elements, expected {needed}; "
                "pass group= with all ranks of the parameter's mesh"
            )
        owners[name] = tuple(first_with.values())
    return owners


def _gather(
    name: str,
    local: torch.Tensor,
    slot: Slot,
    owners: tuple[int, ...],
    peers: Peers,
    reports: list[Report] | None,
    *,
    everywhere: bool,
) -> torch.Tensor | None:
    """The full tensor, a copy, on rank 0 or everywhere. Collective."""
    if owners in ((), (0,)) and (peers.size == 1 or not everywhere):
        if peers.rank:
            return None
        return local.clone(memory_format=torch.contiguous_format).view(slot.shape)  # it may be cut between elements
    wire = peers.device_for(slot.device_type)
    full: torch.Tensor | None = None
    if peers.rank == 0 or everywhere:
        full = torch.empty(slot.shape, dtype=slot.dtype, device=wire)
    if reports is not None and full is not None:
        if 0 in owners:
            slot.region.put(full, local)
        _receive(full, {rank: reports[rank].slots[name].region for rank in owners if rank != 0}, peers)
    elif peers.rank in owners:
        peers.exchange(sends=[(0, local.to(wire).contiguous())])
    if everywhere and full is not None:
        peers.broadcast(full)
    return full


def _receive(full: torch.Tensor, pieces: dict[int, Region], peers: Peers) -> None:
    """Puts the pieces of other ranks into `full`, in place if they are contiguous in it."""
    windows = {rank: region.window(full) for rank, region in pieces.items()}
    peers.exchange(receives=[(rank, window) for rank, window in windows.items() if window is not None])
    for rank, window in windows.items():
        if window is None:
            # One after the other, so that no second copy of the full tensor builds up.
            piece = full.new_empty(pieces[rank].shape)
            peers.exchange(receives=[(rank, piece)])
            pieces[rank].put(full, piece)


def save_full_state_dict(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    file_bytes: int = 5 * 10**9,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the full tensors of a sharded module as safetensors; each rank writes its pieces, all at the same time.

    Collective over `group`, whose ranks must see the same `directory`. It gets `model.safetensors`, or several files
    and `model.safetensors.index.json`, as Hugging Face's `from_pretrained` and `load_full_state_dict` read them. Tied
    parameters are written once, by their first name. The files get their names after all ranks have written.

    Args:
        module: as for `full_state_dict`.
        directory: is created if necessary; holds no safetensors files yet.
        file_bytes: the most bytes of tensors in one file; a larger tensor gets a file of its own.
        group: the ranks that share the module, by default all.

    Raises:
        RuntimeError, ValueError: on all ranks, as `full_state_dict`; for extra state and for dtypes that safetensors
            lacks; if a rank cannot write.
        FileExistsError: on all ranks, if there are safetensors files in `directory`.
        OSError: on all ranks, if rank 0 cannot create the files.
    """
    peers, directory = Peers.of(group), Path(directory)
    partial = directory / ".incomplete"
    state, report = _survey(module)
    if state is not None:
        report = replace(report, values=_values(state, peers.size))
    reports = peers.gather(report)
    owners_of, layout = _agreed(peers, reports, lambda reports: _lay_out(reports, directory, partial, file_bytes))
    assert state is not None, "a rank that cannot read its module has failed the others too"
    error: Exception | None = None
    try:
        for name, (file, offset) in layout.places.items():
            if peers.rank in owners_of[name]:
                slot = report.slots[name]
                with (partial / file).open("r+b") as opened:
                    write_piece(opened, offset, slot.shape, slot.region, local_part(state.tensors[name]).cpu())
    except Exception as caught:  # noqa: BLE001 (raised by all ranks together)
        error = caught
    raise_together(peers, error, f"writing {directory}")
    _agreed(peers, reports, lambda _: _complete(layout, partial, directory))


def _lay_out(
    reports: list[Report], directory: Path, partial: Path, file_bytes: int
) -> tuple[dict[str, tuple[int, ...]], SafetensorsLayout]:
    """Creates the files on rank 0; returns the ranks that write each tensor, and where."""
    owners_of = _owners(reports)
    first = reports[0]
    if first.objects:
        raise ValueError(
            f"'{first.objects[0]}' is not a tensor, and safetensors holds nothing else; "
            "write full_state_dict(module) with torch.save"
        )
    tied = {name for names in first.ties for name in names[1:]}
    looks = {name: (slot.dtype, slot.shape) for name, slot in first.slots.items() if name not in tied}
    layout = SafetensorsLayout.of(looks, file_bytes)
    if present := sorted(one.name for one in directory.glob("*.safetensors")):
        raise FileExistsError(f"{directory} holds {present[0]} already; give a directory without safetensors files")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    layout.create(partial)
    return owners_of, layout


def _complete(layout: SafetensorsLayout, partial: Path, directory: Path) -> None:
    for file in layout.heads:
        (partial / file).rename(directory / file)
    layout.write_index(directory)
    partial.rmdir()


class IncompatibleKeys(NamedTuple):
    """Names that did not match, with the field names of `nn.Module.load_state_dict`'s result."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full_state_dict(
    module: nn.Module,
    source: object,
    *,
    strict: bool = True,
    assign: bool = False,
    group: dist.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Loads full tensors into a module whose parameters are sharded, tensor by tensor.

    Collective over `group`. The ranks first exchange descriptions of their tensors, so an error is raised on all of
    them before anything changes. If every rank can open the files, each reads only its own pieces. Otherwise rank 0
    reads and sends each rank its piece. Besides the module and the source, rank 0 holds at most one full tensor, and
    other ranks hold at most their piece of one.

    Parameters and persistent buffers on the meta device are allocated on the mesh's device. Non-persistent buffers are
    in no state dict: if any are on the meta device, call `materialize` first. Values are cast to the dtype of the
    parameter or buffer. For tied parameters one of the names is enough.

    Args:
        module: any module; its parameters are DTensors on any meshes (Shard, strided Shard, Replicate; uneven and
            empty shards) or plain tensors, which get the full value on every rank.
        source: on rank 0 a dict of name -> plain tensor, or the path of a safetensors or torch.save file, or of a
            directory of safetensors files or its index; on other ranks the same path, or anything.
        strict: raise for missing and unexpected names.
        assign: replace parameters and buffers by new tensors of the source's dtype instead of writing into them.
        group: the ranks that share the module, by default all; "rank 0" is the first of them.

    Returns:
        Names that the source lacks, and names that the module does not know.

    Raises:
        RuntimeError: missing or unexpected names (strict), entries of another shape, modules that differ by rank.
        TypeError, ValueError, OSError, ImportError: for a source that cannot be read; raised on every rank.
    """
    peers = Peers.of(group)
    opened = None
    unreadable: Exception | None = None
    try:
        opened = _opened(source)
    except OSError as error:
        unreadable = error
    except Exception as error:  # noqa: BLE001 (raised by all ranks together, if rank 0 has it)
        unreadable = _told(error, "cannot read the source")
    state, report = _survey(module)
    fingerprint = None if opened is None else opened.fingerprint
    reports = peers.gather(replace(report, fingerprint=fingerprint, unreadable=unreadable))
    verdict = _agreed(peers, reports, lambda reports: _judge(module, reports, opened, strict))
    assert state is not None, "a rank that cannot read its module has failed the others too"
    stream = _Stream(peers, verdict, opened, reports)
    if assign:
        _assign(module, state, report, stream)
    else:
        _write(module, state, report, stream)
    if verdict.objects:
        module.load_state_dict(verdict.objects, strict=False)
    return IncompatibleKeys(verdict.missing, verdict.unexpected)


def _opened(source: object) -> Source | None:
    try:
        return open_source(source)
    except OSError as error:  # a library may raise its own kind, with other arguments
        kind: type[OSError] = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
        raise kind(
            f"cannot read the source {_named(source)}: {error.strerror or error}; "
            "pass a path that rank 0 can read, or a dict of tensors on rank 0"
        ) from None


@dataclass(frozen=True)
class _Verdict:
    """Rank 0's decision for all ranks."""

    dtypes: dict[str, torch.dtype]  # of the loaded tensors, in order
    objects: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    everyone_reads: bool
    whole: frozenset[str]  # tensors that every rank holds whole


def _judge(module: nn.Module, reports: list[Report], source: Source | None, strict: bool) -> _Verdict:
    """Rank 0's decision, from all reports; raises the error that all ranks are to raise."""
    _check_agreement(reports)
    mine = reports[0]
    if mine.unreadable is not None:
        raise mine.unreadable
    if source is None:
        raise TypeError("the source on rank 0 is neither a dict of tensors nor a path; pass either there")
    seen = [*source.tensors, *source.objects]
    expected = [*mine.slots, *mine.objects]
    tied = {name: names for names in mine.ties for name in names}
    missing = [name for name in expected if not any(alias in seen for alias in tied.get(name, (name,)))]
    unexpected = [name for name in seen if name not in expected]
    complaints = [f"{name}: {text}" for name in mine.slots if (text := _misfit(name, mine, source))]
    if strict:
        complaints += [f"{name}: missing in the source, {_expected(name, mine)}" for name in missing]
        complaints += [f"{name}: in the source, but not in the module" for name in unexpected]
    if complaints:
        hint = "; strict=False accepts missing and unknown names" if strict and (missing or unexpected) else ""
        raise RuntimeError(
            f"the source does not fit {type(module).__name__}:\n  "
            + "\n  ".join(complaints)
            + f"\nGive the weights of this model{hint}"
        )
    fingerprints = {report.fingerprint for report in reports}
    return _Verdict(
        dtypes={name: source.tensors[name].dtype for name in mine.slots if name in source.tensors},
        objects={name: source.objects[name] for name in mine.objects if name in source.objects},
        missing=missing,
        unexpected=unexpected,
        everyone_reads=len(reports) == 1 or (len(fingerprints) == 1 and None not in fingerprints),
        whole=frozenset(
            name
            for name, slot in mine.slots.items()
            if all(report.slots[name].region == Region.whole(slot.shape) for report in reports)
        ),
    )


def _misfit(name: str, report: Report, source: Source) -> str | None:
    slot = report.slots[name]
    if name in source.objects:
        return f"seen a {type(source.objects[name]).__name__}, {_expected(name, report)}"
    tensor = source.tensors.get(name)
    if tensor is None:
        return None
    if tuple(tensor.shape) != slot.shape:
        return f"seen shape {tuple(tensor.shape)}, {_expected(name, report)}"
    if tensor.dtype.is_complex and not slot.dtype.is_complex:
        return f"seen {tensor.dtype}, whose imaginary part would be lost, {_expected(name, report)}"
    return None


def _expected(name: str, report: Report) -> str:
    slot = report.slots.get(name)
    return "expected extra state" if slot is None else f"expected shape {slot.shape} ({slot.dtype})"


@dataclass(frozen=True)
class _Stream:
    """Brings tensors to their owners, one at a time; every rank asks for the same names in the same order."""

    peers: Peers
    verdict: _Verdict
    source: Source | None
    reports: list[Report] | None

    def fill(self, name: str, local: torch.Tensor, slot: Slot) -> None:
        """Writes this rank's piece of a tensor into `local`, cast to the dtype of `local`."""
        region = slot.region
        if self.verdict.everyone_reads:
            if region.numel:
                local.copy_(self._read(name, region))
            return
        wire = self.peers.device_for(local.device.type if slot.device_type == "meta" else slot.device_type)
        if name in self.verdict.whole:
            buffer = _landing(local, wire)
            if self.peers.rank == 0:
                buffer.copy_(self._read(name, region))
            self.peers.broadcast(buffer)
        elif self.reports is not None:
            self._send(name, self.reports, local.dtype, wire)
            if region.numel:
                local.copy_(self._read(name, region))
            return
        elif region.numel:
            buffer = _landing(local, wire)
            self.peers.exchange(receives=[(0, buffer)])
        else:
            return
        if buffer is not local:
            local.copy_(buffer)

    def _read(self, name: str, region: Region) -> torch.Tensor:
        assert self.source is not None, f"{name}: this rank was asked to read, but it has no source"
        return region.take(self.source.tensors[name].detach())

    def _send(self, name: str, reports: list[Report], dtype: torch.dtype, wire: torch.device) -> None:
        """Sends every other rank its piece; ranks with the same piece share one copy of it."""
        pieces: dict[Region, torch.Tensor] = {}
        sends = []
        for rank, report in enumerate(reports):
            region = report.slots[name].region
            if rank == 0 or not region.numel:
                continue
            if region not in pieces:
                pieces[region] = self._read(name, region).to(device=wire, dtype=dtype).contiguous()
            sends.append((rank, pieces[region]))
        self.peers.exchange(sends=sends)


def _landing(local: torch.Tensor, wire: torch.device) -> torch.Tensor:
    """The memory in which a piece of `local` arrives: `local` itself if possible."""
    if local.device == wire and local.is_contiguous():
        return local
    return torch.empty(local.shape, dtype=local.dtype, device=wire)


@torch.no_grad()
def _write(module: nn.Module, state: ModuleState, report: Report, stream: _Stream) -> None:
    """Writes into the tensors of the module; those on the meta device are allocated first."""
    wanted = {id(state.tensors[name]) for name in stream.verdict.dtypes if state.tensors[name].is_meta}
    if wanted:
        allocate(module, lambda tensor: id(tensor) in wanted)
        state = ModuleState.of(module)
    for name in stream.verdict.dtypes:
        stream.fill(name, local_part(state.tensors[name]), report.slots[name])


@torch.no_grad()
def _assign(module: nn.Module, state: ModuleState, report: Report, stream: _Stream) -> None:
    """Builds new tensors in the source's dtype, then puts them in place together; tied names stay tied."""
    home_of = homes(module)
    fresh: dict[int, torch.Tensor] = {}
    assigned: dict[str, torch.Tensor] = {}
    for name, dtype in stream.verdict.dtypes.items():
        old, slot = state.tensors[name], report.slots[name]
        device = home_of(old) if slot.meta else local_part(old).device
        if id(old) not in fresh:
            new = torch.empty(local_part(old).shape, dtype=dtype, device=device)
            new = like_dtensor(new, old) if isinstance(old, DTensor) else new
            is_parameter = isinstance(old, nn.Parameter)
            fresh[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
        stream.fill(name, local_part(fresh[id(old)]), slot)
        assigned[name] = fresh[id(old)]
    for names in report.ties:
        loaded = [assigned[name] for name in names if name in assigned]
        assigned.update(dict.fromkeys(names, loaded[-1]) if loaded else {})
    module.load_state_dict(assigned, strict=False, assign=True)
