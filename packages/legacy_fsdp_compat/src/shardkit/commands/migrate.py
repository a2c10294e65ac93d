"""The options of the `migrate` command, which `shardkit.legacy_fsdp_compat.migrate.command` runs. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shardkit.commands.checkpoint import Parser, add_conversion_options

__all__ = ["TARGETS", "parse"]

TARGETS = ("dcp", "safetensors", "full", "sharded", "local")
"""The formats that a checkpoint can be converted to; `migrate.conversion` describes them."""

_DESCRIPTION = """\
Converts FSDP1 checkpoints on one machine, without a process group: FULL (one file), SHARDED (a directory of
torch.distributed.checkpoint, or a file for each rank) and LOCAL (a file for each rank), weights and optimizer state.
The source is only read. The target appears when it is complete and was read back. Start an interrupted conversion
again, and it continues where it stopped. `migrate script FILE` rewrites a training script instead.
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; for `migrate script` these are `file` and `write`. None means `sys.argv`.

    Prints help or an error and exits, if needed.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["script"]:
        return _script_parser().parse_args(arguments[1:])
    parser = Parser("shardkit migrate", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="+", type=Path, help="a file, a directory, or the files of all ranks")
    parser.add_argument("target", type=Path, help="the directory to make")
    parser.add_argument(
        "--to",
        choices=TARGETS,
        default="dcp",
        help="dcp: a directory of torch.distributed.checkpoint, which core, FSDP2 and FSDP1's SHARDED load (default); "
        "safetensors: one file; full: one file of torch.save, as FSDP1's FULL; sharded, local: a file of torch.save "
        "for each rank, as FSDP1's SHARDED and LOCAL, which need --ranks",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="how many files to write, with --to sharded and --to local. For sharded, --model or --config tells which "
        "values are parameters; without them the optimizer's names do. For local, give --config, --like or --model, "
        "which tells how the model is wrapped",
    )
    parser.add_argument(
        "--like",
        type=Path,
        help="a directory of LOCAL files whose model is wrapped like the new one; any number of ranks",
    )
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--shapes",
        type=Path,
        help="shapes of the parameters: a full checkpoint of the model, or JSON: name -> shape. A LOCAL source needs "
        "this, --model or --config",
    )
    shapes.add_argument(
        "--model",
        help="shapes and wrapping: MODULE:FUNCTION that builds the model (on the meta device), or returns it and "
        "FSDP's arguments. This imports MODULE, also from the current directory, and runs its code: name only code "
        "that you trust",
    )
    shapes.add_argument(
        "--config",
        type=Path,
        help="shapes and wrapping: a file of JSON, such as the migration.json that a conversion from LOCAL leaves",
    )
    add_conversion_options(parser)
    return parser.parse_args(arguments)


def _script_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "shardkit migrate script",
        description="Rewrites the imports and calls of an FSDP1 script that map one to one onto this package. Prints a "
        "diff to stdout, and to stderr what a person must decide.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="change the file")
    return parser
