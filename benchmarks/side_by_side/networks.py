"""The networks that are compared, and workloads: a network, the batch of one rank, the precision, the optimizer.

Each network takes tokens and targets of shape (batch, context) and returns the mean loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """The block that every system wraps as one unit."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        split = (batch, context, 3, self.heads, width // self.heads)
        query, key, value = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, context, width))


class GPTBlock(Block):
    """Twelve parameters: two layer norms, attention of width `width`, and an MLP of width `hidden`."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with one block for each entry of `hidden`, the width of that block's MLP."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, size) for size in hidden)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trained product of two narrow ones."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def with_lora(gpt: GPT, rank: int) -> GPT:
    """Freezes everything and adds adapters to the four linear layers of each block."""
    gpt.requires_grad_(False)
    for block in gpt.blocks:
        block.attention.qkv = LoRALinear(block.attention.qkv, rank)
        block.attention.proj = LoRALinear(block.attention.proj, rank)
        block.up = LoRALinear(block.up, rank)
        block.down = LoRALinear(block.down, rank)
    return gpt


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama: `kv_heads` heads of keys and values serve `heads` heads of queries."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int


class LlamaBlock(Block):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.width // shape.heads
        self.norm1 = nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.proj = nn.Linear(shape.width, shape.width, bias=False)
        self.norm2 = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        query = _rotated(self.query(x).view(batch, context, -1, self.head).transpose(1, 2))
        key = _rotated(self.key(x).view(batch, context, -1, self.head).transpose(1, 2))
        value = self.value(x).view(batch, context, -1, self.head).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, context, width))


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding over (batch, heads, context, head)."""
    context, head = x.shape[-2:]
    frequencies = 10000.0 ** (-torch.arange(0, head, 2, device=x.device) / head)
    angles = torch.outer(torch.arange(context, device=x.device), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)


@dataclass(frozen=True)
class Workload:
    """`build` makes the network on the default device; `bf16`: parameters in bfloat16, reduction in float32.

    `optimizer`: a key of `OPTIMIZERS`.
    """

    build: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    context: int
    bf16: bool = False
    gpu_only: bool = False
    frozen: bool = False
    optimizer: str = "adamw"

    def batches(self, count: int, rank: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`count` batches of random tokens and targets; every rank has its own."""
        generator = torch.Generator().manual_seed(1000 + rank)
        shape = (count, 2, self.batch, self.context)
        pairs = torch.randint(self.vocabulary, shape, generator=generator).to(device)
        return [(tokens, targets) for tokens, targets in pairs]


def _gpt(
    *, vocabulary: int, context: int, width: int, heads: int, hidden: Sequence[int], batch: int, bf16: bool = False
) -> Workload:
    return Workload(lambda: GPT(vocabulary, context, width, heads, hidden), vocabulary, batch, context, bf16)


OPTIMIZERS = {
    "adamw": "AdamW(foreach=True)",
    "muon": "torch.optim.Muon for the blocks' matrices, AdamW(foreach=True) for the rest",
}

_LORA_RANK = 24
_LLAMA_1B = LlamaShape(vocabulary=32000, layers=16, width=2048, heads=32, kv_heads=8, hidden=8192)

WORKLOADS: dict[str, Workload] = {
    "gpt-34m": _gpt(vocabulary=8192, context=128, width=512, heads=8, hidden=(2048,) * 8, batch=2),
    "gpt-34m-bf16": _gpt(vocabulary=8192, context=128, width=512, heads=8, hidden=(2048,) * 8, batch=2, bf16=True),
    "gpt-6m": _gpt(vocabulary=2048, context=128, width=256, heads=4, hidden=(1024,) * 6, batch=2),
    "deep-narrow": _gpt(vocabulary=256, context=32, width=32, heads=2, hidden=(128,) * 64, batch=1),
    "uneven": _gpt(vocabulary=1009, context=127, width=497, heads=7, hidden=(1999,) * 6, batch=1),
    "lora": Workload(
        lambda: with_lora(GPT(2048, 128, 512, 8, (2048,) * 8), _LORA_RANK), 2048, batch=1, context=128, frozen=True
    ),
    "moe-like": _gpt(
        vocabulary=2048, context=128, width=256, heads=4, hidden=(256, 8192, 512, 16384, 256, 12288), batch=1
    ),
    "llama-1b": Workload(lambda: Llama(_LLAMA_1B), 32000, batch=2, context=1024, bf16=True, gpu_only=True),
    "tiny": _gpt(vocabulary=61, context=8, width=12, heads=2, hidden=(48, 20), batch=2),
}
"""`tiny` measures nothing; it shows that the comparison itself works."""
