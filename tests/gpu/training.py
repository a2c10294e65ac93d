"""Networks, engines and measures that the parts share. Networks are those of benchmarks/side_by_side."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp as stock
from side_by_side.networks import GPT, Block, Llama, LlamaShape
from torch import nn

import shardkit.core as ours
from tests.gpu.worlds import ON_CPU, Mirror, Place

ENGINES: dict[str, ModuleType | None] = {"alone": None, "stock": stock, "ours": ours}
MIB, MS = 2**20, 1e-3


@dataclass(frozen=True)
class Network:
    """`build` makes it on the default device; it takes tokens and targets and returns the loss."""

    build: Callable[[], nn.Module]
    vocabulary: int
    batch: int
    context: int

    def inputs(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = torch.randint(self.vocabulary, (2, self.batch, self.context), device=device)
        return tokens, targets


def _gpt(vocabulary: int, width: int, hidden: Sequence[int], batch: int, context: int) -> Network:
    return Network(lambda: GPT(vocabulary, context, width, max(1, width // 64), hidden), vocabulary, batch, context)


def _llama(layers: int, width: int, hidden: int, batch: int, context: int, vocabulary: int = 32000) -> Network:
    shape = LlamaShape(vocabulary, layers, width, heads=width // 64, kv_heads=width // 256, hidden=hidden)
    return Network(lambda: Llama(shape), vocabulary, batch, context)


NETWORKS = {
    "uniform": _gpt(8192, 1024, (4096,) * 12, 2, 512),
    "llama": _llama(8, 2048, 8192, 1, 512),
    "llama-1.3b": _llama(20, 2048, 8192, 2, 2048),
    "tiny": _gpt(67, 64, (192, 99), 2, 8),
    "deep": _gpt(256, 256, (1024,) * 64, 4, 64),
    "uneven": _gpt(2048, 512, (512, 16384, 1024, 32768, 512, 24576), 4, 256),
}
if ON_CPU:
    NETWORKS = {name: _gpt(61, 64, (64, 96), 1, 8) for name in NETWORKS}
    NETWORKS["llama"] = NETWORKS["llama-1.3b"] = _llama(2, 256, 64, 1, 8, vocabulary=61)


@dataclass
class Trainer:
    """A network under an engine, with its optimizer and one batch."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]

    def forward_backward(self) -> None:
        self.network(*self.batch).backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def without_update(self) -> None:
        self.forward_backward()
        self.optimizer.zero_grad()


def trainer(engine: str, network: Network, place: Place, *, bf16: bool, **options: Any) -> Trainer:
    """The blocks and the root sharded by `engine`; parameters in fp32, with `bf16` computing in bf16.

    Alone nothing is sharded, and with `bf16` the parameters are in it: what the computation itself takes.
    """
    torch.manual_seed(0)
    api = ENGINES[engine]
    with place.device:
        made = network.build()
    if api is None:
        made = made.to(torch.bfloat16) if bf16 else made
    else:
        if bf16:
            options["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = place.mesh()
        for module in made.modules():
            if isinstance(module, Block):
                api.fully_shard(module, mesh=mesh, **options)
        api.fully_shard(made, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=not ON_CPU)
    if api is ours:
        ours.optimizer_step_on_shards(optimizer)
    return Trainer(made, optimizer, network.inputs(place.device))


def layers(api: Any, mesh: Any, width: int = 512, count: int = 12, **options: Any) -> nn.Module:
    """Layers that are sharded one by one, and their sequence; the width is odd in one, so that rows are padded."""
    torch.manual_seed(0)
    width = 32 if ON_CPU else width
    with torch.device(mesh.device_type):
        model = nn.Sequential(*(_Layer(width, width + (7 if number == 1 else 0)) for number in range(count)))
    for layer in model:
        api.fully_shard(layer, mesh=mesh, **options)
    api.fully_shard(model, mesh=mesh, **options)
    return model


class _Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def inputs(model: nn.Module, rank: int, step: int, device: torch.device) -> torch.Tensor:
    width = model[0].down.out_features
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(64, width, generator=generator).to(device)


def reset_peak() -> None:
    synchronize()
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()


def synchronize() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


def in_turn(works: dict[str, Callable[[], object]], rounds: int, times: int = 1) -> dict[str, dict[str, float]]:
    """Median milliseconds of one call of each work, which take turns: of the device, and of the host.

    On a CPU both are of the clock. The host's leave out what `Mirror` spends.
    """
    found: dict[str, dict[str, list[float]]] = {name: {"ms": [], "host_ms": []} for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            synchronize()
            events = [] if ON_CPU else [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            mirror, began = Mirror.host_seconds, time.perf_counter()
            for event in events[:1]:
                event.record()
            for _ in range(times):
                work()
            spent = (time.perf_counter() - began) / MS / times
            for event in events[1:]:
                event.record()
            synchronize()
            found[name]["ms"].append(events[0].elapsed_time(events[1]) / times if events else spent)
            found[name]["host_ms"].append(spent - (Mirror.host_seconds - mirror) / MS / times)
    # The first round warms up.
    return {name: {kind: round(median(own[1:]), 3) for kind, own in kinds.items()} for name, kinds in found.items()}


def empty_cache() -> None:
    """Gives back all memory that nothing holds."""
    gc.collect()
    if not ON_CPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
