"""Training with our FSDP and with stock FSDP1, on the same batches: losses, gradients, parameters."""

import pytest
import torch

from tests.legacy_fsdp_compat.both import (
    OPTIMIZERS,
    OURS,
    STOCK,
    TOLERANCE,
    Setting,
    assert_same_tensors,
    loss_of,
    train,
    whole_gradients,
    whole_state,
    wrap,
)
from tests.support import on_ranks

# Any two of the four factors meet in every way; one rank, and four, of which some have empty shards.
SETTINGS = [
    (Setting("FULL_SHARD", True, "adamw"), 2),
    (Setting("FULL_SHARD", False, "sgd"), 3),
    (Setting("SHARD_GRAD_OP", True, "sgd"), 3),
    (Setting("SHARD_GRAD_OP", False, "adamw"), 2),
    (Setting("NO_SHARD", True, "sgd"), 2),
    (Setting("NO_SHARD", False, "adamw"), 3),
    (Setting(optimizer="momentum"), 1),
    (Setting(optimizer="momentum"), 4),
]


def label(one: object) -> str:
    return f"{one.strategy}-{one.use_orig_params}-{one.optimizer}" if isinstance(one, Setting) else str(one)


@pytest.mark.parametrize(("setting", "world_size"), SETTINGS, ids=label)
@on_ranks()
def test_training_is_that_of_stock(rank: int, world_size: int, setting: Setting) -> None:
    runs = {}
    for engine in (STOCK, OURS):
        model = wrap(engine, setting)
        optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
        losses = train(model, optimizer, rank, range(setting.steps))
        loss_of(model, rank, 99).backward()
        gradients = whole_gradients(engine, model) if setting.use_orig_params else None
        runs[engine] = (losses, whole_state(engine, model), gradients)
    torch.testing.assert_close(runs[OURS][0], runs[STOCK][0], **TOLERANCE)
    assert_same_tensors(runs[STOCK][1], runs[OURS][1], **TOLERANCE)
    if setting.use_orig_params:
        assert_same_tensors(runs[STOCK][2], runs[OURS][2], **TOLERANCE)
