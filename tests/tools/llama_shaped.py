"""A small model whose layers have the projections of Llama, under the names that transformers gives them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head_dim, self.shared = width // heads, heads // groups
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor | None = None) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.shared > 1)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions, as products of complex numbers in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns[:, None]).flatten(-2).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, groups: int) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(width), Attention(width, heads, groups)
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(width), SwiGLU(width, inner)

    def forward(self, x: Tensor, turns: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaShaped(nn.Module):
    """Token ids of shape (batch, sequence) to logits of shape (batch, sequence, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, inner: int, layers: int, heads: int, groups: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, inner, heads, groups) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for number, layer in enumerate(self.layers):
            x = self.through(number, layer, x)
        return self.lm_head(self.norm(x))

    def through(self, number: int, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


few_tokens = partial(torch.randint, 32, (2, 32))
