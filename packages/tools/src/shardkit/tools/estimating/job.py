"""The input of an estimate: a training job, its `fully_shard` calls, and its dtypes."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardkit.commands.users_code import users_code
from shardkit.core import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Owned,
    fully_shard,
    placements_for,
)
from shardkit.core.engine.settings import DEFAULT_PREFETCH_DEPTH
from shardkit.core.engine.step import state_of
from shardkit.core.tensors import map_tensors, tensors_in, tensors_with_grad
from shardkit.tools.files import InputError
from shardkit.tools.torch_compat import FakeTensors

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
TensorParallel: TypeAlias = Callable[[nn.Module, DeviceMesh], object]
Step: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


class EstimateError(InputError):
    """A model, an input or a setting that cannot be estimated; the message has the value seen and what to do."""


# -- optimizers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Precision:
    """Dtypes that the training script chooses itself, in addition to the mixed precision of `fully_shard`.

    Attributes:
        parameters: dtype of the parameters, and so of their gradients; None for the model's own.
        optimizer: dtype of the optimizer's state; None for the optimizer's own.
        master_weights: whether the optimizer steps copies of the parameters in float32.
    """

    parameters: torch.dtype | None = None
    optimizer: torch.dtype | None = None
    master_weights: bool = False


class _PreciseOptimizer(torch.optim.Optimizer):
    """Steps each parameter separately: casts its state up for the step and down again, one parameter at a time."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, precision: Precision) -> None:
        own = [one for one in parameters if one.requires_grad]
        super().__init__(own, {})
        weights = [nn.Parameter(one.detach().float()) for one in own] if precision.master_weights else own
        self._steppers = [(one, weight, make([weight])) for one, weight in zip(own, weights, strict=True)]
        self._state_dtype = precision.optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for own, weight, stepper in self._steppers:
            if own.grad is None:
                continue
            if weight is not own:
                weight.grad = own.grad.to(weight.dtype)
            state = stepper.state[weight]
            _cast(state, weight.dtype)
            stepper.step()
            if self._state_dtype is not None:
                _cast(state, self._state_dtype)
            self.state[own] = dict(state)
            if weight is not own:
                own.copy_(weight)
                weight.grad = None
                self.state[own]["master_weight"] = weight


def _cast(state: dict[str, Any], dtype: torch.dtype) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
            state[name] = value.to(dtype)


class _Together(torch.optim.Optimizer):
    """Several optimizers, each with separate parameters, as one."""

    steps_each_parameter_alone = True  # it steps on none: the others do

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([one for each in optimizers for group in each.param_groups for one in group["params"]], {})
        self._optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._optimizers:
            one.step()
            self.state.update(one.state)


def muon_placements(model: nn.Module) -> Callable[[nn.Parameter], Any]:
    """Placements for Muon: hidden matrices are owned."""
    return placements_for(model, torch.optim.Muon)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Muon for parameters that lie whole on their owner, AdamW for others. Raises `EstimateError` if none is owned."""
    owned: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for one in parameters:
        owned[isinstance(one, DTensor) and any(isinstance(at, Owned) for at in one.placements)].append(one)
    if not owned[True]:
        raise EstimateError("no parameter is owned, so Muon has none to step; add --placements auto")
    return _Together([torch.optim.Muon(owned[True]), torch.optim.AdamW(owned[False])])


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policies:
    """How a model is sharded.

    Attributes:
        wrap: FQNs or class names of the modules that get a `fully_shard` call of their own. None: the model's repeated
            blocks. Empty: only the root.
        reshard_after_forward: as for `fully_shard`, for the wrapped modules.
        param_dtype: dtype of computation; None for the parameters' own.
        reduce_dtype: dtype of gradient reduction; None as in `MixedPrecisionPolicy`.
        prefetch_depth: number of groups gathered ahead.
        prefetch_budget: bytes that may be unsharded at a time, instead of a depth; None for a depth.
        checkpoint: whether the wrapped modules recompute their activations in backward; "selective" keeps the results
            of matrix products and attention.
        offload: whether shards, gradients and optimizer state live in host memory.
        overlap_step: whether the step on the host runs under the next forward (`overlap_step`).
        resident: bytes of optimizer state in host memory, the rest being in files (`FileTier`); None for no files.
        offload_activations: whether activations wait for backward in host memory.
        accumulate: number of micro-batches per iteration.
        placements: called with the model, returns its `shard_placement_fn`; None for `Shard(0)` everywhere.
    """

    wrap: tuple[str, ...] | None = None
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    prefetch_depth: int = DEFAULT_PREFETCH_DEPTH
    prefetch_budget: int | None = None
    checkpoint: bool | Literal["selective"] = False
    offload: bool = False
    overlap_step: bool = False
    resident: int | None = None
    offload_activations: bool = False
    accumulate: int = 1
    placements: Callable[[nn.Module], Callable[[nn.Parameter], Any]] | None = None

    def __post_init__(self) -> None:
        if (self.overlap_step or self.resident is not None) and not self.offload:
            raise EstimateError("a step under the next forward, or in files, is one on the host; add --offload")
        if self.resident is not None and not self.overlap_step:
            raise EstimateError("state in files is stepped under the next forward; add --overlap-step")


def blocks_of(model: nn.Module, wrap: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """The modules to shard separately, innermost first, with their FQNs.

    Raises:
        EstimateError: for a name that matches no module.
    """
    modules = [(fqn, module) for fqn, module in model.named_modules() if fqn]
    if wrap is None:
        return _repeated(model, modules)
    chosen = []
    for name in wrap:
        matching = [(fqn, module) for fqn, module in modules if name in (fqn, type(module).__name__)]
        if not matching:
            classes = sorted({type(module).__name__ for _, module in modules})
            raise EstimateError(
                f"no module has the FQN or class name '{name}'; use a FQN or one of the classes {classes}"
            )
        chosen += matching
    return sorted(dict(chosen).items(), key=lambda one: -one[0].count("."))


def _repeated(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The outermost modules of a class that occurs several times in one list, with parameters of their own."""
    found: list[tuple[str, nn.Module]] = []
    for fqn, module in [("", model), *modules]:
        inside = any(f"{fqn}.".startswith(f"{block}.") for block, _ in found)
        if inside or not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
        counts = Counter(type(child) for _, child in children)
        prefix = f"{fqn}." if fqn else ""
        found += [(prefix + name, child) for name, child in children if counts[type(child)] > 1]
    return found


