"""`shardkit estimate`: memory, communication and time of a training job, without running it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from shardkit.tools.estimating.batches import with_micro_batch
from shardkit.tools.estimating.costs import OperatorCosts
from shardkit.tools.estimating.errors import EstimateError, status_of
from shardkit.tools.estimating.job import TrainingJob
from shardkit.tools.estimating.policies import Policies
from shardkit.tools.estimating.render import render
from shardkit.tools.estimating.result import Estimate, estimate_job
from shardkit.tools.estimating.sweep import (
    DTYPES,
    changed,
    check_drawing,
    draw,
    dtype_of,
    number_of,
    print_sweep,
    reshard_of,
    settings_of,
    sweep,
)
from shardkit.tools.estimating.targets import (
    bytes_of,
    costs_for,
    job_from_config,
    job_from_name,
    load,
    machine_named,
    mesh_of,
    optimizer_named,
    tokens,
)
from shardkit.tools.machine import Machine, preset_names
from shardkit.tools.report.files import check_targets, write_text

__all__ = ["add_job_arguments", "job_of", "main"]

_DESCRIPTION = """\
Runs one iteration of a training job with tensors that have no data, as one rank of a world that does not exist, and
says what it takes: memory by category and where it peaks, what is sent over which links, predicted times, and the size
of a checkpoint. Nothing is downloaded and no device is needed.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or 1 after an error, which is printed to stderr."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("shardkit estimate", description=_DESCRIPTION)
    add_job_arguments(parser)
    parser.add_argument("--rank", type=int, default=0, help="as which rank to run (default 0)")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="SETTING[=VALUES]", help="what if: world-size, reshard, dtype, "
        "prefetch, micro-batch, each with values or without; several make a grid"
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, help="draws a sweep to this image file")
    parser.add_argument("--json", type=Path, help="writes the estimate, or those of the sweep, to this file")
    parser.add_argument("--show-machine", metavar="NAME", help="prints a machine's description and ends")
    return parser


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """What tells a job, its world and its machine."""
    parser.add_argument("model", nargs="?", help="pkg.module:name of a TrainingJob or of a function that makes a model")
    parser.add_argument("--hf-config", type=Path, help="a Hugging Face config.json in place of a model")
    parser.add_argument("--inputs", metavar="NAME", help="pkg.module:name of a function that makes a micro-batch")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch of token ids (default 1)")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence (default 2048)")
    parser.add_argument("--vocabulary", type=int, help="makes micro-batches of token ids below this for a model")
    parser.add_argument("--optimizer", default="adamw", help="adamw, adam, sgd, momentum or pkg.module:name")
    parser.add_argument(
        "--world-size", "--mesh", default="8", metavar="MESH", help="ranks, or axis=size,... (default 8)"
    )
    parser.add_argument(
        "--machine", default="h100", help=f"{', '.join(preset_names())}, this (is measured), or a file.json"
    )
    parser.add_argument("--wrap", help="FQNs or class names to shard by themselves (default: repeated blocks)")
    parser.add_argument("--reshard", help="after forward: true, false, default or a number of ranks")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of computation")
    parser.add_argument("--reduce-dtype", choices=list(DTYPES), help="of gradient reduction")
    parser.add_argument("--prefetch", help="groups gathered ahead (default 1)")
    parser.add_argument("--prefetch-budget", help="bytes unsharded at a time, such as 2GiB, in place of --prefetch")
    parser.add_argument("--tp-plan", metavar="NAME", help="pkg.module:name of a function that cuts a model over a mesh")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations of wrapped modules")
    parser.add_argument("--offload", action="store_true", help="keep shards and optimizer state in host memory")
    parser.add_argument("--accumulate", help="micro-batches of an iteration (default 1)")


def job_of(options: argparse.Namespace) -> TrainingJob:
    """The job that the arguments tell.

    Raises:
        EstimateError: if they tell none, or two.
    """
    if (options.model is None) == (options.hf_config is None):
        raise EstimateError("expected a model (pkg.module:name) or --hf-config, and not both")
    optimizer, policies = optimizer_named(options.optimizer), _policies(options)
    if options.hf_config is not None:
        job = job_from_config(options.hf_config, options.batch, options.sequence, optimizer, policies)
    else:
        job = job_from_name(options.model, _inputs(options), optimizer, policies)
    return replace(job, tensor_parallel=load(options.tp_plan)) if options.tp_plan else job


def _inputs(options: argparse.Namespace) -> Callable[[], Any] | None:
    if options.inputs:
        made: Callable[[], Any] = load(options.inputs)
        return made
    if options.vocabulary:
        return partial(tokens, options.vocabulary, options.batch, options.sequence)
    return None


def _policies(options: argparse.Namespace) -> Policies | None:
    """The policies that the arguments tell; None if they tell nothing of them."""
    told: dict[str, Any] = {}
    if options.wrap is not None:
        told["wrap"] = tuple(name for name in options.wrap.split(",") if name)
    if options.reshard is not None:
        told["reshard_after_forward"] = reshard_of(options.reshard)
    for name, text in (("param_dtype", options.dtype), ("reduce_dtype", options.reduce_dtype)):
        if text is not None:
            told[name] = dtype_of(text)
    if options.prefetch is not None:
        told["prefetch_depth"] = number_of("--prefetch", options.prefetch, 0)
    if options.prefetch_budget is not None:
        told["prefetch_budget"] = bytes_of(options.prefetch_budget)
    if options.accumulate is not None:
        told["accumulate"] = number_of("--accumulate", options.accumulate, 1)
    told |= {name: True for name in ("checkpoint", "offload") if getattr(options, name)}
    return Policies(**told) if told else None


def _run(options: argparse.Namespace) -> int:
    if options.show_machine:
        sys.stdout.write(json.dumps(machine_named(options.show_machine).to_json(), indent=2) + "\n")
        return 0
    check_targets(options.json, options.plot)
    if options.plot is not None:
        check_drawing(options.plot)
    machine, console = machine_named(options.machine), Console()
    job = job_of(options)
    with costs_for(options.machine, machine) as costs:
        if options.sweep:
            return _sweep(options, job, machine, costs, console)
        found = estimate_job(job, mesh_of(options.world_size), machine, rank=options.rank, costs=costs)
    render(found, console)
    if options.json is not None:
        write_text(options.json, json.dumps(found.to_json(), indent=2) + "\n")
    return 0


def _sweep(
    options: argparse.Namespace, job: TrainingJob, machine: Machine, costs: OperatorCosts | None, console: Console
) -> int:
    values = settings_of(options.sweep)

    def run(settings: Mapping[str, str]) -> Estimate:
        mesh = settings.get("world-size", options.world_size)
        chosen = replace(job, policies=changed(job.policies, settings))
        if "micro-batch" in settings:
            chosen = with_micro_batch(chosen, number_of("micro-batch", settings["micro-batch"], 1))
        return estimate_job(chosen, mesh_of(mesh), machine, rank=options.rank, costs=costs)

    points = sweep(values, run, console)
    print_sweep(points, console)
    if options.json is not None:
        found = [{"settings": dict(p.settings), "estimate": p.estimate and p.estimate.to_json()} for p in points]
        write_text(options.json, json.dumps(found, indent=2) + "\n")
    if options.plot is not None:
        draw(points, options.plot)
    return 0 if any(point.estimate for point in points) else 1
