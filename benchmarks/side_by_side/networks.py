"""The networks that are compared. Each takes tokens and targets of shape (batch, context) and returns the mean loss."""

from collections.abc import Sequence
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
