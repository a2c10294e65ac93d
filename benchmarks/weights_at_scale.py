"""How long weights take to large numbers of receivers: computed from the real plans and the speed of the links.

    python benchmarks/weights_at_scale.py

See benchmarks/METHOD.md. Layers are alike, so one layer of each model is planned, and its bytes count once for each.
Engines' copies are served in chains, so a sender's bytes do not grow with their number.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from turns import table

from shardkit.weights.boxes import Box, Held, Wanted
from shardkit.weights.plan import Provided, plan

LINKS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}
Shape = tuple[int, ...]
Tensors = dict[str, tuple[Shape, int | None]]


@dataclass(frozen=True)
class Model:
    """The tensors of one layer, and those beside the layers. Each has the dim that engines cut; None: none."""

    layers: int
    layer: Tensors
    beside: Tensors


def dense(layers: int, hidden: int, inner: int, heads: int, vocabulary: int = 128256) -> Model:
    """Llama 3: 8 key heads of 128."""
    layer: Tensors = {
        "q": ((heads * 128, hidden), 0),
        "k": ((1024, hidden), 0),
        "v": ((1024, hidden), 0),
        "o": ((hidden, heads * 128), 1),
        "gate": ((inner, hidden), 0),
        "up": ((inner, hidden), 0),
        "down": ((hidden, inner), 1),
        "norms": ((2 * hidden,), None),
    }
    return Model(layers, layer, {"embedding": ((vocabulary, hidden), 0), "head": ((vocabulary, hidden), 0)})


def experts() -> Model:
    """DeepSeek V3: 256 experts and a shared one, latent attention; all layers as those with experts."""
    layer: Tensors = {
        "q_a": ((1536, 7168), None),
        "q_b": ((128 * 192, 1536), 0),
        "kv_a": ((576, 7168), None),
        "kv_b": ((128 * 256, 512), 0),
        "o": ((7168, 128 * 128), 1),
        "router": ((256, 7168), None),
        "gate": ((256, 2048, 7168), 0),
        "up": ((256, 2048, 7168), 0),
        "down": ((256, 7168, 2048), 0),
        "shared": ((3 * 2048, 7168), 0),
    }
    return Model(61, layer, {"embedding": ((129280, 7168), 0), "head": ((129280, 7168), 0)})


MODELS = {
    "Llama 8B": dense(32, 4096, 14336, 32),
    "Llama 70B": dense(80, 8192, 28672, 64),
    "Llama 405B": dense(126, 16384, 53248, 128),
    "DeepSeek 671B": experts(),
}
CASES = [("Llama 8B", 8, 1, 8), ("Llama 70B", 64, 8, 8), ("Llama 405B", 512, 16, 8), ("DeepSeek 671B", 1024, 32, 16)]
"""Model, trainers, ranks of an engine, engines."""


def cut(shape: Shape, dim: int, part: int, parts: int) -> Box:
    """One of several nearly equal runs of a dim, as `torch.chunk` cuts it; empty ones have no elements."""
    size = -(-shape[dim] // parts)
    run = (min(part * size, shape[dim]), min((part + 1) * size, shape[dim]))
    return tuple(run if at == dim else (0, whole) for at, whole in enumerate(shape))


def loads(tensors: Tensors, trainers: int, ranks: int) -> tuple[Sequence[int], Sequence[int]]:
    """Bytes that each trainer sends to the ranks of one engine, and that each of these receives."""
    held: dict[int, list[Held]] = {}
    for rank in range(trainers):
        boxes = {name: cut(shape, 0, rank, trainers) for name, (shape, _) in tensors.items()}
        held[rank] = [
            Held(name, torch.bfloat16, shape, (boxes[name],) if boxes[name][0][0] < boxes[name][0][1] else ())
            for name, (shape, _) in tensors.items()
        ]
    provided = Provided(held)
    sent: Counter[int] = Counter()
    received = []
    for rank in range(ranks):
        # `cut` into one part is the whole.
        wants = [
            Wanted(name, torch.bfloat16, cut(shape, 0, 0, 1) if dim is None else cut(shape, dim, rank, ranks))
            for name, (shape, dim) in tensors.items()
        ]
        pieces = plan(provided, wants, turn=rank)
        for trainer, some in pieces.items():
            sent[trainer] += sum(one.nbytes for one in some)
        received.append(sum(one.nbytes for some in pieces.values() for one in some))
    return [sent[rank] for rank in range(trainers)], received


def row(name: str, trainers: int, ranks: int, engines: int) -> list[str]:
    model = MODELS[name]
    layer, beside = (loads(one, trainers, ranks) for one in (model.layer, model.beside))
    sent, received = (
        [model.layers * one + other for one, other in zip(layer[side], beside[side], strict=True)] for side in (0, 1)
    )
    most = max(*sent, *received)
    total = 2 * sum(
        count * math.prod(shape)
        for count, tensors in ((model.layers, model.layer), (1, model.beside))
        for shape, _ in tensors.values()
    )
    sizes = [f"{total / 1e9:.0f}", f"{max(sent) / 1e9:.2f}", f"{max(received) / 1e9:.2f}"]
    times = [f"{nbytes / speed:.2f}" for nbytes in (most, total) for speed in LINKS.values()]
    return [name, str(trainers), f"{engines} x {ranks}", *sizes, *times]


if __name__ == "__main__":
    head = ["model", "trainers", "engines x ranks", "GB", "most sent", "most received"]
    print(table([*head, *LINKS, *(f"whole, {one}" for one in LINKS)], [row(*case) for case in CASES]))
