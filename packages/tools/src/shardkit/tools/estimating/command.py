"""`shardkit estimate`, and options that `shardkit plan` shares: a job, a mesh, a machine, an optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardkit.commands.users_code import import_named, users_code
from shardkit.tools.estimating.hf import job_from_config
from shardkit.tools.estimating.job import (
    EstimateError,
    Policies,
    Precision,
    TrainingJob,
    muon,
    muon_placements,
)
from shardkit.tools.estimating.result import estimate_job
from shardkit.tools.estimating.tables import print_estimate
from shardkit.tools.files import check_targets, json_text, write_text
from shardkit.tools.machine import Machine, load_machine, preset
from shardkit.tools.terminal import terminal

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused-adamw": partial(torch.optim.AdamW, fused=True),
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "muon": muon,
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}
_DTYPES = {"own": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_RESHARD = {"default": None, "true": True, "false": False}


def run(options: SimpleNamespace) -> int:
    """Runs `shardkit estimate`. Raises `InputError`."""
    if options.show_machine:
        sys.stdout.write(json_text(machine_named(options.show_machine).to_json(), indent=2))
        return 0
    check_targets(options.json)
    found = estimate_job(job_of(options), mesh_of(options.mesh), machine_of(options), rank=options.rank)
    print_estimate(found, terminal())
    if options.json is not None:
        write_text(options.json, json_text(found.to_json(), indent=2))
    return 0


# -- what options name -------------------------------------------------------------------------------------------------


def job_of(options: SimpleNamespace) -> TrainingJob:
    """The job that the options describe; raises `EstimateError` if they describe none, or it cannot be made."""
    optimizer, policies = _optimizer(options.optimizer), _policies(options)
    parameters, state = (_DTYPES[text or "own"] for text in (options.param_dtype, options.optimizer_dtype))
    if (state is not None or options.master_weights) and policies is not None and policies.overlap_step:
        raise EstimateError("overlap_step keeps the optimizer's state; leave out --optimizer-dtype, --master-weights")
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
    names = ("checkpoint", "offload", "overlap_step", "resident", "offload_activations", "accumulate")
    told: dict[str, Any] = {name: getattr(options, name, None) for name in names}  # a plan has fewer options
    told |= {"prefetch_depth": options.prefetch, "prefetch_budget": getattr(options, "prefetch_budget", None)}
    if options.selective:
        told["checkpoint"] = "selective"
    told = {name: value for name, value in told.items() if value is not None}
    if options.placements is not None:
        told["placements"] = _placements(options)
    if options.wrap is not None:
        told["wrap"] = tuple(name for name in options.wrap.split(",") if name)
    for option, name in (("dtype", "param_dtype"), ("reduce_dtype", "reduce_dtype")):
        if (text := getattr(options, option)) is not None:
            told[name] = _DTYPES[text]
    if (text := getattr(options, "reshard", None)) is not None:
        told["reshard_after_forward"] = _RESHARD[text] if text in _RESHARD else _ranks_of(text)
    return Policies(**told) if told else None


def _ranks_of(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise EstimateError(f"reshard is '{text}'; expected {', '.join(_RESHARD)} or a whole number from 1 on")
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
    """The machine that the options describe; raises `MachineError` as `machine_named`."""
    names = ("host_memory", "storage", "storage_bandwidth")
    told = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.expandable_segments:
        told["expandable_segments"] = True
    return machine_named(options.machine).replace(**told)


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
