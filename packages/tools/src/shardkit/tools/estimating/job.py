"""What is estimated: a training job, as the user's own functions make and run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import FSDPModule
from shardkit.core.tensors import tensors_with_grad
from shardkit.tools.estimating.errors import EstimateError
from shardkit.tools.estimating.policies import Policies, apply_policies

__all__ = ["TrainingJob", "default_step"]

MakeOptimizer: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
TensorParallel: TypeAlias = Callable[[nn.Module, DeviceMesh], object]
Step: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


@dataclass(frozen=True)
class TrainingJob:
    """A training job, in functions that run with fake tensors as well as with real ones.

    Attributes:
        model: makes the model. If it takes an argument, that is the mesh, and the model comes sharded (`fully_shard`,
            tensor parallelism and whatever else); otherwise `policies` shard it.
        inputs: makes one micro-batch: a tensor, or a tuple or dict of the model's arguments.
        optimizer: makes the optimizer of the sharded parameters.
        loss: makes a scalar of the model's output and the micro-batch. By default the mean of squares of all that the
            output holds, or, for token ids, the cross entropy of the next token.
        step: runs one iteration; `default_step` where it is None.
        policies: how `fully_shard` is applied to a model that does not come sharded.
        tensor_parallel: cuts a model that does not come sharded over the axis "tp" of the mesh, in place; called with
            the model and the mesh of that axis. `policies` shard it over the others.
    """

    model: Callable[..., nn.Module]
    inputs: Callable[[], Any]
    optimizer: MakeOptimizer = torch.optim.AdamW
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    step: Step | None = None
    policies: Policies = field(default_factory=Policies)
    tensor_parallel: TensorParallel | None = None

    @property
    def takes_mesh(self) -> bool:
        """Whether `model` wants the mesh, and shards what it makes."""
        return any(
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            for parameter in inspect.signature(self.model).parameters.values()
            if parameter.kind is not parameter.VAR_POSITIONAL
        )

    def build(self, mesh: DeviceMesh) -> nn.Module:
        """The sharded model."""
        model = self.model(mesh) if self.takes_mesh else self.model()
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            apply_policies(model, self.policies, self._data_parallel(model, mesh))
        elif replace(self.policies, accumulate=1) != Policies():
            raise EstimateError(
                f"the model comes sharded, so {self.policies} has nothing to act on; leave the policies out, or give a "
                "factory that makes the model unsharded"
            )
        return model

    def _data_parallel(self, model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
        """The axes that remain when the model has been cut over "tp", if there is a plan for that."""
        names = mesh.mesh_dim_names or ()
        if self.tensor_parallel is None or "tp" not in names:
            return mesh
        self.tensor_parallel(model, mesh["tp"])
        return mesh[tuple(name for name in names if name != "tp")]

    def run(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
        """One iteration on one micro-batch, or on several whose gradients are accumulated."""
        if self.step is not None:
            self.step(model, optimizer, batches[0] if len(batches) == 1 else batches)
            return
        default_step(model, optimizer, batches, self.loss or default_loss)


def default_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], loss: Callable[[Any, Any], torch.Tensor]
) -> None:
    """Forward and backward of each micro-batch, gradients reduced with the last one, then the optimizer."""
    for number, batch in enumerate(batches, 1):
        if isinstance(model, FSDPModule) and len(batches) > 1:
            model.set_requires_gradient_sync(number == len(batches))
        value = loss(call(model, batch), batch)
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
    """Cross entropy of the next token where token ids go in and logits come out, else the mean square."""
    output = getattr(output, "logits", output)
    tokens = _first_tensor(batch)
    if isinstance(output, torch.Tensor):
        if tokens.dtype == torch.int64 and output.shape[:-1] == tokens.shape and output.dim() == 3:
            return F.cross_entropy(output[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        return output.float().square().mean()
    tensors = tensors_with_grad(output)
    return torch.stack([one.float().square().mean() for one in tensors]).sum()


def _first_tensor(batch: Any) -> torch.Tensor:
    values = list(batch.values()) if isinstance(batch, dict) else batch
    first = values[0] if isinstance(values, tuple | list) else values
    if not isinstance(first, torch.Tensor):
        raise EstimateError(f"a micro-batch begins with a {type(first).__name__}; expected a tensor, or give a loss")
    return first
