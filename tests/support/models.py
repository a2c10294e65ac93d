"""Small models for differential tests: how to build and feed one, its loss, and the blocks to shard."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

BATCH = 2
SEQUENCE = 6
VOCABULARY = 17


@dataclass(frozen=True)
class ModelSpec:
    """A model, with the parts that a training loop needs.

    ``blocks`` returns the submodules that get a ``fully_shard`` call each, innermost first, before the root's own.
    ``inputs`` draws one micro-batch from a generator; ``loss`` maps the model's output to a scalar.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]


class Composed(nn.Module):
    """Children and parameters by name; ``run(module, *inputs)`` is its forward."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


class Block(nn.Module):
    """A residual block with a hidden width that no world size but 1 divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))) * self.scale


class MLP(nn.Module):
    """Dims 5, 7, 1 and 13, so that some ranks hold padded chunks and some hold nothing."""

    def __init__(self, reentrant: bool | None = None, repeats: int = 1) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([Block(7, 13), Block(7, 1), Block(7, 5)])
        self.out = nn.Linear(7, 1)
        self.register_buffer("shift", torch.ones(1))
        self.reentrant, self.repeats = reentrant, repeats

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for _ in range(self.repeats):
            for block in self.blocks:
                if self.reentrant is None:
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x) + self.shift.to(x.dtype)

    def score(self, x: Tensor) -> Tensor:
        """A second way in, beside ``forward``."""
        return self.out(self.blocks[0](self.inp(x))) * 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.mlp = nn.LayerNorm(width), Block(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model whose head is its embedding; every second dim is divisible by 1, 2, 3 and 4."""

    def __init__(self, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(SEQUENCE, width) * 0.1)
        self.layers = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@dataclass
class Answer:
    """An output that is not a tensor; registered with pytree, as stock looks for tensors there."""

    value: Tensor
    extras: dict[str, list[Tensor]]
    note: str = "an answer"


pytree.register_dataclass(Answer)


class Branch(nn.Module):
    def __init__(self, used: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)
        self.used = used

    def forward(self, x: Tensor) -> dict[str, object]:
        side = self.right(x) if self.used else x.detach()
        return {"main": torch.tanh(self.left(x)), "rest": (side, [x.mean()]), "none": None}


class Nested(nn.Module):
    """Dict and dataclass outputs, outputs that the loss leaves out, parameters that the forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([Branch(True), Branch(False)])
        self.idle = nn.Linear(7, 3)
        self.out = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Answer:
        first = self.branches[0](x)
        second = self.branches[1](first["main"])
        return Answer(self.out(second["main"]), {"unused": [first["rest"][0], second["rest"][0]]})


class MixedDtypes(nn.Module):
    """A trainable float32 part beside a frozen bfloat16 part and an integer buffer, in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7).to(torch.bfloat16).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(7, 13)])
        self.out = nn.Linear(7, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        frozen = self.frozen(x.to(self.frozen.weight.dtype)).to(self.out.weight.dtype)
        return self.out(self.blocks[0](frozen))


def partly_frozen() -> nn.Module:
    """An MLP with a frozen block, a frozen input layer, and frozen biases among trainable weights."""
    model = MLP()
    model.inp.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.bias.requires_grad_(False)
    return model


def _features(width: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (torch.randn(BATCH, width, generator=generator),)


def _tokens(generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator),)


def _mean_square(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    return (output - 0.5).square().mean()


def _cross_entropy(output: object) -> Tensor:
    assert isinstance(output, Tensor)
    flat = output.reshape(-1, VOCABULARY)
    return F.cross_entropy(flat, torch.arange(len(flat), device=flat.device) % VOCABULARY)


def _mlp(build: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec(build, _features(5), _mean_square, lambda model: list(model.blocks))


def _transformer(blocks: Callable[[Any], list[nn.Module]]) -> ModelSpec:
    return ModelSpec(Transformer, _tokens, _cross_entropy, blocks)


MODELS = {
    "mlp": _mlp(MLP),
    "transformer": _transformer(lambda model: list(model.layers)),
    "transformer_nested": _transformer(
        lambda model: [part for layer in model.layers for part in (layer.attention, layer.mlp, layer)]
    ),
    "frozen": _mlp(partly_frozen),
    "mixed_dtypes": _mlp(MixedDtypes),
    "nested_outputs": ModelSpec(
        Nested, _features(7), lambda output: _mean_square(output.value), lambda model: list(model.branches)
    ),
    "checkpoint_reentrant": _mlp(lambda: MLP(reentrant=True)),
    "checkpoint_non_reentrant": _mlp(lambda: MLP(reentrant=False)),
    "repeated_forward": _mlp(lambda: MLP(repeats=2)),
}


class GatedBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class TiedModel(nn.Module):
    """With a tied head, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(3))
        self.head = nn.Linear(16, 19, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1].down.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y)
