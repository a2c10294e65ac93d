"""`python -m shardkit.core checkpoint ...`: inspects, verifies, compares, exports, imports and reshards checkpoints.

An entry point also offers it to the `shardkit` command of shardkit-tools.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardkit.commands.checkpoint import parse
from shardkit.core.checkpoint.conversion import convert
from shardkit.core.checkpoint.directory import candidates
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError
from shardkit.core.checkpoint.index import MANIFEST, Index, dtype_name
from shardkit.core.checkpoint.leaves import LeafPath, LeftOut, name_of
from shardkit.core.checkpoint.location import Location, location_of
from shardkit.core.checkpoint.reading import checkpoint_of, raw_objects, read_objects, source_of, stored_tensors
from shardkit.core.checkpoint.sources import weights_of_files
from shardkit.core.checkpoint.stored import Checkpoint, StoredTensor, memory_of
from shardkit.core.checkpoint.terminal import counted, progress, run_conversion, say, sized, status_of
from shardkit.core.checkpoint.verified_file import verify
from shardkit.core.checkpoint.writers import DcpWriter, SafetensorsWriter, TorchWriter
from shardkit.core.tensors import bytes_of


def differences(
    first: tuple[Location, Index], second: tuple[Location, Index], progress: Callable[[int], object] = lambda _: None
) -> Iterator[str]:
    """Yields a line for each tensor or object that differs between two checkpoints, to the last bit, however sharded.

    `progress` receives the number of bytes of the first checkpoint that are done.

    Raises:
        DamagedCheckpointError: if either is damaged.
    """
    ours, theirs = ({one.name: one for one in stored_tensors(*each)} for each in (first, second))
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if (a is None and name in first[1].objects) or (b is None and name in second[1].objects):
            yield f"{name}: a tensor in {first[0] if b is None else second[0]}, another value in the other one"
        elif a is None or b is None:
            yield f"{name}: only in {first[0] if b is None else second[0]}"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name}: {a.dtype} {a.shape} and {b.dtype} {b.shape}"
        elif text := _of_values(a, b):
            yield f"{name}: {text}"
        progress(0 if a is None else a.nbytes)
    yield from _of_objects(first, second)


def _of_values(a: StoredTensor, b: StoredTensor) -> str | None:
    different = 0
    gaps: list[float] = []
    for one, other in zip(a.slabs(), b.slabs(), strict=True):
        if memory_of(one) == memory_of(other):
            continue
        unequal = (bytes_of(one) != bytes_of(other)).view(-1, one.itemsize).any(dim=1)
        different += int(unequal.sum())
        gaps += _gaps(one, other)
    numel = a.nbytes // a.dtype.itemsize
    by = f", by at most {max(gaps):.3g}" if gaps else ""
    return f"{different} of {numel} elements differ{by}" if different else None


def _gaps(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """The largest gap, if torch can compute with the dtype: it cannot if a byte holds two 4-bit numbers."""
    try:
        gap = (one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(float("inf"))
    except NotImplementedError:
        return []
    return [float(gap.max())]


def _of_objects(first: tuple[Location, Index], second: tuple[Location, Index]) -> Iterator[str]:
    left, right = (
        {name_of(path): value for path, value in read_objects(where, index, index.objects).items()}
        for where, index in (first, second)
    )
    tensors = first[1].tensors.keys() | second[1].tensors.keys()
    for name in sorted((left.keys() | right.keys()) - tensors):
        if name not in left or name not in right:
            yield f"{name}: only in {first[0] if name in left else second[0]}"
        elif not _same(left[name], right[name]):
            yield f"{name}: {_short(left[name])} and {_short(right[name])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal to the last bit and type: 0.0 is not -0.0, and NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        looks = [(value.dtype, value.shape, value.layout) for value in (one, other)]
        return looks[0] == looks[1] and _bits(one) == _bits(other)
    if isinstance(one, dict):
        return _same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other if isinstance(one, set) else repr(one) == repr(other)


def _bits(tensor: torch.Tensor) -> memoryview:
    return memory_of(tensor.to_dense().resolve_conj().resolve_neg().contiguous())


T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Exit status: 0, 1 if `diff` finds differences, 2 after an error, shown on stderr."""
    options = parse(arguments)
    return status_of(lambda: _COMMANDS[options.command](options))


def _open(path: str) -> tuple[Location, Index]:
    found, read = candidates(location_of(path), older=False)[0]
    return found, read()


def _of_one(options: argparse.Namespace, use: Callable[[Location, Index], T]) -> T:
    """Applies `use` to the chosen checkpoint; with `--fallback`, to the newest that is not damaged."""
    *newer, (oldest, read_oldest) = candidates(location_of(options.source), older=options.fallback)
    for path, read in newer:
        try:
            return use(path, read())
        except DamagedCheckpointError as error:
            if not options.fallback:
                raise DamagedCheckpointError(f"{error}; add --fallback to take the checkpoint before it") from error
            say(f"damaged: {error}")
    return use(oldest, read_oldest())


