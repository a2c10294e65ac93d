"""Optimizer state of one process, loaded into sharded parameters: an error, by name where stock has none."""

import warnings

import pytest
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from shardkit.core import optimizer_step_on_shards, overlap_step
from tests.core.optimizer_steps.placed_training import build, optimizer_for, sharded, step
from tests.support import on_ranks

BY_NAME = r"state '(exp_avg|state1)' of parameter '0\.weight' is that of the whole.*CheckpointManager"
BY_TORCH = "got mixed torch.Tensor and DTensor"  # as with stock
ON_SHARDS = {"on_shards": optimizer_step_on_shards, "overlapped": overlap_step}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("kind", "place", "error"),
    [
        ("torch.optim.AdamW", "owned", BY_NAME),
        ("torch.optim.AdamW", "rows", BY_NAME),
        ("torch.optim.AdamW", "on_shards", BY_NAME),
        ("torch.optim.AdamW", "overlapped", BY_NAME),
        ("torch.optim.AdamW", "shard", BY_TORCH),
        ("torchao.optim.AdamW8bit", "elements", BY_NAME),
        ("torchao.optim.AdamW8bit", "shard", BY_TORCH),
        ("bitsandbytes.optim.AdamW8bit", "owned", BY_NAME),
    ],
)
@on_ranks(2, timeout=120)
def test_state_of_one_process(rank: int, world_size: int, kind: str, place: str, error: str, later: bool) -> None:
    """Before the first step, or later, when the optimizer has stepped with other state."""
    warnings.simplefilter("ignore")
    alone = build()
    trained = optimizer_for(kind, alone.parameters())
    step(alone, trained, 0)
    model = sharded(build(), world_size, "shard" if place in ON_SHARDS else place)
    optimizer = optimizer_for(kind, model.parameters())
    if place in ON_SHARDS:
        ON_SHARDS[place](optimizer)
    if later:
        step(model, optimizer, 7)
    optimizer.load_state_dict(trained.state_dict())
    with pytest.raises(RuntimeError, match=error):
        step(model, optimizer, 1)


@on_ranks(2)
def test_torch_refuses_to_distribute_it(rank: int, world_size: int) -> None:
    alone = build()
    trained = optimizer_for("torch.optim.AdamW", alone.parameters())
    step(alone, trained, 0)
    model = sharded(build(), world_size, "owned")
    optimizer = optimizer_for("torch.optim.AdamW", model.parameters())
    named = get_optimizer_state_dict(alone, trained)
    with pytest.raises(RuntimeError, match="unsupported placements Owned"):
        set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))