def apply_policies(model: nn.Module, policies: Policies, mesh: DeviceMesh) -> None:
    """Shards a model in place over all axes of `mesh`: its blocks, then itself.

    Raises:
        EstimateError: for names that match no module.
    """
    precision = MixedPrecisionPolicy(param_dtype=policies.param_dtype, reduce_dtype=policies.reduce_dtype)
    offload = CPUOffloadPolicy() if policies.offload else OffloadPolicy()
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    if policies.placements is not None:
        given["shard_placement_fn"] = policies.placements(model)
    for _, block in blocks_of(model, policies.wrap):
        if policies.checkpoint:
            _recompute(block, policies.checkpoint)
        fully_shard(block, reshard_after_forward=policies.reshard_after_forward, **given)
    fully_shard(model, **given)
    assert isinstance(model, FSDPModule)
    if policies.prefetch_budget is None:
        model.set_prefetch_depth(policies.prefetch_depth)
    else:
        model.set_prefetch_budget(policies.prefetch_budget)


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT = ("mm", "addmm", *(f"_scaled_dot_product_{name}" for name in _ATTENTION))
"""Operators whose results selective recomputation keeps."""


def _recompute(block: nn.Module, how: bool | str) -> None:
    forward = block.forward
    kept = [getattr(torch.ops.aten, name).default for name in KEPT]
    contexts: Any = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if how == "selective" else {}
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)


# -- jobs --------------------------------------------------------------------------------------------------------------


# Names of the axes that policies shard over, outermost first.
_KNOWN_AXES = ("dp_replicate", "dp_shard", "dp", "cp", "tp")


