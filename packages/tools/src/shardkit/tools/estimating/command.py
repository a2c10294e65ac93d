"""`shardkit estimate`: memory, communication and time of a training job, without running it."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardkit.tools.estimating.hf import model_from_hf_config, plan_of_config, vocabulary_of
from shardkit.tools.estimating.job import EstimateError, Policies, TrainingJob, explained, status_of, with_micro_batch
from shardkit.tools.estimating.result import Estimate, estimate_job
from shardkit.tools.estimating.tables import (
    DTYPES,
    changed,
    check_drawing,
    draw,
    dtype_of,
    number_of,
    print_sweep,
    render,
    reshard_of,
    settings_of,
    sweep,
)
from shardkit.tools.estimating.timeline import OperatorCosts
from shardkit.tools.machine import Machine, load_machine, preset, preset_names
from shardkit.tools.report.files import check_targets, write_text

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
}


def load(name: str) -> Any:
    """What `pkg.mod:name` is; the working directory is on the path.

    Raises:
        EstimateError: if there is no such thing, saying which part is missing.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not attribute or not module_name or module_name.startswith("."):
        raise EstimateError(f"'{name}' names no function; expected pkg.module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise EstimateError(f"module '{module_name}' of '{name}' cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise EstimateError(f"'{name}': {found!r} has no '{part}'")
        found = getattr(found, part)
    return found


def job_from_name(
    name: str,
    inputs: Callable[[], Any] | None,
    optimizer: Callable[..., torch.optim.Optimizer],
    policies: Policies | None,
) -> TrainingJob:
    """The job that `pkg.mod:name` is: a `TrainingJob`, a function annotated to return one, or a factory of models.

    `policies` replace those of a `TrainingJob` if they are given.

    Raises:
        EstimateError: for anything else, and for a factory without inputs.
    """
    found = load(name)
    if not isinstance(found, TrainingJob) and callable(found):
        returns = inspect.signature(found).return_annotation
        if returns is TrainingJob or str(returns).rpartition(".")[2] == "TrainingJob":
            with explained(f"'{name}' failed", "it is called without arguments"):
                found = found()
    if isinstance(found, TrainingJob):
        return found if policies is None else replace(found, policies=policies)
    if not callable(found):
        raise EstimateError(
            f"'{name}' is a {type(found).__name__}; expected a TrainingJob or a function that makes a model"
        )
    if inputs is None:
        raise EstimateError(
            f"'{name}' makes a model, but nothing says what goes in; add --inputs pkg.module:function, or --batch and "
            "--sequence for token ids (with --vocabulary), or name a TrainingJob"
        )
    return TrainingJob(found, inputs, optimizer, policies=policies or Policies())


def tokens(vocabulary: int, batch: int, sequence: int) -> torch.Tensor:
    """Token ids of shape (batch, sequence)."""
    return torch.randint(vocabulary, (batch, sequence))


def job_from_config(
    path: Path, batch: int, sequence: int, optimizer: Callable[..., torch.optim.Optimizer], policies: Policies | None
) -> TrainingJob:
    """Training of the model of a Hugging Face config on token ids."""
    inputs = partial(tokens, vocabulary_of(path), batch, sequence)
    model = partial(model_from_hf_config, path)
    return TrainingJob(model, inputs, optimizer, policies=policies or Policies(), tensor_parallel=plan_of_config(path))


def machine_named(name: str) -> Machine:
    """A preset, the description in a file, or ("this") the measured one of this machine: half a minute, announced."""
    if name == "this":
        from shardkit.tools.calibration import calibrate

        Console(stderr=True).print("measuring this machine; other programs would make it look slower", highlight=False)
        return calibrate()
    return load_machine(Path(name)) if name.endswith(".json") else preset(name)


def costs_for(name: str, machine: Machine) -> AbstractContextManager[OperatorCosts | None]:
    """Times of operators: on "this" machine by running them, else (None) by the machine's description."""
    if name != "this":
        return nullcontext()
    from shardkit.tools.calibration import MeasuredCosts

    return MeasuredCosts(machine)


def mesh_of(text: str) -> dict[str, int]:
    """`8`, or `dp_replicate=2,dp_shard=4`.

    Raises:
        EstimateError: for anything else.
    """
    parts = [part.partition("=") for part in text.split(",")]
    try:
        if len(parts) == 1 and not parts[0][1]:
            return {"dp": int(text)}
        return {name: int(count) for name, _, count in parts}
    except ValueError as error:
        raise EstimateError(f"'{text}' is no mesh; expected a number of ranks or axis=size,axis=size") from error


def bytes_of(text: str) -> int:
    """Bytes of `80GiB`, `24 GB`, `1000000`.

    Raises:
        EstimateError: for anything else.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise EstimateError(f"'{text}' is no amount of memory; expected a number with a unit, such as 80GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def optimizer_named(name: str) -> Callable[..., torch.optim.Optimizer]:
    """adamw, adam, sgd or momentum (SGD with it), or `pkg.mod:function` of the parameters."""
    if name in _OPTIMIZERS:
        return _OPTIMIZERS[name]
    if ":" not in name:
        raise EstimateError(f"there is no optimizer '{name}'; expected {', '.join(_OPTIMIZERS)} or pkg.module:function")
    made: Callable[..., torch.optim.Optimizer] = load(name)
    return made


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
