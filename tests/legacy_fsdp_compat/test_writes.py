"""What scripts write to parameters and gradients behind FSDP's back: as in stock, or an error with the name."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.legacy_fsdp_compat.both import (
    OURS,
    STOCK,
    Setting,
    api,
    assert_same_tensors,
    loss_of,
    whole_gradients,
    wrap,
)
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


# -- summon_full_params ------------------------------------------------------------------------------------------------


def summoned_between(rank: int, world_size: int, strategy: str, factor: float) -> None:
    """Backward computes with what the parameters are by then."""
    seen = {}
    for engine in (STOCK, OURS):
        model = wrap(engine, Setting(strategy))
        loss = loss_of(model, rank, 0)
        with api(engine).FSDP.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        loss.backward()
        seen[engine] = whole_gradients(engine, model)
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_summoned_between_forward_and_backward(strategy: str, factor: float):
    run_ranks(2, summoned_between, strategy, factor)


def replaced(rank: int, world_size: int, shape: tuple[int, int], use: str) -> None:
    errors: dict[str, type[Exception]] = {STOCK: RuntimeError, OURS: ValueError}
    for engine in (STOCK, OURS):
        model: Any = wrap(engine, Setting(policy=False), nn.Linear(8, 8))
        fsdp = api(engine).FSDP
        model.module.weight = nn.Parameter(torch.ones(shape))
        uses = {
            "summon": lambda fsdp=fsdp, model=model: fsdp.summon_full_params(model).__enter__(),
            "state_dict": lambda model=model: model.state_dict(),
            "forward": lambda model=model: model(torch.ones(1, 8)),
        }
        with pytest.raises(errors[engine]) as caught:
            uses[use]()
        if engine == OURS:
            assert "parameter 'weight' was replaced by a plain tensor" in str(caught.value)
            assert isinstance(model.module.weight, nn.Parameter), "the user's parameter is not thrown away"
            assert tuple(model.module.weight.shape) == shape


@pytest.mark.parametrize("use", ["summon", "state_dict", "forward"])
@pytest.mark.parametrize("shape", [(8, 8), (3, 2)])
def test_replaced_parameters_are_refused(shape: tuple[int, int], use: str):
    run_ranks(2, replaced, shape, use)
