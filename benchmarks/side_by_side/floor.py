"""The least that sharding from Python costs: hooks, registration and gradients as DTensors, for one rank.

It gathers nothing, checks nothing and prefetches nothing. A `fully_shard` written in Python has to do at least this, so
a goal below it cannot be met.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from side_by_side.networks import Block


def shard_barely(network: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces the parameters by DTensors, and registers plain tensors while each block, then the network, runs.

    Args:
        network: one of `networks.py`, whose parameters all require grad.
        mesh: one rank.

    Raises:
        ValueError: if the mesh has several ranks, whose parameters would have to be gathered.
    """
    if mesh.size() != 1:
        raise ValueError(f"the floor is that of one rank, but there are {mesh.size()}: leave it out of --systems")
    for module in (*(one for one in network.modules() if isinstance(one, Block)), network):
        _Unit(module, mesh, is_root=module is network)


def step_on_plain_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer step on the memory of its DTensors as plain tensors from now on."""
    pairs = []
    for group in optimizer.param_groups:
        sharded = group["params"]
        group["params"] = [nn.Parameter(parameter.to_local().detach()) for parameter in sharded]
        pairs += list(zip(sharded, group["params"], strict=True))

    def lend_gradients(*_: Any) -> None:
        for parameter, plain in pairs:
            plain.grad = parameter.grad._local_tensor

    optimizer.register_step_pre_hook(lend_gradients)


class _Watched(torch.autograd.Function):
    """Tells a unit that the gradients of its inputs are done."""

    @staticmethod
    def forward(ctx: Any, unit: "_Unit", tensor: torch.Tensor) -> torch.Tensor:
        ctx.unit = unit
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        ctx.unit.post_backward()
        return None, gradient


class _Unit:
    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, is_root: bool) -> None:
        self.is_root = is_root
        self.slots = []
        for registered, name, parameter in _plain_parameters(module):
            local = parameter.detach()
            sharded = nn.Parameter(DTensor.from_local(local, mesh, run_check=False))
            registered[name] = sharded
            self.slots.append((registered, name, sharded, nn.Parameter(local)))
        self.specs = [sharded._spec for _, _, sharded, _ in self.slots]
        module.register_forward_pre_hook(self.pre_forward)
        module.register_forward_hook(self.post_forward)

    def unshard(self) -> None:
        for registered, name, _, unsharded in self.slots:
            registered[name] = unsharded

    def reshard(self) -> None:
        for registered, name, sharded, _ in self.slots:
            registered[name] = sharded

    def pre_forward(self, module: nn.Module, args: Any) -> Any:
        self.unshard()
        return tuple(_Watched.apply(self, one) if one.requires_grad else one for one in args)

    def post_forward(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.reshard()
        output.register_hook(self.pre_backward)

    def pre_backward(self, gradient: torch.Tensor) -> None:
        self.unshard()
        if self.is_root:  # its inputs are tokens, which have no gradients
            Variable._execution_engine.queue_callback(self.post_backward)

    def post_backward(self) -> None:
        for (_, _, sharded, unsharded), spec in zip(self.slots, self.specs, strict=True):
            gradient, unsharded.grad = unsharded.grad, None
            sharded.grad = DTensor.__new__(DTensor, gradient, spec, requires_grad=False)
        self.reshard()


def _plain_parameters(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    for one in module.modules():
        for name, parameter in one._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                yield one._parameters, name, parameter
