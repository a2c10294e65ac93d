"""`load_full_state_dict`: full tensors from one dict or file into a sharded module, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.checkpoint.peers import Peers
from shardkit.core.checkpoint.sources import Entry, Source, open_source
from shardkit.core.checkpoint.survey import Failure, ModuleState, Report, disagreement, local_part
from shardkit.core.materialize import allocate, homes
from shardkit.core.region import Region
from shardkit.core.torch_compat import like_dtensor

__all__ = ["IncompatibleKeys", "load_full_state_dict"]


class IncompatibleKeys(NamedTuple):
    """What did not match, with the field names of `nn.Module.load_state_dict`'s result."""

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

    Collective over `group`. The ranks first tell each other what they hold, so an error is raised on all of them and
    nothing has been changed by then. A file that every rank can open is read by every rank, its own pieces only;
    otherwise rank 0 reads and sends each rank its piece. Beside the module and the source, rank 0 holds at most one
    full tensor and other ranks hold at most their piece of one.

    Parameters and persistent buffers on the meta device get memory on the way, on the mesh's device. Non-persistent
    buffers are in no state dict: if there are any on the meta device, call `materialize` before this. Values are cast
    to the dtype of the parameter or buffer. Of tied parameters one name is enough.

    Args:
        module: any module; its parameters are DTensors on any meshes (Shard, strided Shard, Replicate; uneven and
            empty shards) or plain tensors, which get the full value on every rank.
        source: on rank 0 a dict of name -> plain tensor, or a path of a safetensors or torch.save file; on other ranks
            the same path, or anything.
        strict: raise for missing and unexpected names.
        assign: replace parameters and buffers by new tensors of the source's dtype instead of writing into them.
        group: the ranks that share the module, by default all; "rank 0" is its first.

    Returns:
        Names that the source lacks, and names that the module does not know.

    Raises:
        RuntimeError: missing or unexpected names (strict), entries of another shape, modules that differ by rank.
        TypeError, ValueError, OSError, ImportError: a source that cannot be read; raised on every rank.
    """
    peers = Peers.of(group)
    state, opened, report = _survey(module, source)
    reports = peers.gather(report)
    verdict = peers.from_rank0(None if reports is None else _judge(module, reports, opened, strict))
    if verdict.failure is not None:
        raise verdict.failure.exception()
    if state is None:
        raise AssertionError("a rank that failed to look at its module has failed the others too")
    stream = _Stream(peers, verdict, opened, reports)
    if assign:
        _assign(module, state, stream)
    else:
        _write(module, state, stream)
    if verdict.objects:
        module.load_state_dict(verdict.objects, strict=False)
    return IncompatibleKeys(list(verdict.missing), list(verdict.unexpected))


@dataclass(frozen=True)
class _Verdict:
    """What rank 0 decides for all."""

    failure: Failure | None = None
    entries: dict[str, Entry] = field(default_factory=dict)  # what is loaded, in order
    objects: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    everyone_reads: bool = False
    whole: frozenset[str] = frozenset()  # tensors that every rank holds all of


def _survey(module: nn.Module, source: object) -> tuple[ModuleState | None, Source | None, Report]:
    """Looks at this rank's module and source. Errors go into the report: raised here, they would make others wait."""
    opened: Source | None = None
    unreadable: Failure | None = None
    try:
        opened = open_source(source)
    except Exception as error:  # noqa: BLE001
        unreadable = Failure.from_exception(error, "cannot read the source")
    try:
        state = ModuleState.of(module)
        report = state.report(opened.fingerprint if opened else None)
    except Exception as error:  # noqa: BLE001
        failure = Failure.from_exception(error, f"cannot read the state of {type(module).__name__}")
        return None, opened, Report(failure=failure)
    return state, opened, replace(report, unreadable=unreadable)


