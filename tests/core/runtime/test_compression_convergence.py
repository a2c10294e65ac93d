"""The main job's model learns as much with compressed communication as without."""

import argparse
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

from shardkit.core import CompressionPolicy, events, fully_shard
from tests.support import networked_mesh, run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_lm"
TEXT = Path(argparse.__file__)
BATCH, STEPS = 2, 60


def train(rank: int, world_size: int, policy: CompressionPolicy | None) -> tuple[list[float], int, int]:
    """Losses of training from scratch (nats a byte), and the bytes that gathers and reductions of a rank send."""
    sys.path.insert(0, str(EXAMPLE))
    from data import load_corpus, train_batch
    from model import GPT, ModelConfig

    config = ModelConfig(layers=2, width=64, heads=2, context=64)
    mesh = networked_mesh((world_size,))
    with torch.device("meta"):
        model = GPT(config)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, compression_policy=policy)
    model.to_empty(device="cpu")
    model.reset_parameters(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95))
    corpus, samples = load_corpus([TEXT], config.context), range(rank * BATCH, (rank + 1) * BATCH)
    losses, sent = [], {events.GatherStarted: 0, events.ReduceStarted: 0}

    def count(event: events.Event) -> None:
        if type(event) in sent:
            sent[type(event)] += event.wire_bytes

    with events.subscribe(count):
        for step in range(STEPS):
            tokens, targets = train_batch(corpus, 0, step, samples, config.context)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, *sent.values()


@pytest.mark.slow
def test_compressed_training_reaches_the_loss_of_full_precision() -> None:
    full, both = (
        run_ranks(2, train, policy, isolated=True, timeout=300.0)
        for policy in (None, CompressionPolicy(gather="int8", reduce="int8"))
    )
    last, compressed = (fmean(loss for losses, *_ in ranks for loss in losses[-20:]) for ranks in (full, both))
    assert last < full[0][0][0] - 2.5  # something was learnt that could be missed
    assert both[0][0][1:] != full[0][0][1:], "nothing was rounded"
    assert compressed == pytest.approx(last, abs=0.03)
    # Of four bytes an element, int8 sends one and a 64th; vectors and alignment are few bytes here.
    assert both[0][1:] == pytest.approx([sent * 65 / 256 for sent in full[0][1:]], rel=0.02)
