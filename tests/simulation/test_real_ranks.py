"""Offloaded training on real ranks whose tensors are on the simulated device, against stock's: the same bits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import shardkit.core
from tests.simulation.device import COMPILER, Observer, simulate
from tests.support import meshes, run_ranks
from tests.support.features import FEATURES, Feature
from tests.support.models import MODELS
from tests.support.parity import Case, compare_training
from tests.support.schedules import Run, plain

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the simulated device is compiled from C++")


def _overlapped(run: Run, step: int) -> None:
    if not step and run.api is shardkit.core:
        shardkit.core.overlap_step(run.optimizer)
    plain(run, step)


def _loaded(run: Run, step: int) -> None:
    """Before each step weights are copied into the shards, or assigned in the place of some of them."""
    state = {fqn: value * 0.5 for fqn, value in run.model.state_dict().items()}
    if step == 1:
        state = dict(list(state.items())[1::2])
    run.model.load_state_dict(state, strict=False, assign=bool(step))
    if step:
        run.optimizer.state.clear()
        run.optimizer.param_groups[0]["params"] = [one for one in run.model.parameters() if one.requires_grad]
    plain(run, step)


_gradients: list[Any] = []


def _held(run: Run, step: int) -> None:
    """The caller holds all gradients."""
    if not step:
        _gradients.clear()
    run.loss(step).backward()
    _gradients.extend(parameter.grad for parameter in run.model.parameters())
    for number, gradient in enumerate(_gradients):
        run.trace.add(f"step {step}: held {number}", gradient)
    run.update()


_ON_DEVICE = {
    "offload": Feature("offload_policy", lambda api, *_: {"offload_policy": api.CPUOffloadPolicy()}),
    "not_pinned": Feature("offload_policy", lambda api, *_: {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)}),
    "overlapped": Feature("schedule", schedule=_overlapped),
    "loaded": Feature("schedule", schedule=_loaded),
    "held": Feature("schedule", schedule=_held),
}
# Shards of "mlp" are uneven, and empty on some ranks.
_CASES: dict[int, list[tuple[str, str, str]]] = {
    1: [
        ("mlp", "offload accumulate", "adamw"),
        ("frozen", "offload bfloat16 held", "sgd"),
        ("mixed_dtypes", "offload", "adamw"),
    ],
    2: [
        ("mlp", "offload held", "adamw"),
        ("frozen", "offload bfloat16_reduce_float32 accumulate_no_sync clipped", "sgd"),
        ("mixed_dtypes", "offload bfloat16_reduce_float32 loaded", "sgd"),
        ("mlp", "offload bfloat16 overlapped", "adamw_fused"),
    ],
    3: [
        ("mlp", "offload loaded", "sgd"),
        ("frozen", "offload gradients_kept grouped", "adamw"),
        ("mlp", "not_pinned held", "adamw"),
        ("mlp", "offload overlapped no_reshard", "adamw"),
    ],
    4: [
        ("mlp", "offload clipped", "adamw"),
        ("mixed_dtypes", "offload accumulate bfloat16_reduce_float32", "sgd"),
        ("mlp", "offload optimizer_in_backward", "sgd"),
        ("frozen", "offload overlapped", "adamw_fused"),
    ],
}


def _compare(rank: int, world_size: int) -> None:
    meshes.DEVICE = "sim"
    FEATURES.update(_ON_DEVICE)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.to` cannot put a sim tensor into a CPU one
    for name, spec in MODELS.items():
        MODELS[name] = replace(spec, build=lambda build=spec.build: build().to("sim"))
    store = dist.PrefixStore("sim", c10d._get_default_store())
    dist.destroy_process_group()
    with simulate(Observer(), world_size, coalescing=False, rank=rank, store=store):
        for model, features, optimizer in _CASES[world_size]:
            try:
                compare_training(rank, world_size, Case(model, tuple(features.split()), optimizer))
            except Exception as error:
                error.add_note(f"in the case {model} {features} {optimizer}")
                raise


@pytest.mark.daily(world_size=[1, 3])
@pytest.mark.parametrize("world_size", _CASES)
def test_offload(world_size: int) -> None:
    run_ranks(world_size, _compare, isolated=True, timeout=240)
