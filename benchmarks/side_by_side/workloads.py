"""Workloads to train: a network, the batch of one rank, the precision, the optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from side_by_side.networks import GPT, Llama, LlamaShape, with_lora


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
