"""Models from a Hugging Face config, and how they are cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shardkit.tools.estimating.job import EstimateError, TensorParallel

# Model types of Hugging Face whose layers have these shapes; with biases on query, key and value for the second group.
_PLAIN = ("llama", "mistral")
_WITH_BIAS = ("qwen2",)


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model, named as Hugging Face's configs name them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(config: Mapping[str, Any]) -> LlamaConfig:
        """Reads a Hugging Face config.

        Raises:
            EstimateError: for a model of another shape, and for sizes that are missing.
        """
        kind = config.get("model_type")
        if kind not in (*_PLAIN, *_WITH_BIAS):
            raise EstimateError(
                f"a config of model_type {kind!r} is none of {', '.join((*_PLAIN, *_WITH_BIAS))}, the Llama-shaped "
                "ones that are built without transformers; install transformers, which builds any model, "
                "or give a factory (shardkit estimate pkg.module:function)"
            )
        wanted = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        if missing := [name for name in wanted if not isinstance(config.get(name), int)]:
            raise EstimateError(f"the config lacks {', '.join(missing)}; expected whole numbers")
        heads = config["num_attention_heads"]
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        return LlamaConfig(
            **{name: config[name] for name in wanted},
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-5),
            rope_theta=config.get("rope_theta") or 10_000.0,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", kind in _WITH_BIAS)),
            dtype=getattr(torch, dtype),
        )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        width, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        query, key, value = (
            projection(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.groups > 1)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, sequence, -1))
        return projected


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class RMSNorm(nn.Module):
    """Normalises by the root mean square, in float32, as Hugging Face's Llama does."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class Llama(nn.Module):
    """Token ids of shape (batch, sequence) to logits of shape (batch, sequence, vocabulary)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.to(config.dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cosine, sine = self._positions(input_ids.shape[1], x)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits

    def _positions(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.config.head_dim, 2, device=like.device) / self.config.head_dim
        angles = torch.outer(torch.arange(length, device=like.device), self.config.rope_theta**-half)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a Hugging Face config.json.

    Raises:
        EstimateError: for a file that is no config.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EstimateError(f"{path} cannot be read as a Hugging Face config: {error}") from error
    if not isinstance(config, dict):
        raise EstimateError(f"{path}: expected an object, got {type(config).__name__}")
    return config


def model_from_hf_config(path: Path) -> nn.Module:
    """Builds the model of a config.json: with transformers if it is installed, else Llama-shaped ones by ourselves.

    Raises:
        EstimateError: for a file that is no config, or one of a model that cannot be built.
    """
    config = read_config(path)
    try:
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return Llama(LlamaConfig.of(config))
    settings = transformers.AutoConfig.for_model(**config)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(settings)
    return model


def is_llama_shaped(config: Mapping[str, Any]) -> bool:
    """Whether the layers of a config's model have the projections of Llama, under its names."""
    return config.get("model_type") in (*_PLAIN, *_WITH_BIAS)


def vocabulary_of(path: Path) -> int:
    """How many token ids a config knows.

    Raises:
        EstimateError: if it does not say.
    """
    size = read_config(path).get("vocab_size")
    if not isinstance(size, int):
        raise EstimateError(
            f'{path} has no "vocab_size" at its top, as configs of several models have not; give a factory instead '
            "(shardkit estimate pkg.module:function --inputs ...)"
        )
    return size


# Projections whose output features are cut, and those that take what these give.
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def cut_llama(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts attention heads and feed-forward features of every layer of a Llama-shaped model over `mesh`, in place.

    Raises:
        EstimateError: if heads or features cannot be dealt out evenly.
    """
    for fqn, block in model.named_modules():
        if not all(_has(block, name) for name in (*COLUMNS, *ROWS)):
            continue
        head_dim = block.get_submodule("self_attn").head_dim
        _check(fqn, block, head_dim if isinstance(head_dim, int) else 1, mesh.size())
        styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMNS}
        parallelize_module(block, mesh, styles | {name: RowwiseParallel() for name in ROWS})


def _has(block: nn.Module, name: str) -> bool:
    inner: nn.Module | None = block
    for part in name.split("."):
        inner = getattr(inner, part, None)
    return isinstance(inner, nn.Linear)


def _check(fqn: str, block: nn.Module, head_dim: int, ranks: int) -> None:
    for name in COLUMNS:
        projection = block.get_submodule(name)
        assert isinstance(projection, nn.Linear)
        unit = head_dim if name.startswith("self_attn.") else 1
        if projection.out_features // unit % ranks:
            raise EstimateError(
                f"'{fqn}.{name}' has {projection.out_features // unit} {'heads' if unit > 1 else 'features'}, which "
                f"{ranks} ranks of the axis 'tp' cannot share evenly; use a size that divides them"
            )


def plan_of_config(path: Path) -> TensorParallel | None:
    """How the model of a Hugging Face config is cut; None for one whose projections have other names."""
    return cut_llama if is_llama_shaped(read_config(path)) else None
