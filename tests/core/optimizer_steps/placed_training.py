"""Models, gradients and optimizers for the tests of steps on plain tensors, on `Owned` and on `Blocks`."""

import contextlib
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.region import region_of
from shardkit.core.torch_compat import like_dtensor, local_of
from tests.support import rank_mesh
from tests.support.sharding import shard_each

ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"foreach": False}),
    ("AdamW", {"fused": True}),
    ("Adam", {"foreach": True, "weight_decay": 0.1}),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"foreach": False}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adadelta", {}),
    ("Adamax", {}),
    ("NAdam", {"lr": 1e-2}),
    ("RAdam", {}),
    ("ASGD", {}),
]
"""Classes of torch and options."""


class Layers(nn.Module):
    """Four linear layers, each a group of its own when it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((12, 20), (20, 20), (20, 8), (8, 12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def shard_layers(world_size: int, choose: Callable[[nn.Parameter], object] | None = None) -> Layers:
    model = Layers()
    return shard_each(*model.layers, model, mesh=rank_mesh((world_size,)), shard_placement_fn=choose)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    return model(torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean()


def backward_alike(model: nn.Module, reference: nn.Module, rank: int, number: int) -> None:
    """A backward of the sharded model; the reference gets the same reduced gradients."""
    loss_of(model, rank, number).backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        whole.grad = sharded.grad.full_tensor()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0) -> None:
    """A step with gradients that depend on the number alone, the same for a sharded and a whole model.

    The same numbers are drawn at each step of the same number.
    """
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        gradient = scale * torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            part = region_of("a gradient", parameter).take(gradient).reshape(local_of(parameter).shape)
            gradient = like_dtensor(part.clone(), parameter)
        parameter.grad = gradient
    torch.manual_seed(number)
    with torch.compiler.set_stance("force_eager"), contextlib.redirect_stdout(io.StringIO()):
        optimizer.step()


def class_of(kind: str) -> Any:
    """The class of an optimizer, such as `torch.optim.AdamW`; skips the test if its package is not installed."""
    package, name = kind.rsplit(".", 1)
    module = pytest.importorskip(package)
    if package == "heavyball":
        module.utils.compile_mode = None
        module.SOAP.steps_each_parameter_alone = True
    return getattr(module, name)


def optimizer_for(kind: str, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    with contextlib.redirect_stdout(io.StringIO()):
        made: torch.optim.Optimizer = class_of(kind)(parameters, **({"lr": 0.01} | options))
    return made


def check(model: nn.Module, expected: Iterable[torch.Tensor], where: object) -> None:
    """Whether the parameters are exactly those of one process."""
    for parameter, value in zip(model.parameters(), expected, strict=True):
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(full, value), where
