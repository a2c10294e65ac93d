"""`python -m shardkit.legacy_fsdp_compat migrate`; an entry point also offers it to the `shardkit` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardkit.commands.migrate import parse
from shardkit.core.checkpoint.conversion import refuse_existing
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.core.checkpoint.leaves import name_of
from shardkit.core.checkpoint.stored import Checkpoint
from shardkit.core.checkpoint.terminal import run_conversion, status_of
from shardkit.legacy_fsdp_compat.migrate.conversion import (
    LOCAL,
    SHARDED,
    convert,
    open_checkpoint,
    shapes_of_checkpoint,
    shapes_of_file,
)
from shardkit.legacy_fsdp_compat.migrate.model_wrapping import (
    model_of,
    parameters_of_model,
    shapes_of_model,
    wrapping_of_model,
)
from shardkit.legacy_fsdp_compat.migrate.rank_writers import LocalRanks, Ranks, parameters_in_groups
from shardkit.legacy_fsdp_compat.migrate.wrapping import (
    Shapes,
    Wrapping,
    shapes_of_config,
    wrapping_of_config,
    wrapping_of_file,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or 2 after an error, which is printed to stderr."""
    options = parse(arguments)
    if "file" in options:
        from shardkit.legacy_fsdp_compat.migrate.script import main as rewrite_script  # imports libcst: 0.3 s

        return rewrite_script(options)
    return status_of(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    refuse_existing(options.target)  # before reading anything
    if (options.to in (SHARDED, LOCAL)) != (options.ranks is not None):
        raise CheckpointError(
            f"--to {options.to} and --ranks {options.ranks}: '{SHARDED}' and '{LOCAL}' need a number, others none; "
            "give --ranks for these alone"
        )
    if options.like is not None and options.to != LOCAL:
        raise CheckpointError(
            f"--to {options.to} and --like {options.like}: only '{LOCAL}' depends on the wrapping; leave --like out"
        )
    known = _known(options)
    source = options.source[0] if len(options.source) == 1 else options.source
    checkpoint = open_checkpoint(source, known.shapes, without=options.without)
    ranks = _ranks(options, checkpoint, known)
    return run_conversion(
        options,
        checkpoint,
        options.to,
        lambda report: convert(checkpoint, options.target, options.to, ranks=ranks, progress=report),
    )


@dataclass(frozen=True)
class _Known:
    """The model's description from the command line. Parts that not every target needs are computed on demand: LOCAL
    files of ours may come from a wrapping that FSDP1 does not support.

    Attributes:
        shapes: shapes of parameters and buffers; None if not given.
        parameters: returns the names of sharded parameters; None if they cannot be told from buffers.
        wrapping: returns how the model is wrapped; None if not given.
    """

    shapes: Shapes | None = None
    parameters: Callable[[], Collection[str]] | None = None
    wrapping: Callable[[], Wrapping] | None = None


def _known(options: argparse.Namespace) -> _Known:
    if options.shapes is not None:
        return _Known(shapes_of_file(options.shapes))
    if options.config is not None:
        shapes, parameters = shapes_of_config(options.config)
        return _Known(shapes, lambda: parameters, partial(wrapping_of_file, options.config))
    if options.model is None:
        return _Known()
    sys.path.insert(0, str(Path.cwd()))
    model, arguments = model_of(options.model)
    return _Known(
        shapes_of_model(model),
        partial(parameters_of_model, model, arguments or {}),
        None if arguments is None else partial(wrapping_of_model, model, arguments),
    )


def _ranks(options: argparse.Namespace, checkpoint: Checkpoint, known: _Known) -> Ranks | LocalRanks | None:
    if options.to == LOCAL:
        return LocalRanks(options.ranks, _wrapping(options, checkpoint, known))
    return Ranks(options.ranks, _parameters(checkpoint, known)) if options.to == SHARDED else None


def _wrapping(options: argparse.Namespace, checkpoint: Checkpoint, known: _Known) -> Wrapping:
    if options.like is not None:
        shapes = shapes_of_checkpoint(checkpoint) if known.shapes is None else known.shapes
        example = open_checkpoint(options.like, shapes)
        if example.config is None:
            raise CheckpointError(
                f"{options.like} is a {example.kind} checkpoint, and does not show how the model is wrapped; pass "
                "--config or --model"
            )
        return wrapping_of_config(example.config, options.like)
    if known.wrapping is None:
        raise CheckpointError(
            "LOCAL files depend on how the model is wrapped: pass --config FILE (JSON, or the migration.json of a "
            "conversion from LOCAL), --like DIRECTORY (such files), or --model MODULE:FUNCTION that returns the model "
            "and the arguments of FullyShardedDataParallel, such as auto_wrap_policy and use_orig_params"
        )
    return known.wrapping()


def _parameters(checkpoint: Checkpoint, known: _Known) -> Collection[str]:
    if known.parameters is not None:
        return known.parameters()
    found = parameters_in_groups(checkpoint)
    if not found:
        raise CheckpointError(
            "this file does not distinguish parameters, which are sharded, from buffers: it has no optimizer with "
            "names; pass --model MODULE:FUNCTION"
        )
    whole = [name_of(at) for at, one in checkpoint.tensors.items() if one.shape and not found.intersection(at)]
    if whole:
        checkpoint.notes.append(
            f"no group of an optimizer lists {whole[:5]} ({len(whole)} in all), so every rank's file has them whole as "
            "buffers are; stock loads no parameter so: if some are frozen or tied ones, pass --model MODULE:FUNCTION"
        )
    return found
