"""The cost of recording: steps of a GPT with and without a recorder, in turn, in the same processes."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.rank_clock import by_ranks, clock
from shardkit.core import fully_shard
from shardkit.tools import profile

_WIDTH, _LAYERS, _VOCABULARY, _CONTEXT, _BATCH = 384, 6, 256, 128, 4
_ROUNDS, _STEPS = 6, 2


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 6, batch_first=True)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.second(x))))


class _GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@by_ranks
@pytest.mark.parametrize("recorded", [False, True])
def test_step(benchmark, recorded):
    """One step on two ranks; the two cases are measured together, and each reports its own."""
    clock.measure(benchmark, 2, _one_case, recorded)


def _one_case(rank, world_size, recorded):
    return steps_in_turn(rank, world_size)[recorded]


def steps_in_turn(rank, world_size):
    """Seconds of a step without and with a recorder, in turn, after warm-up."""
    model, optimizer, step = training_step(world_size)

    def steps(count):
        begin = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - begin) / count

    steps(2)
    times = [], []
    for _ in range(_ROUNDS):
        times[False].append(steps(_STEPS))
        with profile(model, optimizer):
            times[True].append(steps(_STEPS))
    return times


def training_step(world_size):
    """A sharded GPT, its optimizer, and a function that runs one step."""
    torch.manual_seed(0)
    model = _GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(_VOCABULARY, (_BATCH // world_size, _CONTEXT))

    def step():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
