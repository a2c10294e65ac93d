"""The modules of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.random_programs.program import Block, Call, Op, Program, Side, blocks_of

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Deliberate(Exception):
    """The exception that a program raises on purpose."""


@dataclass
class Trap:
    """Where the user's code raises next: "forward", "backward" or None."""

    armed: str | None = None

    def spring(self, where: str) -> None:
        """Raise if armed for ``where``."""
        if self.armed == where:
            raise Deliberate(f"on purpose, in {where}")


class _TrapInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.trap.spring("backward")
        return gradient, None


@dataclass
class Result:
    """An output that is a dataclass."""

    x: Tensor
    extra: Any


class Opaque:
    """An output that no tree function looks into."""

    __slots__ = ("extra", "x")

    def __init__(self, x: Tensor, extra: Any) -> None:
        self.x, self.extra = x, extra


# By the form of a block's output: how it is packed, and unpacked again.
_FORMS: dict[str, tuple[Callable[[Any, Tensor, Any], Any], Callable[[Any, Any], tuple[Tensor, Any]]]] = {
    "tensor": (lambda module, x, extra: x, lambda module, output: (output, None)),
    "tuple": (lambda module, x, extra: (x, extra), lambda module, output: output),
    "list": (lambda module, x, extra: [x, extra], lambda module, output: tuple(output)),
    "dict": (
        lambda module, x, extra: {"x": x, "extra": extra, "name": "text"},
        lambda module, output: (output["x"], output["extra"]),
    ),
    "nested": (
        lambda module, x, extra: {"in": ({"x": [x, None]}, extra)},
        lambda module, output: (output["in"][0]["x"][0], output["in"][1]),
    ),
    "dataclass": (lambda module, x, extra: Result(x, extra), lambda module, output: (output.x, output.extra)),
    "object": (lambda module, x, extra: Opaque(x, extra), lambda module, output: (output.x, output.extra)),
    "closure": (lambda module, x, extra: lambda: (x, extra), lambda module, output: output()),
    "attribute": (lambda module, x, extra: setattr(module, "result", (x, extra)), lambda module, _: module.result),
}


_EXTRAS: dict[str | None, Callable[[Any, Tensor, Tensor], Any]] = {
    None: lambda module, x, given: None,
    "mean": lambda module, x, given: x.mean(0),
    "half": lambda module, x, given: x.chunk(2)[0],
    "input": lambda module, x, given: given,
    "int": lambda module, x, given: 3,
    "weight": lambda module, x, given: module.linear_w,
    "weight_view": lambda module, x, given: module.linear_w[0],
}


class BlockModule(nn.Module):
    """A block of a program."""

    def __init__(self, block: Block, width: int, dtype: torch.dtype, trap: Trap) -> None:
        super().__init__()
        self.block = block
        self.trap = trap
        self.result: Any = None
        self.aux: Any = None
        self.kept: dict[str, Any] = {"list": []}
        shapes = {
            "linear_w": (width, width),
            "bias_w": (width,),
            "scale_w": (width,),
            "gain_w": (),
            "mlp_up": (5, width),
            "mlp_down": (width, 5),
            "table_w": (5, width),
            "spare_w": (3, 2),
            "router_w": (width, 3),
        }
        for name in block.parameters:
            values = torch.randn(shapes[name], dtype=torch.float64) * (1.0 if len(shapes[name]) < 2 else width**-0.5)
            parameter = nn.Parameter(values.to(torch.float32 if name in block.float32 else dtype))
            self.register_parameter(name, parameter.requires_grad_(name not in block.frozen))
        for child in block.blocks:
            if not child.same:
                self.add_module(child.name, BlockModule(child, width, dtype, trap))

    def forward(self, x: Tensor) -> Any:
        given = x
        for op in self.block.ops:
            x = self.change(op, x)
        return pack(self, x, _EXTRAS[self.block.extra](self, x, given))

    def change(self, op: Op, x: Tensor) -> Tensor:
        """Apply ``op`` to ``x``."""
        if isinstance(op, Call):
            return call(op, self.get_submodule(op.name), x)
        if isinstance(op, Side):
            self.keep_aside(op, x)
            return x
        return OPS[op](x, self)

    def keep_aside(self, side: Side, x: Tensor) -> None:
        """Compute a loss and keep it where ``side`` says."""
        if side.of == "router":
            loss = (x.to(self.router_w.dtype) @ self.router_w).square().mean()
        else:
            loss = (self.linear_w if side.of == "weight" else x).square().mean()
        if side.place == "attribute":
            self.aux = loss
        elif side.place == "dict":
            self.kept["loss"] = loss
        elif side.place == "list":
            self.kept["list"].append(loss)
        else:
            self.kept["closure"] = lambda: loss

    def collect(self) -> list[Tensor]:
        """The losses kept aside since the last call."""
        found = [self.aux, self.kept.pop("loss", None), *self.kept["list"]]
        if closure := self.kept.pop("closure", None):
            found.append(closure())
        self.aux, self.kept["list"] = None, []
        return [loss for loss in found if loss is not None and loss.requires_grad]


class WholeModel(BlockModule):
    """The outermost block: errors name a root by its class."""


