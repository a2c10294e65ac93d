"""The options of the `checkpoint` command, which `shardkit.core.checkpoint.command` runs.

They are outside of `shardkit.core`, whose import takes seconds because it imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["Parser", "add_conversion_options", "parse"]

_DESCRIPTION = """\
Inspects and converts checkpoints on one machine, without a process group. A checkpoint is a directory that
CheckpointManager or torch.distributed.checkpoint has written; in a directory of several, the newest is used. A source
may also be a URL of an object store, such as s3://bucket/run. Sources are only read, and verified where they have
checksums; a target appears when it is complete. Start an interrupted conversion again, and it continues where it
stopped.
"""


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, and where to read more."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in message)
        self.exit(2, f"error: {shown} ({self.prog} --help says more)\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; `command` is the subcommand. None means `sys.argv`. Prints help or an error and exits, if needed."""
    parser = Parser(
        "shardkit checkpoint", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def add_for_one(name: str, text: str) -> argparse.ArgumentParser:
        command = add(name, text)
        command.add_argument("source", help="a checkpoint, or a directory or URL of several: the newest of these")
        command.add_argument("--fallback", action="store_true", help="if it is damaged, take the one before it")
        return command

    add_for_one("inspect", "the contents of a checkpoint; no values are read")
    _add_progress_option(add_for_one("verify", "read all of a checkpoint and compare every checksum"))
    one = add("diff", "the tensors and values in which two checkpoints differ, however they are sharded")
    one.add_argument("first", help="a checkpoint, or a directory or URL of several: the newest of these")
    one.add_argument("second", help="the checkpoint to compare it with")
    _add_progress_option(one)
    one = add_for_one("export", "weights as safetensors in the layout of Hugging Face, or one file of torch.save")
    one.add_argument(
        "target", type=Path, help="to make: a directory with --to safetensors, a file with --to torch; must not exist"
    )
    one.add_argument(
        "--to",
        choices=("safetensors", "torch"),
        default="safetensors",
        help="safetensors: one or more files and their index, as Hugging Face loads them (default); torch: one file "
        "that torch.load reads",
    )
    one.add_argument(
        "--prefix", default="model.", help="export only names with this prefix, and strip it (default: model.)"
    )
    one.add_argument("--all", action="store_true", help="everything, nested as it was saved; only for --to torch")
    one.add_argument("--file-mb", type=_positive, default=5000, help="MB in a safetensors file (default: 5000)")
    add_conversion_options(one)
    one = add("import", "a checkpoint of weights from safetensors files or a file of torch.save")
    one.add_argument("source", type=Path, help="a file, or a directory with a Hugging Face index")
    one.add_argument("target", type=Path, help="the checkpoint's directory to make; must not exist")
    one.add_argument("--key", help="import only the entry under this key of a torch.save file")
    one.add_argument("--ranks", type=_positive, default=1, help="data files to write (default: 1)")
    add_conversion_options(one)
    one = add_for_one("reshard", "the same checkpoint in another number of data files")
    one.add_argument("target", type=Path, help="the checkpoint's directory to make; must not exist")
    one.add_argument("--ranks", type=_positive, required=True, help="data files to write")
    add_conversion_options(one)
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return value


def _add_progress_option(parser: argparse.ArgumentParser) -> None:
    """Adds the progress option of commands that read everything."""
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that write a target."""
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="KEY",
        help="omit a value, or a dict and everything below it (repeatable)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the source and the planned output; write nothing")
    _add_progress_option(parser)
