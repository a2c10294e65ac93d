"""Writes of scripts to parameters and gradients behind FSDP's back: as in stock, or an error with the name."""

import functools
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
    build,
    loss_of,
    whole_gradients,
    whole_state,
    wrap,
)
from tests.support import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


# -- `.data =` ---------------------------------------------------------------------------------------------------------


def assigned_data(rank: int, world_size: int, what: str) -> None:
    """Stock writes such data back into its flat parameter before the next forward; ours raises in it."""
    for engine in (STOCK, OURS):
        model = wrap(engine, Setting(policy=False), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(torch.ones(1, 8)).sum().backward()
        before = whole_state(engine, model)
        if what == "parameter":
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
        elif what == "vector":
            vector = torch.cat([p.detach().to_local().flatten() if engine == OURS else p for p in model.parameters()])
            if engine == STOCK:
                torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
            else:
                for parameter in model.parameters():
                    parameter.data = vector[: parameter.numel()].view(-1)
        else:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data = torch.zeros_like(parameter.grad)
        if engine == STOCK:
            if what == "gradient":
                optimizer.step()
            factor = 1 if what == "gradient" else 2
            assert_same_tensors({name: value * factor for name, value in before.items()}, whole_state(engine, model))
        else:
            uses = [optimizer.step] if what == "gradient" else [functools.partial(model, torch.ones(1, 8))]
            if what != "gradient":
                uses = [model.state_dict, api(OURS).FSDP.summon_full_params(model).__enter__, *uses]
            for use in uses:
                with pytest.raises(RuntimeError, match=r"data of (the gradient of )?parameter 'weight' was replaced"):
                    use()


@pytest.mark.parametrize("what", ["parameter", "vector", "gradient"])
def test_data_that_is_assigned(what: str):
    run_ranks(2, assigned_data, what)


def assigned_data_of_whole_parameters(rank: int, world_size: int) -> None:
    """Within summon_full_params there are plain tensors, whose data is written back; stock drops it."""
    for engine, factor in ((STOCK, 1.0), (OURS, 4.0)):
        model = wrap(engine, Setting())
        expected = {name: parameter.detach() * factor for name, parameter in build().named_parameters()}
        with api(engine).FSDP.summon_full_params(model):
            vector = torch.nn.utils.parameters_to_vector(model.parameters())
            torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
        with api(engine).FSDP.summon_full_params(model):
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
        seen = whole_state(engine, model)
        assert_same_tensors(expected, {name: seen[name] for name in expected})


def test_data_that_is_assigned_to_whole_parameters():
    run_ranks(2, assigned_data_of_whole_parameters)


# -- summon_full_params ------------------------------------------------------------------------------------------------


def summoned_between(rank: int, world_size: int, strategy: str, factor: float) -> None:
    """Backward computes with the values that the parameters have by then."""
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


# -- gradients that no_sync left ---------------------------------------------------------------------------------------


def zeroed_after_no_sync(rank: int, world_size: int, strategy: str) -> None:
    seen = {}
    for engine in (STOCK, OURS):
        model = wrap(engine, Setting(strategy))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.no_sync():
            loss_of(model, rank, 0).backward()
        model.zero_grad()
        with model.no_sync():
            loss_of(model, rank, 1).backward()
        loss_of(model, rank, 2).backward()
        seen[engine] = whole_gradients(engine, model)
        optimizer.zero_grad()
    assert_same_tensors(seen[STOCK], seen[OURS], **TOLERANCE)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_zeroed_after_no_sync(strategy: str):
    run_ranks(2, zeroed_after_no_sync, strategy)


def summoned_within_no_sync(rank: int, world_size: int) -> None:
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


def test_gradients_that_wait_are_not_summoned():
    run_ranks(2, summoned_within_no_sync)
