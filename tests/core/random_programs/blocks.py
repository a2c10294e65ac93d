"""The modules of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.random_programs.program import Block, Call, Op, Program, Side

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


def _keep(module: BlockModule, x: Tensor, extra: Any) -> None:
    module.result = (x, extra)


_PACK: dict[str, Callable[[Any, Tensor, Any], Any]] = {
    "tensor": lambda module, x, extra: x,
    "tuple": lambda module, x, extra: (x, extra),
    "list": lambda module, x, extra: [x, extra],
    "dict": lambda module, x, extra: {"x": x, "extra": extra, "name": "text"},
    "nested": lambda module, x, extra: {"in": ({"x": [x, None]}, extra)},
    "dataclass": lambda module, x, extra: Result(x, extra),
    "object": lambda module, x, extra: Opaque(x, extra),
    "closure": lambda module, x, extra: lambda: (x, extra),
    "attribute": _keep,
}

_UNPACK: dict[str, Callable[[Any, Any], tuple[Tensor, Any]]] = {
    "tensor": lambda module, output: (output, None),
    "tuple": lambda module, output: (output[0], output[1]),
    "list": lambda module, output: (output[0], output[1]),
    "dict": lambda module, output: (output["x"], output["extra"]),
    "nested": lambda module, output: (output["in"][0]["x"][0], output["in"][1]),
    "dataclass": lambda module, output: (output.x, output.extra),
    "object": lambda module, output: (output.x, output.extra),
    "closure": lambda module, output: output(),
    "attribute": lambda module, output: module.result,
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
        return _PACK[self.block.form](self, x, self.beside(x, given))

    def change(self, op: Op, x: Tensor) -> Tensor:
        """Apply ``op`` to ``x``."""
        if isinstance(op, Call):
            return call(op, self.get_submodule(op.name), x)
        if isinstance(op, Side):
            self.keep_aside(op, x)
            return x
        return changed(op, x, self)

    def beside(self, x: Tensor, given: Tensor) -> Any:
        """The other thing that comes out."""
        kind = self.block.extra
        if kind == "mean":
            return x.mean(0)
        if kind == "half":
            return x.chunk(2)[0]
        named = {"input": given, "weight": getattr(self, "linear_w", None), "int": 3, None: None}
        return self.linear_w[0] if kind == "weight_view" else named[kind]

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


def unpack(module: nn.Module, output: Any) -> tuple[Tensor, Any]:
    """The two things that a block gives, in whatever form."""
    return _UNPACK[module.block.form](module, output)  # type: ignore[index, operator, union-attr]


def changed(op: str, x: Tensor, module: Any = None) -> Tensor:
    """Apply an operation to ``x``; ``module`` has the parameters."""
    if op in _FREE:
        return _FREE[op](x)
    if op == "trap":
        module.trap.spring("forward")
        return _TrapInBackward.apply(x, module.trap)  # type: ignore[no-any-return]
    if op == "spare":
        return x
    return _WITH_PARAMETERS[op](x, module)


def _zero_column(x: Tensor) -> Tensor:
    x[..., 0] = 0
    return x


def _hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 0.5)
    return x


_FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "square": lambda x: x * torch.sigmoid(x),
    "double": lambda x: x * 2,
    # A new tensor: under fully_shard a module does not receive the same tensor object that its caller passed.
    "hook": lambda x: _hooked(x.clone()),
    "detach_half": lambda x: x + 0.5 * x.detach(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(x.shape),
    "slice": lambda x: x[:],
    "transpose": lambda x: x.t().t(),
    "flat_view": lambda x: x.reshape(-1).view(x.shape),
    "expand": lambda x: x.expand_as(x),
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(0.5),
    "tanh_": lambda x: x.tanh_(),
    "zero_column_": _zero_column,
    "pause": lambda x: x,
}

_WITH_PARAMETERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
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
    _share_modules(model, model, program.root)
    for first, second in program.ties:
        one, other = (_slot(model, name) for name in (first, second))
        if one[0]._parameters[one[1]].shape == other[0]._parameters[other[1]].shape:  # type: ignore[union-attr]
            other[0]._parameters[other[1]] = one[0]._parameters[one[1]]
    return model, trap


def _share_modules(model: nn.Module, module: nn.Module, block: Block) -> None:
    for child in block.blocks:
        if child.same:
            module.add_module(child.name, model.get_submodule(child.same))
        else:
            _share_modules(model, module.get_submodule(child.name), child)


def _slot(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def add_hooks(model: nn.Module) -> None:
    """Register the user's hooks of every block."""
    for module in block_modules(model):
        for hook in module.block.hooks:
            _ADD_HOOK[hook](module)


def toggle(model: nn.Module, names: tuple[str, ...]) -> None:
    """Freeze the named parameters, or train them again; of tied ones the first name is known."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(not parameter.requires_grad)


def block_modules(model: nn.Module) -> Iterator[BlockModule]:
    """The blocks below ``model``, each once."""
    return (module for module in model.modules() if isinstance(module, BlockModule))


def _replace(module: BlockModule) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        x, extra = unpack(module, output)
        return _PACK[module.block.form](module, x * 2, extra)

    module.register_forward_hook(hook)


def _in_place(module: BlockModule) -> None:
    def hook(module: Any, args: Any, output: Any) -> None:
        unpack(module, output)[0].add_(1)

    module.register_forward_hook(hook)


def _tensor_hook(module: BlockModule) -> None:
    def hook(module: Any, args: Any, output: Any) -> Any:
        x, extra = unpack(module, output)
        # A block may return its input: see the operation "hook".
        return _PACK[module.block.form](module, _hooked(x.clone()), extra)

    module.register_forward_hook(hook)


def _capture(module: BlockModule) -> None:
    def hook(module: Any, args: Any, output: Any) -> None:
        x, _ = unpack(module, output)
        module.kept["list"].append(x.square().mean())

    module.register_forward_hook(hook)


def _scaled(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


_ADD_HOOK: dict[str, Callable[[BlockModule], Any]] = {
    "replace": _replace,
    "in_place": _in_place,
    "tensor_hook": _tensor_hook,
    "capture": _capture,
    "pre": lambda m: m.register_forward_pre_hook(lambda module, args: tuple(0.5 * a for a in args) or None),
    "full_backward": lambda m: m.register_full_backward_hook(lambda module, into, out: _scaled(into)),
    "full_backward_pre": lambda m: m.register_full_backward_pre_hook(lambda module, out: _scaled(out)),
    "always": lambda m: m.register_forward_hook(lambda module, args, output: None, always_call=True),
}
