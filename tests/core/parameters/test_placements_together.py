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


def trained(model: nn.Module, rank: int, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """Gradients, norms and weights of three steps, as whole tensors."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        for part in range(2 if accumulate else 1):
            if accumulate:
                model.set_requires_gradient_sync(part == 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randint(19, (4, 6), generator=generator)
            model(x).float().square().mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"{step} {name}"] = parameter.grad.full_tensor()
        found[f"{step} norm"] = clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
    found.update((name, parameter.full_tensor().detach()) for name, parameter in model.named_parameters())
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "mixed_precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "kept": {"reshard_after_forward": False},
    "smaller_group": {"reshard_after_forward": 2},
    "accumulated": {},
    "budget": {},
    "hsdp": {},
    "materialized": {},
}


@pytest.mark.daily(networked=[True])
@pytest.mark.parametrize("networked", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(4)
def test_same_bits_as_shard(rank: int, world_size: int, setting: str, networked: bool) -> None:
    make = networked_mesh if networked else rank_mesh
    mesh = make((2, world_size // 2), ("replicate", "shard")) if setting == "hsdp" else make((world_size,))
    expected: dict[str, torch.Tensor] | None = None
    for choice in CHOICES:
        meta = setting == "materialized"
        model = build(choice, mesh, "meta" if meta else "cpu", **SETTINGS[setting])
        if meta:
            torch.manual_seed(9)
            materialize(model)
        if setting == "budget":
            model.set_prefetch_budget(40_000)
        seen = trained(model, rank, accumulate=setting == "accumulated")
        if expected is None:
            expected = seen
            continue
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            # Collectives add terms in an order that depends on where they lie.
            assert networked or torch.equal(seen[name], value) or name.endswith("norm"), (choice, name)
            torch.testing.assert_close(seen[name], value)
