"""What a command line names: a job, a mesh, a machine, an optimizer."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardkit.tools.estimating.costs import OperatorCosts
from shardkit.tools.estimating.errors import EstimateError, explained
from shardkit.tools.estimating.job import TrainingJob
from shardkit.tools.estimating.llama import model_from_hf_config, vocabulary_of
from shardkit.tools.estimating.policies import Policies
from shardkit.tools.estimating.tensor_parallel import plan_of_config
from shardkit.tools.machine import Machine, load_machine, preset

__all__ = [
    "bytes_of",
    "costs_for",
    "job_from_config",
    "job_from_name",
    "load",
    "machine_named",
    "mesh_of",
    "optimizer_named",
]

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
    from shardkit.tools.estimating.measured_costs import MeasuredCosts

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
