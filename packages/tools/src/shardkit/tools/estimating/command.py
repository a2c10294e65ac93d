"""`shardkit estimate`, and options that `shardkit plan` shares: a job, a mesh, a machine, an optimizer."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardkit.core.users_code import import_named, users_code
from shardkit.tools.estimating.hf import job_from_config
from shardkit.tools.estimating.job import (
    EstimateError,
    Policies,
    Precision,
    TrainingJob,
    muon,
    muon_placements,
    with_micro_batch,
)
from shardkit.tools.estimating.result import Estimate, estimate_job
from shardkit.tools.estimating.tables import Point, print_estimate, print_sweep
from shardkit.tools.estimating.workers import Workers
from shardkit.tools.files import InputError, check_targets, json_text, write_text
from shardkit.tools.machine import Machine, load_machine, preset
from shardkit.tools.quantities import dtype_name
from shardkit.tools.terminal import progress, terminal

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "muon": muon,
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}
_DTYPES = {"own": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RESHARD = {"default": None, "true": True, "false": False}

# Settings that a sweep can vary -> their values if the command line gives none.
_SETTINGS = {
    "world-size": ("8", "16", "32", "64"),
    "reshard": ("true", "false"),
    "dtype": ("own", "bfloat16"),
    "prefetch": ("0", "1", "2"),
    "micro-batch": ("1", "2", "4"),
}


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit estimate`; exit status 1 if no point of a sweep can be estimated. Raises `InputError`."""
    if options.show_machine:
        sys.stdout.write(json_text(machine_named(options.show_machine).to_json(), indent=2))
        return 0
    check_targets(options.json)
    values = _settings_of(options.sweep)
    mesh, machine, job = mesh_of(options.mesh), machine_of(options), job_of(options)

    def estimated(combination: tuple[str, ...]) -> Estimate:
        settings = dict(zip(values, combination, strict=True))
        axes = mesh_of(settings["world-size"]) if "world-size" in settings else mesh
        chosen = replace(job, policies=_changed(job.policies, settings))
        if "micro-batch" in settings:
            chosen = with_micro_batch(chosen, _count_of("micro-batch", settings["micro-batch"], 1))
        return estimate_job(chosen, axes, machine, rank=options.rank)

    if values:
        points = _sweep(values, Workers(estimated))
        print_sweep(points, terminal())
        found: Any = [{"settings": p.settings, "estimate": p.estimate and p.estimate.to_json()} for p in points]
    else:
        one = estimated(())
        print_estimate(one, terminal())
        found = one.to_json()
    if options.json is not None:
        write_text(options.json, json_text(found, indent=2))
    return int(bool(values) and all(point.estimate is None for point in points))


# -- sweeps ------------------------------------------------------------------------------------------------------------


