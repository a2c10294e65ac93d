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

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32

Options = Callable[[Any, nn.Module, int], dict[str, Any]]
Apply = Callable[[nn.Module, Any, ModelSpec, dict[str, Any]], None]
Prepare = Callable[[nn.Module, Any, ModelSpec], None]


def _no_options(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
    return {}


def _no_preparation(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    pass


@dataclass(frozen=True)
class Feature:
    """One thing that can be switched on. ``slots`` are the settings that it needs: features that share one cannot pair.

    ``world_sizes`` are those on which it means something; ``models`` those it is for (empty: any).
    ``low_precision`` widens the tolerance of comparisons that have one; ``owns_reduction`` keeps the harness from
    replacing stock's reduce-scatter. ``reshard_before_update`` is for parameters that would otherwise be whole, and
    soon stale, when the optimizer steps.
    """

    slots: frozenset[str]
    options: Options = _no_options
    apply: Apply | None = None
    prepare: Prepare = _no_preparation
    schedule: Callable[[Run, int], None] | None = None
    world_sizes: frozenset[int] = frozenset({1, 2, 3, 4})
    models: frozenset[str] = frozenset()
    low_precision: bool = False
    owns_reduction: bool = False
    reshard_before_update: bool = False


def _reshard(value: bool | int | None) -> Feature:
    def options(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
        return {"reshard_after_forward": value}

    if type(value) is not int:
        return Feature(frozenset({"reshard_after_forward"}), options)
    # Stock fails on parameters that are sharded on another dim than 0.
    return Feature(frozenset({"reshard_after_forward", "shard_placement_fn"}), options, world_sizes=frozenset({4}))


def _precision(schedule: Callable[[Run, int], None] | None = None, **fields: Any) -> Feature:
    def options(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
        return {"mp_policy": api.MixedPrecisionPolicy(**fields)}

    slots = frozenset({"mp_policy"} | ({"schedule"} if schedule else set()))
    models = frozenset({"mlp"}) if schedule else frozenset()
    return Feature(slots, options, schedule=schedule, models=models, low_precision=True)


def _mesh(replicate: int, worlds: Iterable[int]) -> Feature:
    def options(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
        return {"mesh": rank_mesh((replicate, world_size // replicate), ("replicate", "shard"))}

    return Feature(frozenset({"mesh"}), options, world_sizes=frozenset(worlds))


def _replicate_everywhere(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
    return {"mesh": rank_mesh((world_size, 1), ("replicate", "shard"))}


def _named_mesh(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
    return {"mesh": rank_mesh((world_size,), ("dp",))}


def _offload(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
    return {"offload_policy": api.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())}


def _dim_1(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
    return {"shard_placement_fn": _largest_dim_1}


def _largest_dim_1(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim > 1 else None


def _ignored(api: Any, model: nn.Module, world_size: int) -> dict[str, Any]:
    return {"ignored_params": {p for name, p in model.named_parameters() if name.endswith("up.bias")}}


def _grouped(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
    first, second, *others = spec.blocks(model)
    api.fully_shard([first, second], **options)
    for block in others:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)


def _root_only(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
    api.fully_shard(model, **options)


def _blocks_only(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
    """The root has no parameters of its own to shard: all of its children are sharded first."""
    for block in (*spec.blocks(model), model.inp, model.out):
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)


def _output_in_float32(model: nn.Module, api: Any, spec: ModelSpec, options: dict[str, Any]) -> None:
    """Compute in bfloat16 and return float32: only the root casts its output, as blocks feed bfloat16 parameters."""
    for block in spec.blocks(model):
        api.fully_shard(block, mp_policy=api.MixedPrecisionPolicy(_BF16, _FP32), **options)
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(_BF16, _FP32, output_dtype=_FP32), **options)


def _prefetch(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    blocks = spec.blocks(model)
    model.set_modules_to_forward_prefetch(blocks[:2])
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, index - 2) : index])))
    model.set_modules_to_backward_prefetch(blocks[-1:])


def _divide_factor(factor: float) -> Feature:
    def prepare(model: nn.Module, api: Any, spec: ModelSpec) -> None:
        for module in _sharded(model, api):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            module.set_gradient_divide_factor(factor)

    # On one rank stock divides by the factor twice when told to force sums.
    return Feature(frozenset({"reduction"}), prepare=prepare, world_sizes=frozenset({2, 3, 4}))


def _force_sum(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    for module in _sharded(model, api):
        module.set_force_sum_reduction_for_comms(True)


def _sharded(model: nn.Module, api: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, api.FSDPModule)]


def _custom_comms(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    for module in _sharded(model, api):
        module.set_custom_all_gather(CountingAllGather())
        module.set_custom_reduce_scatter(RankOrderReduceScatter())


def _keep_after_backward(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_reshard_after_backward(False)


def _keep_after_forward_later(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_reshard_after_forward(False)
    spec.blocks(model)[-1].set_reshard_after_forward(True, recurse=False)


def _reduce_unused(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_reduce_scatter_unused_params(True)


def _unshard_async_op(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    for module in _sharded(model, api):
        module._set_unshard_async_op(True)


def _no_unshard_in_backward(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_reshard_after_forward(False)
    for module in _sharded(model, api):
        module.set_unshard_in_backward(False)


def _all_reduce_hook(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    for module in _sharded(model, api):
        module.set_all_reduce_hook(_halve)


def _halve(reduced: torch.Tensor) -> None:
    reduced.mul_(0.5)


def _reduction_tuning(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(2)


def _share_comm_ctx(model: nn.Module, api: Any, spec: ModelSpec) -> None:
    api.share_comm_ctx(_sharded(model, api))


def _scheduled(schedule: Callable[[Run, int], None], *extra_slots: str, **fields: Any) -> Feature:
    return Feature(frozenset({"schedule", *extra_slots}), schedule=schedule, **fields)


_MLP = frozenset({"mlp"})

FEATURES: dict[str, Feature] = {
    # arguments
    "reshard": _reshard(True),
    "no_reshard": _reshard(False),
    "reshard_default": _reshard(None),
    "reshard_to_2": _reshard(2),
    "bfloat16": _precision(param_dtype=_BF16),
    "bfloat16_reduce_float32": _precision(param_dtype=_BF16, reduce_dtype=_FP32),
    "reduce_bfloat16": _precision(reduce_dtype=_BF16),
    "float16": _precision(param_dtype=_FP16),
    "output_float32": Feature(frozenset({"mp_policy", "apply"}), apply=_output_in_float32, low_precision=True),
    "inputs_not_cast": _precision(schedules.inputs_in_bfloat16, param_dtype=_BF16, cast_forward_inputs=False),
    "offload": Feature(frozenset({"offload_policy"}), _offload),
    "hsdp_2": _mesh(2, {4}),
    "hsdp_1": _mesh(1, {2, 3, 4}),
    # Without a shard group, too, stock divides by a factor twice.
    "replicate_only": Feature(frozenset({"mesh", "reduction"}), _replicate_everywhere, world_sizes=frozenset({2})),
    "named_mesh": Feature(frozenset({"mesh"}), _named_mesh),
    "dim_1": Feature(frozenset({"shard_placement_fn"}), _dim_1, models=frozenset({"transformer"})),
    # An ignored parameter keeps its dtype, so the model would have to cast for it.
    "ignored": Feature(frozenset({"ignored_params", "mp_policy"}), _ignored, models=_MLP),
    # ways to apply it
    "grouped": Feature(frozenset({"apply"}), apply=_grouped),
    "root_only": Feature(frozenset({"apply"}), apply=_root_only),
    "empty_root": Feature(frozenset({"apply"}), apply=_blocks_only, models=_MLP),
    # calls on the sharded model
    "prefetch": Feature(frozenset({"prefetch", "apply"}), prepare=_prefetch),
    "divide_by_3": _divide_factor(3.0),
    "divide_by_8": _divide_factor(8.0),
    "force_sum": Feature(frozenset({"reduction"}), prepare=_force_sum),
    "custom_comms": Feature(frozenset({"custom"}), prepare=_custom_comms, owns_reduction=True),
    "keep_after_backward": Feature(frozenset({"keep"}), prepare=_keep_after_backward, reshard_before_update=True),
    "keep_after_forward": Feature(frozenset({"reshard_after_forward", "apply"}), prepare=_keep_after_forward_later),
    "reduce_unused": Feature(frozenset({"unused"}), prepare=_reduce_unused),
    "unshard_async_op": Feature(frozenset({"unshard"}), prepare=_unshard_async_op),
    "no_unshard_in_backward": Feature(frozenset({"reshard_after_forward"}), prepare=_no_unshard_in_backward),
    "all_reduce_hook": Feature(frozenset({"hook"}), prepare=_all_reduce_hook),
    "reduction_tuning": Feature(frozenset({"tuning"}), prepare=_reduction_tuning),
    "share_comm_ctx": Feature(frozenset({"share"}), prepare=_share_comm_ctx),
    # kinds of training step
    "accumulate": _scheduled(schedules.accumulate_with_sync),
    "accumulate_no_sync": _scheduled(schedules.accumulate_without_sync),
    "accumulate_mixed": _scheduled(schedules.accumulate_then_sync_again),
    "accumulate_no_all_reduce": _scheduled(schedules.accumulate_without_all_reduce),
    "accumulate_one_block": _scheduled(schedules.accumulate_one_block_without_sync, "apply"),
    "forwards_backward": _scheduled(schedules.several_forwards_one_backward),
    "forwards_backwards": _scheduled(schedules.several_forwards_then_backwards),
    "one_f_one_b": _scheduled(schedules.one_forward_one_backward, "keep"),
    "retained_graph": _scheduled(schedules.retained_graph),
    "evaluation": _scheduled(schedules.evaluation_between),
    "dropped_forward": _scheduled(schedules.forward_that_is_dropped),
    "explicit_unshard": _scheduled(schedules.explicit_unshard),
    "forward_method": _scheduled(schedules.another_method, models=_MLP),
    "optimizer_in_backward": _scheduled(schedules.optimizer_in_backward, "keep"),
    "clipped": _scheduled(schedules.clipped),
    "grad_scaler": _scheduled(schedules.grad_scaler),
    "gradients_kept": _scheduled(schedules.gradients_kept),
    "input_gradients": _scheduled(schedules.inputs_that_need_gradients),
}


def model_for(names: Iterable[str], preferred: str = "mlp") -> str | None:
    """Return a model that all named features are for: the preferred one if possible, None if there is none."""
    limits = [FEATURES[name].models for name in names if FEATURES[name].models]
    if not limits:
        return preferred
    common = frozenset.intersection(*limits)
    return preferred if preferred in common else min(common, default=None)


def can_pair(first: str, second: str) -> bool:
    """Tell whether two features occupy different slots and there is a model for both."""
    return not FEATURES[first].slots & FEATURES[second].slots and model_for((first, second)) is not None


def runs_on(names: Iterable[str], world_size: int) -> bool:
    """Tell whether all named features mean something on that many ranks."""
    return all(world_size in FEATURES[name].world_sizes for name in names)