def _inspect(options: argparse.Namespace) -> int:
    path, index = _of_one(options, lambda *found: found)
    written_by = "an unknown number of ranks" if index.world_size is None else counted(index.world_size, "rank")
    say(f"{path}: step {index.step}, written by {written_by}")
    for name, value in index.info.items():
        say(f"  {name} = {value!r}")
    for name, entry in index.tensors.items():
        say(f"{name}\t{dtype_name(entry.dtype)}\t{list(entry.shape)}\t{counted(len(entry.chunks), 'chunk')}")
    for name, one in index.objects.items():
        say(f"{name}\tobject\t{one.length} bytes")
    sealed = all(file.blocks is not None for file in index.files.values())
    say(
        f"{counted(len(index.tensors), 'tensor')}, {sized(index.nbytes)}, "
        f"{counted(len(index.objects), 'other value')}, {counted(len(index.files), 'file')}, "
        f"{'with' if sealed else 'without'} checksums"
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    def read(path: Location, index: Index) -> tuple[Location, Index, int]:
        nbytes = sum(file.nbytes for file in index.files.values())
        with progress("verify", nbytes, shown=not options.no_progress) as report:
            for file in index.files.values():
                verify(path, file, report)
        return path, index, nbytes

    path, index, nbytes = _of_one(options, read)
    if any(file.blocks is None for file in index.files.values()):
        raise CheckpointError(
            f"{path} has no checksums to compare: it has no {MANIFEST}, as torch.distributed.checkpoint writes none; "
            "reshard it to write some"
        )
    say(f"{path}: {counted(len(index.files), 'file')} verified, {sized(nbytes)}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    first, second = _open(options.first), _open(options.second)
    found = 0
    with progress("compare", first[1].nbytes, shown=not options.no_progress) as report:
        for line in differences(first, second, report):
            say(line)
            found += 1
    entries = {name for _, index in (first, second) for name in (*index.tensors, *index.objects)}
    differ = counted(found, "difference") if found else "no differences"
    say(f"{differ}; {len(entries) - found} equal")
    return int(bool(found))


def _export(options: argparse.Namespace) -> int:
    def export(path: Location, index: Index) -> int:
        index = _kept(options, path, index)
        checkpoint = checkpoint_of(path, index) if options.all else _weights(path, index, options.prefix)
        write: Callable[[Path], TorchWriter | SafetensorsWriter]
        if options.to == "torch":
            write = partial(TorchWriter, checkpoint=checkpoint)
        else:
            write = partial(SafetensorsWriter, checkpoint=checkpoint, file_bytes=options.file_mb * 10**6)
        as_file, described = options.to == "torch", f"{options.to}, {options.file_mb} MB"
        return run_conversion(
            options,
            checkpoint,
            options.to,
            lambda report: convert(checkpoint, options.target, write, described, as_file=as_file, progress=report),
        )

    if options.all and options.to != "torch":
        raise CheckpointError("--all: safetensors holds no other values than tensors; add --to torch")
    return _of_one(options, export)


def _kept(options: argparse.Namespace, path: Location, index: Index) -> Index:
    """The index without the entries that --without names."""
    left_out = LeftOut(options.without)
    kept = index.without(left_out)
    left_out.check(path)
    return kept


def _weights(path: Location, index: Index, prefix: str) -> Checkpoint:
    """The tensors whose names begin with `prefix`, under flat names without it."""
    checkpoint = source_of(path, index)
    named = {one.name: one for one in checkpoint.tensors.values() if one.name.startswith(prefix)}
    flat = ((name.removeprefix(prefix),) for name in named)
    checkpoint.tensors = {path: replace(one, path=path) for path, one in zip(flat, named.values(), strict=True)}
    if not checkpoint.tensors:
        raise CheckpointError(f"{path} has no tensor whose name begins with '{prefix}'; give another --prefix")
    return checkpoint


def _import(options: argparse.Namespace) -> int:
    left_out = LeftOut(options.without)
    checkpoint = weights_of_files(options.source, left_out, options.key)
    left_out.check(options.source)
    if not checkpoint.tensors:
        raise CheckpointError(f"{options.source} holds no tensors; choose another file")
    return _write_sealed(options, checkpoint, {})


def _reshard(options: argparse.Namespace) -> int:
    def rewrite(path: Location, index: Index) -> int:
        index = _kept(options, path, index)
        objects = {one.path: data for one, data in raw_objects(path, index, index.objects.values())}
        return _write_sealed(options, source_of(path, index), objects)

    return _of_one(options, rewrite)


def _write_sealed(options: argparse.Namespace, checkpoint: Checkpoint, objects: dict[LeafPath, bytes]) -> int:
    write = partial(DcpWriter, checkpoint=checkpoint, objects=objects, ranks=options.ranks, sealed=True)
    return run_conversion(
        options,
        checkpoint,
        counted(options.ranks, "data file"),
        lambda report: convert(checkpoint, options.target, write, f"{options.ranks} data files", progress=report),
    )


_COMMANDS = {
    "inspect": _inspect,
    "verify": _verify,
    "diff": _diff,
    "export": _export,
    "import": _import,
    "reshard": _reshard,
}
