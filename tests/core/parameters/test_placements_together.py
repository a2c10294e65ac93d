"""`Owned` and `Blocks` combined with other settings give the gradients and weights that `Shard(0)` gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core import Blocks, CPUOffloadPolicy, MixedPrecisionPolicy, Owned, clip_grad_norm_, materialize
from tests.support import networked_mesh, on_ranks, rank_mesh
from tests.support.models import TiedModel
from tests.support.sharding import shard_each

CHOICES: dict[str, Callable[[nn.Parameter], object]] = {
    "shard": lambda p: None,
    "owned": lambda p: Owned(),
    "rows": lambda p: Blocks(rows=5),
    "elements": lambda p: Blocks(elements=24),
}


def build(choice: str, mesh: Any, device: str = "cpu", **options: Any) -> nn.Module:
    torch.manual_seed(4)
    with torch.device(device):
        model = TiedModel()
    options |= {"mesh": mesh, "shard_placement_fn": CHOICES[choice]}
    return shard_each(*model.blocks, model.head, model, **options)  # the table is tied to the head


def trained(model: nn.Module, rank: int, accumulate: bool) -> dict[str, torch.Tensor]:
    """Norms of the gradients of three steps; the last gradients, and the weights, as whole tensors."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2 if accumulate else 1):
            model.set_requires_gradient_sync(part == accumulate)
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randint(19, (4, 6), generator=generator)
            model(x).float().square().mean().backward()
        found[f"{step} norm"] = clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    for name, parameter in model.named_parameters():
        found[name] = parameter.full_tensor().detach()
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.full_tensor()
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "mixed precision, kept": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": False,
    },
    "offload, accumulated": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "smaller group, materialized": {"reshard_after_forward": 2},
    "hsdp, budget": {},
}


@pytest.mark.daily(networked=[True])
@pytest.mark.parametrize("networked", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(4)
def test_same_bits_as_shard(rank: int, world_size: int, setting: str, networked: bool) -> None:
    make = networked_mesh if networked else rank_mesh
    mesh = make((2, world_size // 2), ("replicate", "shard")) if "hsdp" in setting else make((world_size,))
    expected: dict[str, torch.Tensor] | None = None
    for choice in CHOICES:
        meta = "materialized" in setting
        model = build(choice, mesh, "meta" if meta else "cpu", **SETTINGS[setting])
        if meta:
            torch.manual_seed(9)
            materialize(model)
        if "budget" in setting:
            model.set_prefetch_budget(40_000)
        seen = trained(model, rank, accumulate="accumulated" in setting)
        if expected is None:
            expected = seen
            continue
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            # Collectives add terms in an order that depends on where they lie.
            assert networked or torch.equal(seen[name], value) or name.endswith("norm"), (choice, name)
            torch.testing.assert_close(seen[name], value)
