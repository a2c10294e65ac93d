"""Writes of scripts to parameters and gradients behind FSDP's back: as in stock, or an error with the name."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.legacy_fsdp_compat.both import (
    OURS,
    STOCK,
    Setting,
    api,
    loss_of,
    wrap,
)
from tests.support import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@on_ranks(2)
def test_data_that_is_assigned_is_refused(rank: int, world_size: int) -> None:
    model = wrap(OURS, Setting(policy=False), nn.Linear(8, 8))
    for parameter in model.parameters():
        parameter.data = parameter.data * 2
    for use in (model.state_dict, api(OURS).FSDP.summon_full_params(model).__enter__):
        with pytest.raises(RuntimeError, match=r"data of parameter 'weight' was replaced"):
            use()


@pytest.mark.parametrize(("use", "shape"), [("summon", (8, 8)), ("state_dict", (3, 2)), ("forward", (3, 2))])
@on_ranks(2)
def test_replaced_parameters_are_refused(rank: int, world_size: int, shape: tuple[int, int], use: str) -> None:
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


@on_ranks(2)
def test_gradients_that_wait_are_not_summoned(rank: int, world_size: int) -> None:
    """There are no whole gradients yet; stock raises AssertionError."""
    fsdp = api(OURS).FSDP
    model = wrap(OURS, Setting())
    with model.no_sync():
        loss_of(model, rank, 0).backward()
    with (
        pytest.raises(RuntimeError, match=r"a gradient of parameter '.*inp\.weight' waits for its reduction"),
        fsdp.summon_full_params(model, with_grads=True),
    ):
        pass
    with fsdp.summon_full_params(model):
        pass
