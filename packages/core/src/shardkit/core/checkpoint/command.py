"""`python -m shardkit.core checkpoint ...`: inspects, verifies, compares, exports, imports and cuts anew what is saved.

An entry point offers it to the common command of shardkit-tools, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shardkit.core.checkpoint.comparing import differences
from shardkit.core.checkpoint.errors import CheckpointError, DamagedCheckpointError, printable
from shardkit.core.checkpoint.exporting import export_safetensors, export_torch, renamed
from shardkit.core.checkpoint.index import Index
from shardkit.core.checkpoint.manifest import MANIFEST, dtype_name
from shardkit.core.checkpoint.opening import candidates
from shardkit.core.checkpoint.reading import read_objects, stored_tensors
from shardkit.core.checkpoint.rewriting import write_checkpoint
from shardkit.core.checkpoint.sources import tensors_of_files
from shardkit.core.checkpoint.stored import StoredTensor
from shardkit.core.checkpoint.verified_file import VerifiedFile, verify

__all__ = ["main"]

T = TypeVar("T")

_DESCRIPTION = """\
Looks at and converts checkpoints on one machine, without a process group. A checkpoint is a directory that
CheckpointManager or torch.distributed.checkpoint has written; of a directory of several, the newest is meant. Sources
are only read, and verified where they have checksums; a target appears when it is complete.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status: 0, 1 if `diff` finds differences, 2 after an error, which goes to stderr."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (CheckpointError, OSError, ImportError) as error:
        sys.stderr.write(printable(f"error: {error}") + "\n")
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "checkpoint", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    def add_for_one(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = add(name, run, text)
        command.add_argument("source", type=Path, help="a checkpoint, or a directory of them: the newest of these")
        command.add_argument("--fallback", action="store_true", help="if it is damaged, take the one before it")
        return command

    add_for_one("inspect", _inspect, "what a checkpoint holds; no values are read")
    add_for_one("verify", _verify, "read all of a checkpoint and compare every checksum")
    one = add("diff", _diff, "the tensors and values in which two checkpoints differ, however they are sharded")
    one.add_argument("first", type=Path)
    one.add_argument("second", type=Path)
    one = add_for_one(
        "export", _export, "weights as safetensors in the layout of Hugging Face, or one file of torch.save"
    )
    one.add_argument("target", type=Path)
    one.add_argument("--to", choices=("safetensors", "torch"), default="safetensors")
    one.add_argument("--prefix", default="model.", help="export what has this prefix, without it (default: model.)")
    one.add_argument("--all", action="store_true", help="everything, nested as it was saved; only for --to torch")
    one.add_argument("--file-mb", type=_positive, default=5000, help="MB in a safetensors file (default: 5000)")
    one = add("import", _import, "a checkpoint of weights from safetensors files or a file of torch.save")
    one.add_argument("source", type=Path, help="a file, or a directory with a Hugging Face index")
    one.add_argument("target", type=Path)
    one.add_argument("--key", help="of a file of torch.save that holds more, what lies under this key")
    one.add_argument("--ranks", type=_positive, default=1, help="data files to write (default: 1)")
    one = add_for_one("reshard", _reshard, "the same checkpoint in another number of data files")
    one.add_argument("target", type=Path)
    one.add_argument("--ranks", type=_positive, required=True, help="data files to write")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _say(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")


def _open(path: Path) -> tuple[Path, Index]:
    found, read = candidates(path, older=False)[0]
    return found, read()


def _of_one(options: argparse.Namespace, use: Callable[[Path, Index], T]) -> T:
    """What `use` makes of the checkpoint that is meant; with `--fallback`, of the newest that is not damaged."""
    *newer, (oldest, read_oldest) = candidates(options.source, older=options.fallback)
    for path, read in newer:
        try:
            return use(path, read())
        except DamagedCheckpointError as error:
            if not options.fallback:
                raise DamagedCheckpointError(f"{error}; --fallback takes the one before") from error
            _say(f"damaged: {error}")
    return use(oldest, read_oldest())


def _inspect(options: argparse.Namespace) -> int:
    path, index = _of_one(options, lambda *found: found)
    written_by = "unknown" if index.world_size is None else index.world_size
    _say(f"{path}: step {index.step}, written by {written_by} rank(s)")
    for name, value in index.info.items():
        _say(f"  {name} = {value!r}")
    for name, entry in index.tensors.items():
        _say(f"{name}\t{dtype_name(entry.dtype)}\t{list(entry.shape)}\t{len(entry.chunks)} chunk(s)")
    for name, one in index.objects.items():
        _say(f"{name}\tobject\t{one.length} bytes")
    sealed = all(file.blocks is not None for file in index.files.values())
    _say(
        f"{len(index.tensors)} tensors, {index.nbytes / 1e6:.1f} MB, {len(index.objects)} other values, "
        f"{len(index.files)} files, {'with' if sealed else 'without'} checksums"
    )
    return 0


def _verify(options: argparse.Namespace) -> int:
    path, index = _of_one(options, _verified)
    if any(file.blocks is None for file in index.files.values()):
        raise CheckpointError(
            f"{path} has no checksums to compare: it has no {MANIFEST}, as torch.distributed.checkpoint writes none"
        )
    _say(f"{path}: {len(index.files)} files are what was written, {_megabytes(index)} MB")
    return 0


def _verified(path: Path, index: Index) -> tuple[Path, Index]:
    for file in index.files.values():
        verify(path, file)
    return path, index


def _megabytes(index: Index) -> str:
    return f"{sum(file.nbytes for file in index.files.values()) / 1e6:.1f}"


def _diff(options: argparse.Namespace) -> int:
    found = 0
    for line in differences(_open(options.first), _open(options.second)):
        _say(line)
        found += 1
    _say(f"{found} differences" if found else "no differences")
    return int(bool(found))


def _export(options: argparse.Namespace) -> int:
    def export(path: Path, index: Index) -> list[StoredTensor]:
        tensors = stored_tensors(path, index)
        if options.all:
            export_torch(options.target, tensors, read_objects(path, index, index.objects), index)
            return tensors
        tensors = renamed(tensors, options.prefix)
        if not tensors:
            raise CheckpointError(f"{path} has no tensor whose name begins with '{options.prefix}'")
        if options.to == "torch":
            export_torch(options.target, tensors, {}, Index({}, {}, {}))
        else:
            export_safetensors(options.target, tensors, options.file_mb * 10**6)
        return tensors

    if options.all and options.to != "torch":
        raise CheckpointError("--all: safetensors holds no other values than tensors; add --to torch")
    _say_written(_of_one(options, export), options.target)
    return 0


def _say_written(tensors: Sequence[StoredTensor], target: Path) -> None:
    _say(f"wrote {len(tensors)} tensors, {sum(one.nbytes for one in tensors) / 1e6:.1f} MB: {target}")


def _import(options: argparse.Namespace) -> int:
    left_out: list[str] = []
    tensors = tensors_of_files(options.source, ("model",), options.key, left_out.append)
    if not tensors:
        raise CheckpointError(f"{options.source} holds no tensors")
    for name in left_out:
        _say(f"left out, no tensor: {name}")
    write_checkpoint(options.target, tensors, {}, Index({}, {}, {}), options.ranks)
    _say_written(tensors, options.target)
    return 0


def _reshard(options: argparse.Namespace) -> int:
    def rewrite(path: Path, index: Index) -> Index:
        objects = {}
        for one in index.objects.values():
            with VerifiedFile(path, index.files[one.file]) as file:
                objects[one.path] = file.read(one.offset, one.length)
        write_checkpoint(options.target, stored_tensors(path, index), objects, index, options.ranks)
        return index

    index = _of_one(options, rewrite)
    _say(f"wrote {len(index.tensors)} tensors in {options.ranks} data file(s): {options.target}")
    return 0