def call(op: Call, child: nn.Module, x: Tensor) -> Tensor:
    """Call a child and use its output as ``op`` says."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not op.no_grad):
        if op.checkpoint is not None:
            output = checkpoint(child, x, use_reentrant=op.checkpoint == "reentrant")
        else:
            output = child(x=x) if op.keyword else child(x)
    y, extra = unpack(child, output)
    if op.use == "none":
        return x
    if op.use == "first":
        return y
    if op.use == "residual":
        return x + y
    if op.use == "twice":
        return y + 0.5 * y * y
    if isinstance(extra, Tensor):
        if op.use == "extra_in_place":
            extra.mul_(2)
        y = y + extra.mean()
    return y


def pack(module: Any, x: Tensor, extra: Any) -> Any:
    """The output of a block, in its form."""
    return _FORMS[module.block.form][0](module, x, extra)


def unpack(module: Any, output: Any) -> tuple[Tensor, Any]:
    """The two things that a block gives, in whatever form."""
    return _FORMS[module.block.form][1](module, output)


def _spring(x: Tensor, module: Any) -> Any:
    module.trap.spring("forward")
    return _TrapInBackward.apply(x, module.trap)


def _zero_column(x: Tensor, module: Any) -> Tensor:
    x[..., 0] = 0
    return x


def _hooked(x: Tensor, module: Any) -> Tensor:
    # A new tensor: under fully_shard a module does not receive the same tensor object that its caller passed.
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


# The module is that whose parameters they read; some read none.
OPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "tanh": lambda x, m: torch.tanh(x),
    "square": lambda x, m: x * torch.sigmoid(x),
    "double": lambda x, m: x * 2,
    "hook": _hooked,
    "detach_half": lambda x, m: x + 0.5 * x.detach(),
    "clone": lambda x, m: x.clone(),
    "detach": lambda x, m: x.detach(),
    "view": lambda x, m: x.view(x.shape),
    "slice": lambda x, m: x[:],
    "transpose": lambda x, m: x.t().t(),
    "flat_view": lambda x, m: x.reshape(-1).view(x.shape),
    "expand": lambda x, m: x.expand_as(x),
    "add_": lambda x, m: x.add_(1),
    "mul_": lambda x, m: x.mul_(0.5),
    "tanh_": lambda x, m: x.tanh_(),
    "zero_column_": _zero_column,
    "trap": _spring,
    "spare": lambda x, m: x,
    "linear": lambda x, m: x.to(m.linear_w.dtype) @ m.linear_w,
    "bias": lambda x, m: x + m.bias_w.to(x.dtype),
    "add_bias_": lambda x, m: x.add_(m.bias_w.to(x.dtype)),
    "scale": lambda x, m: x * m.scale_w.to(x.dtype),
    "gain": lambda x, m: x * m.gain_w.to(x.dtype),
    "mlp": lambda x, m: x + torch.tanh(x.to(m.mlp_up.dtype) @ m.mlp_up.t()).to(m.mlp_down.dtype) @ m.mlp_down.t(),
    "table": lambda x, m: x + F.embedding(torch.arange(len(x)) % 5, m.table_w).to(x.dtype),
}


def build(program: Program) -> tuple[WholeModel, Trap]:
    """The model of a program, always with the same values, and its trap."""
    torch.manual_seed(5)
    trap = Trap()
    model = WholeModel(program.root, program.width, DTYPES[program.dtype], trap)
    for path, block in blocks_of(program.root):
        for child in block.blocks:
            if child.same:
                model.get_submodule(path).add_module(child.name, model.get_submodule(child.same))
    for first, second in program.ties:
        if model.get_parameter(first).shape == model.get_parameter(second).shape:
            path, _, name = second.rpartition(".")
            setattr(model.get_submodule(path), name, model.get_parameter(first))
    return model, trap


def add_hooks(model: Any) -> None:
    """Register the user's hooks of every block."""
    for module in model.modules():
        for hook in module.block.hooks:
            _ADD_HOOK[hook](module)


def toggle(model: nn.Module, names: tuple[str, ...]) -> None:
    """Freeze the named parameters, or train them again; of tied ones the first name is known."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(not parameter.requires_grad)


def _change(change: Callable[[Tensor], Tensor]) -> Callable[[BlockModule], Any]:
    """A forward hook that puts something else in the place of the output."""

    def hook(module: Any, args: Any, output: Any) -> Any:
        x, extra = unpack(module, output)
        return pack(module, change(x), extra)

    return lambda module: module.register_forward_hook(hook)


def _add_one(module: Any, args: Any, output: Any) -> None:
    unpack(module, output)[0].add_(1)


def _capture(module: Any, args: Any, output: Any) -> None:
    module.kept["list"].append(unpack(module, output)[0].square().mean())


def _scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


_ADD_HOOK: dict[str, Callable[[BlockModule], Any]] = {
    "replace": _change(lambda x: x * 2),
    "tensor_hook": _change(lambda x: _hooked(x, None)),
    "in_place": lambda m: m.register_forward_hook(_add_one),
    "capture": lambda m: m.register_forward_hook(_capture),
    "pre": lambda m: m.register_forward_pre_hook(lambda module, args: tuple(0.5 * a for a in args) or None),
    "full_backward": lambda m: m.register_full_backward_hook(lambda module, into, out: _scaled(into)),
    "full_backward_pre": lambda m: m.register_full_backward_pre_hook(lambda module, out: _scaled(out)),
    "always": lambda m: m.register_forward_hook(lambda module, args, output: None, always_call=True),
}
