"""Optimizer state of one process, loaded into sharded parameters, is refused: each rank needs its part of it."""

import warnings

import pytest
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from shardkit.core import optimizer_step_on_shards
from tests.core.optimizer_steps.placed_training import build, optimizer_for, sharded, step
from tests.support import on_ranks

_BY_NAME = r"state '(exp_avg|state1)' of parameter '0\.weight' .* of the whole.*CheckpointManager"
_BY_TORCH = "got mixed torch.Tensor and DTensor"  # as with stock


@pytest.mark.parametrize(
    ("kind", "place", "error"),
    [
        ("torch.optim.AdamW", "owned", _BY_NAME),
        ("torch.optim.AdamW", "rows", _BY_NAME),
        ("torch.optim.AdamW", "on_shards", _BY_NAME),
        ("torch.optim.AdamW", "shard", _BY_TORCH),
        ("torchao.optim.AdamW8bit", "elements", _BY_NAME),
        ("torchao.optim.AdamW8bit", "shard", _BY_TORCH),
        ("bitsandbytes.optim.AdamW8bit", "owned", _BY_NAME),
    ],
)
@on_ranks(2)
def test_state_of_one_process_is_refused(rank: int, world_size: int, kind: str, place: str, error: str) -> None:
    warnings.simplefilter("ignore")
    alone = build()
    trained = optimizer_for(kind, alone.parameters())
    step(alone, trained, 0)
    model = sharded(build(), world_size, "shard" if place == "on_shards" else place)
    optimizer = optimizer_for(kind, model.parameters())
    if place == "on_shards":
        optimizer_step_on_shards(optimizer)
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