def _settings_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`world-size=8,64`, or names alone (`dtype,prefetch`) for the usual values."""
    chosen: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, given, values = text.partition("=")
        for one in [name] if given else name.split(","):
            if one not in _SETTINGS:
                expected = ", ".join(_SETTINGS)
                raise EstimateError(f"'{one}' cannot be swept; expected {expected}, with or without =VALUES")
            chosen[one] = tuple(values.split(",")) if given else _SETTINGS[one]
    return chosen


def _sweep(values: Mapping[str, Sequence[str]], workers: Workers[tuple[str, ...]]) -> list[Point]:
    """Estimates every combination of the values. One that fails shows its error in the table; the others continue."""
    points = []
    combinations = list(itertools.product(*values.values()))
    with workers, progress("estimating") as done:
        workers.begin(combinations)
        for number, combination in enumerate(combinations):
            done(number, len(combinations))
            settings = dict(zip(values, combination, strict=True))
            try:
                points.append(Point(settings, workers.estimate(combination)))
            except InputError as error:
                points.append(Point(settings, None, str(error)))
    return points


# -- what options name -------------------------------------------------------------------------------------------------


def job_of(options: SimpleNamespace) -> TrainingJob:
    """The job that the options describe; raises `EstimateError` if they describe none, or it cannot be made."""
    optimizer, policies = _optimizer(options.optimizer), _policies(options)
    parameters, state = (_DTYPES[text or "own"] for text in (options.param_dtype, options.optimizer_dtype))
    batch, sequence = options.batch or 1, options.sequence or 2048
    if options.hf_config is not None:
        own = options.dtype == "own"
        job = job_from_config(options.hf_config, batch, sequence, optimizer, policies or Policies(), own_dtype=own)
    elif options.model is None:
        raise EstimateError("expected a model (pkg.module:name) or --hf-config")
    else:
        inputs: Callable[[], Any] | None = None
        if options.inputs:
            inputs = _function(options.inputs, "--inputs")
        elif options.vocabulary:
            inputs = partial(torch.randint, options.vocabulary, (batch, sequence))
        job = _job_named(options.model, inputs, optimizer, policies)
    if options.tp_plan:
        job = replace(job, tensor_parallel=_function(options.tp_plan, "--tp-plan"))
    return replace(job, precision=Precision(parameters, state, options.master_weights))


def _job_named(
    name: str,
    inputs: Callable[[], Any] | None,
    optimizer: Callable[..., torch.optim.Optimizer],
    policies: Policies | None,
) -> TrainingJob:
    """The job that `pkg.mod:name` means: a `TrainingJob`, a function annotated to return one, or a model factory.

    If `policies` are given, they replace those of a `TrainingJob`.
    """
    found = import_named(name, f"model {name}", "a TrainingJob or a function that makes a model", EstimateError)
    if not isinstance(found, TrainingJob) and callable(found):
        with users_code(f"the signature of {name}", "expected a function", EstimateError):
            returns = inspect.signature(found).return_annotation
        if returns is TrainingJob or str(returns).rpartition(".")[2] == "TrainingJob":
            with users_code(name, "it is called without arguments", EstimateError):
                found = found()
    if isinstance(found, TrainingJob):
        if inputs is not None:
            raise EstimateError(
                f"'{name}' is a TrainingJob, which makes its own inputs; leave out --inputs, --vocabulary"
            )
        return found if policies is None else replace(found, policies=policies)
    if not callable(found):
        kind = type(found).__name__
        raise EstimateError(f"'{name}' is of type {kind}; expected a TrainingJob or a function that makes a model")
    if inputs is None:
        raise EstimateError(
            f"'{name}' makes a model, but nothing says what goes in; add --inputs pkg.module:function, or --vocabulary "
            "for token ids (with --batch and --sequence), or name a TrainingJob"
        )
    return TrainingJob(found, inputs, optimizer, policies=policies or Policies())


def _function(name: str, option: str) -> Callable[..., Any]:
    found = import_named(name, f"{option} {name}", "a function", EstimateError)
    if not callable(found):
        raise EstimateError(f"{option} {name} is of type {type(found).__name__}; expected a function")
    function: Callable[..., Any] = found
    return function


def _optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name not in _OPTIMIZERS and ":" not in name:
        raise EstimateError(f"there is no optimizer '{name}'; expected {', '.join(_OPTIMIZERS)} or pkg.module:function")
    return _OPTIMIZERS.get(name) or _function(name, "--optimizer")


def _policies(options: SimpleNamespace) -> Policies | None:
    """The policies that the options describe; None if they describe none."""
    names = ("checkpoint", "offload", "accumulate", "prefetch_budget")
    told: dict[str, Any] = {name: getattr(options, name, None) for name in names}  # a plan has fewer options
    told["prefetch_depth"] = options.prefetch
    if options.selective:
        told["checkpoint"] = "selective"
    told = {name: value for name, value in told.items() if value is not None}
    if options.placements is not None:
        told["placements"] = _placements(options)
    if options.wrap is not None:
        told["wrap"] = tuple(name for name in options.wrap.split(",") if name)
    texts = {"reshard": getattr(options, "reshard", None), "dtype": options.dtype, "reduce-dtype": options.reduce_dtype}
    policies = _changed(Policies(**told), {name: text for name, text in texts.items() if text is not None})
    return policies if told or any(texts.values()) else None


def _changed(policies: Policies, settings: Mapping[str, str]) -> Policies:
    """The policies with some settings changed, given as texts."""
    changes: dict[str, Any] = {}
    if (text := settings.get("reshard")) is not None:
        changes["reshard_after_forward"] = _RESHARD[text] if text in _RESHARD else _count_of("reshard", text, 1)
    for setting, name in (("dtype", "param_dtype"), ("reduce-dtype", "reduce_dtype")):
        if (text := settings.get(setting)) is not None:
            if (known := dtype_name(text)) not in _DTYPES:
                raise EstimateError(f"'{text}' is not a dtype to compute in; expected {', '.join(_DTYPES)}")
            changes[name] = _DTYPES[known]
    if "prefetch" in settings:
        changes["prefetch_depth"] = _count_of("prefetch", settings["prefetch"], 0)
    return replace(policies, **changes)


def _count_of(name: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise EstimateError(f"{name} is '{text}'; expected a whole number from {least} on")
    return int(text)


def _placements(options: SimpleNamespace) -> Callable[..., Any] | None:
    if options.placements != "auto":
        return _function(options.placements, "--placements")
    if options.optimizer not in _OPTIMIZERS:
        raise EstimateError(
            f"--placements auto knows what suits {', '.join(_OPTIMIZERS)}; for '{options.optimizer}' give "
            "pkg.module:name of a function that gets the model and returns a shard_placement_fn"
        )
    return muon_placements if options.optimizer == "muon" else None


def machine_of(options: SimpleNamespace) -> Machine:
    """The machine and the kind of segments that the options describe; raises `MachineError` as `machine_named`."""
    machine = machine_named(options.machine)
    return machine.replace(expandable_segments=True) if options.expandable_segments else machine


def machine_named(name: str) -> Machine:
    """A preset, a description in a file, or ("this") this machine, measured in half a minute. Raises `MachineError`."""
    if name == "this":
        from shardkit.tools.calibration import calibrate

        terminal(stderr=True).print("measuring this machine; other programs would make it look slower")
        return calibrate()
    return load_machine(Path(name)) if name.endswith(".json") else preset(name)


def mesh_of(text: str) -> dict[str, int]:
    """`8`, or `dp_replicate=2,dp_shard=4`; raises `EstimateError` for anything else."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, count = part.rpartition("=")
        name = name if equals else "dp"
        if name in axes or not name or not count.isascii() or not count.isdigit() or (not equals and "," in text):
            raise EstimateError(f"'{text}' is not a mesh; expected a number of ranks or axis=size,axis=size")
        axes[name] = int(count)
    return axes
