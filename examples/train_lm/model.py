"""A byte-level GPT: pre-norm blocks, rotary positions, causal scaled-dot-product attention, an untied head.

The model is meant to be built on the meta device, sharded, given memory and only then filled:

    with torch.device("meta"):
        model = GPT(config)
    ...  # fully_shard(block) for each block, fully_shard(model)
    model.to_empty(device="cpu")
    model.reset_parameters(seed=0)

`reset_parameters` draws each parameter from its own generator, seeded by (seed, name), so that the weights do not
depend on the number of processes that they are sharded over.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

VOCABULARY = 256
"""One token is one byte."""


@dataclass(frozen=True)
class ModelConfig:
    """The hyper-parameters that decide shapes and meaning of the weights; a checkpoint fits no other values."""

    layers: int
    width: int
    heads: int
    context: int
    """Longest sequence (bytes): the length of the table of rotary angles."""

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1:
            raise ValueError(f"every hyper-parameter of the model must be at least 1, got {self}")
        if self.width % (2 * self.heads) != 0:
            raise ValueError(
                f"--width {self.width} must be a multiple of twice --heads {self.heads}: "
                "rotary positions turn pairs of a head's dims"
            )


class Attention(nn.Module):
    """Causal multi-head self-attention: [batch, time, width] to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        # As many heads as there are here: with tensor parallelism, this process's part of them.
        q, k, v = self.qkv(x).view(batch, time, 3, -1, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class Block(nn.Module):
    """One transformer layer, the unit that the training loop shards."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes [batch, time] (int64) to logits [batch, time, 256]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        angles = torch.empty(config.context, config.width // config.heads // 2)
        self.register_buffer("cos", angles, persistent=False)
        self.register_buffer("sin", torch.empty_like(angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        x = self.embedding(tokens)
        cos, sin = self.cos[:time].to(x.dtype), self.sin[:time].to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    @torch.no_grad()
    def reset_parameters(self, seed: int = 0) -> None:
        """Fill parameters and buffers, sharded or not, without communication; the same weights on any number of ranks.

        Holds one full parameter at a time on the CPU.
        """
        for name, parameter in self.named_parameters():
            full = initial_value(name, parameter.shape, self.config.layers, seed).to(parameter.device)
            if type(parameter) is DTensor:  # a placement of shardkit's own takes the whole tensor
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(full)
        half = self.cos.shape[1]
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(self.cos.shape[0], dtype=torch.float32), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021, arXiv:2104.09864) of [batch, heads, time, dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def initial_value(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    """The full initial value of one parameter on the CPU.

    Norm weights are one, the head is zero (so that training starts from uniform predictions); matrices are normal with
    a deviation of 1 / sqrt(fan in), for those that write to the residual stream divided by sqrt(2 * layers).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    if name.startswith("head"):
        return torch.zeros(shape)
    # A digest, not hash(): Python salts the hash of a string anew in every process.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    deviation = 1.0 if name.startswith("embedding") else 1 / math.sqrt(shape[1])
    if name.endswith(("attention.out.weight", "mlp_out.weight")):
        deviation /= math.sqrt(2 * layers)
    return torch.randn(shape, generator=generator) * deviation