@dataclass(frozen=True)
class TrainingJob:
    """A training job, as functions that run with fake tensors as well as with real ones.

    Attributes:
        model: creates the model. If it takes an argument, it receives the mesh and returns a sharded model
            (`fully_shard`, tensor parallelism and anything else); otherwise `policies` shard it.
        inputs: creates one micro-batch: a tensor, or a tuple or dict of the model's arguments.
        optimizer: creates the optimizer of the sharded parameters.
        loss: computes a scalar from the model's output and the micro-batch. Default: the mean of squares of the output,
            or, for token ids, the cross entropy of the next token.
        step: runs one iteration, instead of forward and backward of each micro-batch and an optimizer step.
        policies: how `fully_shard` is applied to a model that is not sharded by its factory.
        tensor_parallel: cuts such a model over the axis "tp" of the mesh, in place; called with the model and the mesh
            of that axis. `policies` shard it over the other axes.
        precision: dtypes in which the script keeps parameters and optimizer state.
    """

    model: Callable[..., nn.Module]
    inputs: Callable[[], Any]
    optimizer: MakeOptimizer = torch.optim.AdamW
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    step: Step | None = None
    policies: Policies = field(default_factory=Policies)
    tensor_parallel: TensorParallel | None = None
    precision: Precision = field(default_factory=Precision)

    @property
    def takes_mesh(self) -> bool:
        """Whether `model` takes the mesh and returns a sharded model."""
        return any(
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            for parameter in inspect.signature(self.model).parameters.values()
            if parameter.kind is not parameter.VAR_POSITIONAL
        )

    def mesh_axes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """The axes of the mesh that `build` needs, outermost first, for axes with the usual names in any order.

        Ranks along "cp" hold shards like those along "dp_shard", which "dp" also means. A factory that takes the mesh
        gets the axes as they are.

        Raises:
            EstimateError: for axes that policies do not know.
        """
        if self.takes_mesh:
            return dict(axes)
        if unknown := [name for name in axes if name not in _KNOWN_AXES]:
            raise EstimateError(
                f"the axis '{unknown[0]}' of the mesh is not known; expected {', '.join(_KNOWN_AXES)}. For other axes, "
                "such as pp and ep, name a factory that takes the mesh and shards the model itself"
            )
        if "dp" in axes and "dp_shard" in axes:
            raise EstimateError("the axes 'dp' and 'dp_shard' mean the same; give dp_replicate and dp_shard")
        if "tp" in axes and self.tensor_parallel is None:
            raise EstimateError(
                "the axis 'tp' needs a plan for tensor parallelism; add --tp-plan (tensor_parallel), or name a factory "
                "that takes the mesh and shards the model itself"
            )
        shards = math.prod(axes.get(name, 1) for name in ("dp_shard", "dp", "cp"))
        sizes = {"dp_replicate": axes.get("dp_replicate"), "dp_shard": shards, "tp": axes.get("tp")}
        return {name: size for name, size in sizes.items() if size is not None}

    def build(self, mesh: DeviceMesh) -> nn.Module:
        """The sharded model. Raises `EstimateError` if the factory shards it and `policies` are set."""
        model = self.model(mesh) if self.takes_mesh else self.model()
        if self.precision.parameters is not None and not self.takes_mesh:
            model = model.to(self.precision.parameters)
        if not any(state_of(module) for module in model.modules()):
            names = mesh.mesh_dim_names or ()
            if self.tensor_parallel is not None and "tp" in names:
                self.tensor_parallel(model, mesh["tp"])
                mesh = mesh[tuple(name for name in names if name != "tp")]
            apply_policies(model, self.policies, mesh)
        elif replace(self.policies, accumulate=1) != Policies():
            raise EstimateError(
                f"the model comes sharded, so {self.policies} has nothing to act on; leave the policies out, or give a "
                "factory that makes the model unsharded"
            )
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the sharded model, with its state as `precision` says."""
        if self.precision.optimizer is None and not self.precision.master_weights:
            return self.optimizer(model.parameters())
        return _PreciseOptimizer(model.parameters(), self.optimizer, self.precision)

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        """One iteration on one micro-batch, or on several, whose accumulated gradients are reduced at the last."""
        if self.step is not None:
            self.step(model, optimizer, batches[0] if len(batches) == 1 else batches)
            return
        for number, batch in enumerate(batches, 1):
            if isinstance(model, FSDPModule) and len(batches) > 1:
                model.set_requires_gradient_sync(number == len(batches))
            value = (self.loss or default_loss)(call(model, batch), batch)
            value.backward()
            del value
        optimizer.step()
        optimizer.zero_grad()


def call(model: nn.Module, batch: Any) -> Any:
    """Runs a model on a micro-batch: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def default_loss(output: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of the next token for token ids and logits, else the mean square. Raises `EstimateError`."""
    output = getattr(output, "logits", output)
    values = list(batch.values()) if isinstance(batch, dict) else batch
    tokens = values[0] if isinstance(values, tuple | list) else values
    if not isinstance(tokens, torch.Tensor):
        raise EstimateError(f"a micro-batch begins with a {type(tokens).__name__}; expected a tensor, or give a loss")
    if not isinstance(output, torch.Tensor):
        return torch.stack([one.float().square().mean() for one in tensors_with_grad(output)]).sum()
    if tokens.dtype == torch.int64 and output.shape[:-1] == tokens.shape and output.dim() == 3:
        # As in transformers and torchtitan: shifts the next tokens, because slicing the logits would copy them.
        following = F.pad(tokens[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(output.flatten(0, 1).float(), following.flatten())
    return output.float().square().mean()


def with_micro_batch(job: TrainingJob, size: int) -> TrainingJob:
    """The same job with micro-batches of `size` samples: dim 0 of every tensor that its inputs create."""
    return replace(job, inputs=partial(_resized, job.inputs, size))


def _resized(inputs: Callable[[], Any], size: int) -> Any:
    return map_tensors(lambda one: one.new_zeros((size, *one.shape[1:])) if one.dim() else one, inputs())


def micro_batch_of(job: TrainingJob) -> int:
    """The number of samples in the job's own micro-batches: dim 0 of the first tensor that has one.

    Raises:
        EstimateError: if its inputs cannot be created, or hold no such tensor.
    """
    sizes = [tensor.shape[0] for tensor in _inputs(job) if tensor.dim()]
    if not sizes:
        raise EstimateError(
            "the inputs hold no tensor with a dim for samples; say what a micro-batch is (--micro-batch)"
        )
    return int(sizes[0])


def tokens_of(job: TrainingJob) -> int | None:
    """The number of tokens of a sample; None if a micro-batch does not begin with token ids. Raises the same."""
    first = next((tensor for tensor in _inputs(job) if tensor.dim()), None)
    return first.shape[1] if first is not None and first.dtype == torch.int64 and first.dim() == 2 else None


def _inputs(job: TrainingJob) -> list[torch.Tensor]:
    with FakeTensors(), users_code("making the inputs", "the function is called without arguments", EstimateError):
        return tensors_in(job.inputs())