def _judge(module: nn.Module, reports: list[Report], source: Source | None, strict: bool) -> _Verdict:
    """Rank 0's decision, from everybody's report."""
    mine = reports[0]
    failure = disagreement(reports) or mine.unreadable
    if failure is not None:
        return _Verdict(failure)
    if source is None:
        return _Verdict(Failure(TypeError, "the source on rank 0 is neither a dict of tensors nor a path"))
    seen = [*source.entries, *source.objects]
    expected = [*mine.slots, *mine.objects]
    tied = {name: names for names in mine.ties for name in names}
    missing = [name for name in expected if not any(alias in seen for alias in tied.get(name, (name,)))]
    unexpected = [name for name in seen if name not in expected]
    complaints = [f"{name}: {text}" for name in mine.slots if (text := _misfit(name, mine, source))]
    if strict:
        complaints += [f"{name}: missing in the source, {_expected(name, mine)}" for name in missing]
        complaints += [f"{name}: in the source, but not in the module" for name in unexpected]
    if complaints:
        hint = " (strict=False accepts missing and unknown names)" if strict and (missing or unexpected) else ""
        text = f"the source does not fit {type(module).__name__}{hint}:\n  " + "\n  ".join(complaints)
        return _Verdict(Failure(RuntimeError, text))
    fingerprints = {report.fingerprint for report in reports}
    return _Verdict(
        entries={name: source.entries[name] for name in mine.slots if name in source.entries},
        objects={name: source.objects[name] for name in mine.objects if name in source.objects},
        missing=tuple(missing),
        unexpected=tuple(unexpected),
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
    entry = source.entries.get(name)
    if entry is None:
        return None
    if entry.shape != slot.shape:
        return f"seen shape {entry.shape}, {_expected(name, report)}"
    if entry.dtype.is_complex and not slot.dtype.is_complex:
        return f"seen {entry.dtype}, whose imaginary part would be lost, {_expected(name, report)}"
    return None


def _expected(name: str, report: Report) -> str:
    slot = report.slots.get(name)
    return "expected extra state" if slot is None else f"expected shape {slot.shape} ({slot.dtype})"


class _Stream:
    """Brings one tensor after the other to its owners; every rank asks for the same names in the same order."""

    def __init__(self, peers: Peers, verdict: _Verdict, source: Source | None, reports: list[Report] | None) -> None:
        self.entries = verdict.entries
        self._peers = peers
        self._verdict = verdict
        self._source = source
        self._reports = reports

    def fill(self, name: str, local: torch.Tensor, region: Region, device_type: str) -> None:
        """Writes this rank's piece of a tensor into `local`, in the dtype of `local`."""
        if self._verdict.everyone_reads:
            if region.numel:
                local.copy_(self._read(name, region))
            return
        wire = self._peers.device_for(device_type)
        if name in self._verdict.whole:
            buffer = _landing(local, wire)
            if self._peers.rank == 0:
                buffer.copy_(self._read(name, region))
            self._peers.broadcast(buffer)
        elif self._reports is not None:
            self._send(name, self._reports, local.dtype, wire)
            if region.numel:
                local.copy_(self._read(name, region))
            return
        elif region.numel:
            buffer = _landing(local, wire)
            self._peers.exchange(receives=[(0, buffer)])
        else:
            return
        if buffer is not local:
            local.copy_(buffer)

    def _read(self, name: str, region: Region) -> torch.Tensor:
        if self._source is None:
            raise AssertionError(f"{name}: this rank was asked to read, but it has no source")
        return self._source.read(name, region)

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
        self._peers.exchange(sends=sends)


def _landing(local: torch.Tensor, wire: torch.device) -> torch.Tensor:
    """Where a piece of `local` arrives: in place if possible."""
    if local.device == wire and local.is_contiguous():
        return local
    return torch.empty(local.shape, dtype=local.dtype, device=wire)


@torch.no_grad()
def _write(module: nn.Module, state: ModuleState, stream: _Stream) -> None:
    """Writes into the tensors that the module has; those on the meta device get memory first."""
    wanted = {id(state.tensors[name]) for name in stream.entries if state.tensors[name].is_meta}
    if wanted:
        allocate(module, lambda tensor: id(tensor) in wanted)
        state = ModuleState.of(module)
    report = state.report(None)
    for name in stream.entries:
        slot = report.slots[name]
        stream.fill(name, local_part(state.tensors[name]), slot.region, slot.device_type)


@torch.no_grad()
def _assign(module: nn.Module, state: ModuleState, stream: _Stream) -> None:
    """Builds new tensors in the source's dtype, then puts them in place together; tied names stay tied."""
    report, home_of = state.report(None), homes(module)
    fresh: dict[int, torch.Tensor] = {}
    assigned: dict[str, torch.Tensor] = {}
    for name, entry in stream.entries.items():
        old, slot = state.tensors[name], report.slots[name]
        device = home_of(old) if slot.meta else local_part(old).device
        if id(old) not in fresh:
            fresh[id(old)] = _like(old, torch.empty(local_part(old).shape, dtype=entry.dtype, device=device))
        local = local_part(fresh[id(old)])
        device_type = local.device.type if slot.device_type == "meta" else slot.device_type
        stream.fill(name, local, slot.region, device_type)
        assigned[name] = fresh[id(old)]
    for names in report.ties:
        loaded = [assigned[name] for name in names if name in assigned]
        assigned.update(dict.fromkeys(names, loaded[-1]) if loaded else {})
    module.load_state_dict(assigned, strict=False, assign=True)


def _like(old: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    tensor = like_dtensor(local, old) if isinstance(old, DTensor) else local
    if isinstance(old, nn.Parameter):
        return nn.Parameter(tensor, requires_grad=old.requires_grad)
    return tensor
