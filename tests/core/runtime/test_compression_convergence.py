"""The main job's model learns as much with compressed communication as without."""

import argparse
from pathlib import Path

import pytest
from benchmarks.compression import POLICIES, Job, ModelConfig, last_loss, train

from tests.support import run_ranks

JOB = Job(ModelConfig(layers=2, width=64, heads=2, context=64), steps=60, lr=5e-3, text=(Path(argparse.__file__),))


@pytest.mark.slow
def test_compressed_training_reaches_the_loss_of_full_precision() -> None:
    names = ("full precision", "both int8")
    runs = {name: run_ranks(2, train, POLICIES[name], JOB) for name in names}
    full = runs["full precision"]
    first, last = full[0].losses[0], last_loss(full, 20)
    assert last < first - 2.5  # something was learnt that could be missed
    for name in names[1:]:
        assert runs[name][0].losses[1:] != full[0].losses[1:], "nothing was rounded"
        assert last_loss(runs[name], 20) == pytest.approx(last, abs=0.03), name
    # Of four bytes an element, int8 sends one and a 64th; vectors and alignment are few bytes here.
    both = runs["both int8"][0]
    assert both.gather_bytes == pytest.approx(full[0].gather_bytes * 65 / 256, rel=0.02)
    assert both.reduce_bytes == pytest.approx(full[0].reduce_bytes * 65 / 256, rel=0.02)
