"""The features of ``fully_shard`` that differential tests switch on, singly and in pairs.

A feature contributes arguments to every ``fully_shard`` call (``options``), another way to apply it (``apply``), calls
on the sharded model (``prepare``) or another kind of training step (``schedule``). Two features that give the same
option, or both an ``apply`` or a ``schedule``, exclude each other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from tests.support import schedules
from tests.support.comms import CountingAllGather, RankOrderReduceScatter
from tests.support.meshes import rank_mesh
from tests.support.models import ModelSpec
from tests.support.schedules import Run
from tests.support.sharding import shard_each

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

Options = Callable[[Any, nn.Module, int], dict[str, Any]]
Apply = Callable[[nn.Module, Any, ModelSpec, dict[str, Any]], None]
Prepare = Callable[[nn.Module, Any, ModelSpec], None]
Schedule = Callable[[Run, int], None]


@dataclass(frozen=True)
class Feature:
    """One thing that can be switched on. ``slots`` are the settings that it needs: features that share one cannot pair.

    ``world_sizes`` are those on which it means something; ``models`` those it is for (empty: any).
    ``low_precision`` widens the tolerance of comparisons that have one; ``owns_reduction`` keeps the harness from
    replacing stock's reduce-scatter. ``reshard_before_update`` is for parameters that would otherwise be whole, and
    soon stale, when the optimizer steps.
    """

    slots: str
    options: Options = lambda api, model, world_size: {}
    apply: Apply | None = None
    prepare: Prepare = lambda model, api, spec: None
    schedule: Schedule | None = None
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    models: tuple[str, ...] = ()
    low_precision: bool = False
    owns_reduction: bool = False
    reshard_before_update: bool = False


# -- arguments ---------------------------------------------------------------------------------------------------------


def _precision(schedule: Schedule | None = None, **fields: Any) -> Feature:
    options: Options = lambda api, model, world_size: {"mp_policy": api.MixedPrecisionPolicy(**fields)}  # noqa: E731
    slots, models = ("mp_policy schedule", ("mlp",)) if schedule else ("mp_policy", ())
    return Feature(slots, options, schedule=schedule, models=models, low_precision=True)


def _replicas(replicate: int, world_size: int) -> dict[str, Any]:
    return {"mesh": rank_mesh((replicate, world_size // replicate), ("replicate", "shard"))}


def _dim_1(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


# -- ways to apply it --------------------------------------------------------------------------------------------------


def _grouped(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
    first, second, *others = spec.blocks(model)
    shard_each([first, second], *others, model, api=api, **options)


def _output_in_float32(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
    """Compute in bfloat16 and return float32: only the root casts its output, as blocks feed bfloat16 parameters."""
    shard_each(*spec.blocks(model), api=api, mp_policy=api.MixedPrecisionPolicy(_BF16, _FP32), **options)
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(_BF16, _FP32, output_dtype=_FP32), **options)


# -- calls on the sharded model ----------------------------------------------------------------------------------------


def _on_root(**values: Any) -> Prepare:
    """Calls the setters of these names."""
    return lambda model, api, spec: _set([model], values)


def _on_each(**values: Any) -> Prepare:
    return lambda model, api, spec: _set(_sharded(model, api), values)


def _set(modules: list[Any], values: dict[str, Any]) -> None:
    for module in modules:
        for setter, value in values.items():
            getattr(module, setter)(value)


def _sharded(model: nn.Module, api: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, api.FSDPModule)]


def _prefetch(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    blocks = spec.blocks(model)
    model.set_modules_to_forward_prefetch(blocks[:2])
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, index - 2) : index])))
    model.set_modules_to_backward_prefetch(blocks[-1:])


def _divide_factor(factor: float) -> Feature:
    # gloo has no PREMUL_SUM. On one rank stock divides by the factor twice when told to force sums.
    prepare = _on_each(set_force_sum_reduction_for_comms=True, set_gradient_divide_factor=factor)
    return Feature("reduction", prepare=prepare, world_sizes=(2, 3, 4))


def _custom_comms(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    for module in _sharded(model, api):
        module.set_custom_all_gather(CountingAllGather())
        module.set_custom_reduce_scatter(RankOrderReduceScatter())


def _keep_after_forward_later(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_reshard_after_forward(False)
    spec.blocks(model)[-1].set_reshard_after_forward(True, recurse=False)


def _no_unshard_in_backward(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_reshard_after_forward(False)
    _set(_sharded(model, api), {"set_unshard_in_backward": False})


def _scheduled(schedule: Schedule, slots: str = "schedule", **fields: Any) -> Feature:
    return Feature(slots, schedule=schedule, **fields)


FEATURES: dict[str, Feature] = {
    # arguments
    "reshard": Feature("reshard_after_forward", lambda *_: {"reshard_after_forward": True}),
    "no_reshard": Feature("reshard_after_forward", lambda *_: {"reshard_after_forward": False}),
    "reshard_default": Feature("reshard_after_forward", lambda *_: {"reshard_after_forward": None}),
    # Stock fails on parameters that are sharded on another dim than 0.
    "reshard_to_2": Feature(
        "reshard_after_forward shard_placement_fn", lambda *_: {"reshard_after_forward": 2}, world_sizes=(4,)
    ),
    "bfloat16": _precision(param_dtype=_BF16),
    "bfloat16_reduce_float32": _precision(param_dtype=_BF16, reduce_dtype=_FP32),
    "reduce_bfloat16": _precision(reduce_dtype=_BF16),
    "float16": _precision(param_dtype=_FP16),
    "output_float32": Feature("mp_policy apply", apply=_output_in_float32, low_precision=True),
    "inputs_not_cast": _precision(schedules.inputs_in_bfloat16, param_dtype=_BF16, cast_forward_inputs=False),
    "offload": Feature(
        "offload_policy",
        lambda api, model, size: {"offload_policy": api.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())},
    ),
    "hsdp_2": Feature("mesh", lambda api, model, size: _replicas(2, size), world_sizes=(4,)),
    "hsdp_1": Feature("mesh", lambda api, model, size: _replicas(1, size), world_sizes=(2, 3, 4)),
    # Without a shard group, too, stock divides by a factor twice.
    "replicate_only": Feature("mesh reduction", lambda api, model, size: _replicas(size, size), world_sizes=(2,)),
    "named_mesh": Feature("mesh", lambda api, model, size: {"mesh": rank_mesh((size,), ("dp",))}),
    "dim_1": Feature("shard_placement_fn", lambda *_: {"shard_placement_fn": _dim_1}, models=("transformer",)),
    # An ignored parameter keeps its dtype, so the model would have to cast for it.
    "ignored": Feature(
        "ignored_params mp_policy",
        lambda api, model, size: {
            "ignored_params": {p for name, p in model.named_parameters() if name.endswith("up.bias")}
        },
        models=("mlp",),
    ),
    # ways to apply it
    "grouped": Feature("apply", apply=_grouped),
    "root_only": Feature("apply", apply=lambda model, api, spec, options: api.fully_shard(model, **options)),
    # The root has no parameters of its own to shard: all of its children are sharded first.
    "empty_root": Feature(
        "apply",
        apply=lambda model, api, spec, options: shard_each(
            *spec.blocks(model), model.inp, model.out, model, api=api, **options
        ),
        models=("mlp",),
    ),
    # calls on the sharded model
    "prefetch": Feature("prefetch apply", prepare=_prefetch),
    "divide_by_3": _divide_factor(3.0),
    "divide_by_8": _divide_factor(8.0),
    "force_sum": Feature("reduction", prepare=_on_each(set_force_sum_reduction_for_comms=True)),
    "custom_comms": Feature("custom", prepare=_custom_comms, owns_reduction=True),
    "keep_after_backward": Feature(
        "keep", prepare=_on_root(set_reshard_after_backward=False), reshard_before_update=True
    ),
    "keep_after_forward": Feature("reshard_after_forward apply", prepare=_keep_after_forward_later),
    "reduce_unused": Feature("unused", prepare=_on_root(set_reduce_scatter_unused_params=True)),
    "unshard_async_op": Feature("unshard", prepare=_on_each(_set_unshard_async_op=True)),
    "no_unshard_in_backward": Feature("reshard_after_forward", prepare=_no_unshard_in_backward),
    "all_reduce_hook": Feature("hook", prepare=_on_each(set_all_reduce_hook=lambda reduced: reduced.mul_(0.5))),
    "reduction_tuning": Feature(
        "tuning", prepare=_on_root(set_separate_reduce_scatter_group=True, set_reduce_scatter_max_input_buffers=2)
    ),
    "share_comm_ctx": Feature("share", prepare=lambda model, api, spec: api.share_comm_ctx(_sharded(model, api))),
    # kinds of training step
    "accumulate": _scheduled(schedules.accumulate("set_requires_gradient_sync", True, True, True)),
    "accumulate_no_sync": _scheduled(schedules.accumulate("set_requires_gradient_sync", False, False, True)),
    # An existing sharded gradient meets an unsharded one.
    "accumulate_mixed": _scheduled(schedules.accumulate("set_requires_gradient_sync", True, False, True)),
    "accumulate_no_all_reduce": _scheduled(schedules.accumulate("set_requires_all_reduce", False, False, True)),
    "accumulate_one_block": _scheduled(schedules.accumulate_one_block_without_sync, "schedule apply"),
    "forwards_backward": _scheduled(schedules.several_forwards_one_backward),
    "forwards_backwards": _scheduled(schedules.several_forwards_then_backwards),
    "one_f_one_b": _scheduled(schedules.one_forward_one_backward, "schedule keep"),
    "retained_graph": _scheduled(schedules.retained_graph),
    "evaluation": _scheduled(schedules.evaluation_between),
    "dropped_forward": _scheduled(schedules.forward_that_is_dropped),
    "explicit_unshard": _scheduled(schedules.explicit_unshard),
    "forward_method": _scheduled(schedules.another_method, models=("mlp",)),
    "optimizer_in_backward": _scheduled(schedules.optimizer_in_backward, "schedule keep"),
    "clipped": _scheduled(schedules.clipped),
    "grad_scaler": _scheduled(schedules.grad_scaler),
    "gradients_kept": _scheduled(schedules.gradients_kept),
    "input_gradients": _scheduled(schedules.inputs_that_need_gradients),
}


def model_for(names: Iterable[str], preferred: str = "mlp") -> str | None:
    """Return a model that all named features are for: the preferred one if possible, None if there is none."""
    limits = [set(FEATURES[name].models) for name in names if FEATURES[name].models]
    if not limits:
        return preferred
    common = set.intersection(*limits)
    return preferred if preferred in common else min(common, default=None)


def can_pair(first: str, second: str) -> bool:
    """Tell whether two features occupy different slots and there is a model for both."""
    shared = set(FEATURES[first].slots.split()) & set(FEATURES[second].slots.split())
    return not shared and model_for((first, second)) is not None


def runs_on(names: Iterable[str], world_size: int) -> bool:
    """Tell whether all named features mean something on that many ranks."""
    return all(world_size in FEATURES[name].world_sizes for name in names)
