"""Optimizer state of one process, loaded into sharded parameters: each rank's part of it, or an error."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from shardkit.core import optimizer_step_on_shards, overlap_step
from tests.core.optimizer_steps.placed_training import build, check, optimizer_for, sharded, step
from tests.support import on_ranks

BY_NAME = r"state '(exp_avg|state1)' of parameter '0\.weight' is that of the whole.*CheckpointManager"
BY_TORCH = "got mixed torch.Tensor and DTensor"  # as with stock
ON_SHARDS = {"on_shards": optimizer_step_on_shards, "overlapped": overlap_step}


def _copy(value: Any) -> Any:
    """A copy of state: deepcopy does not support torchao's tensors."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("kind", "place", "error"),
    [
        ("torch.optim.AdamW", "owned", ""),
        ("torch.optim.AdamW", "rows", ""),
        ("torch.optim.AdamW", "elements", ""),
        ("torch.optim.AdamW", "on_shards", ""),
        ("torch.optim.AdamW", "overlapped", ""),
        ("torch.optim.AdamW", "shard", BY_TORCH),
        ("torch.optim.Muon", "owned", ""),
        ("pytorch_optimizer.SOAP", "owned", ""),
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
    before, saved = _copy(alone), _copy(trained.state_dict())
    model = sharded(before, world_size, "shard" if place in ON_SHARDS else place)
    optimizer = optimizer_for(kind, model.parameters())
    if place in ON_SHARDS:
        ON_SHARDS[place](optimizer)
    if later:
        kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        step(model, optimizer, 7)
        model.load_state_dict(kept)
    optimizer.load_state_dict(saved)
    if error:
        with pytest.raises(RuntimeError, match=error):
            step(model, optimizer, 1)
        return
    step(model, optimizer, 1)
    step(alone, trained, 1)
    check(model, [one.detach() for one in alone.parameters()], (kind, place))


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
