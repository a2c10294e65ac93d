"""State on `Blocks` and `Owned`: the bits of one process on any number of ranks; that of a whole model is refused."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from shardkit.core import Owned, fully_shard, optimizer_step_on_shards, overlap_step, placements_for
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.torch_compat import local_of
from tests.core.optimizer_steps.placed_training import build, class_of, optimizer_for, sharded, step
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.models import Composed
from tests.support.twins import assert_equal

# -- the bits of one process -------------------------------------------------------------------------------------------


KINDS = {
    "torchao 8": "torchao.optim.AdamW8bit",
    "torchao 4": "torchao.optim.AdamW4bit",
    "torchao fp8": "torchao.optim.AdamWFp8",
    "bitsandbytes 8": "bitsandbytes.optim.AdamW8bit",
    "bitsandbytes 8, owned": "bitsandbytes.optim.AdamW8bit",
    "Muon": "torch.optim.Muon",
    "SOAP": "pytorch_optimizer.SOAP",
}
MATRICES = ("Muon", "SOAP")
QUANTISED = ["torchao 8", "torchao 4", "torchao fp8", "bitsandbytes 8"]
WORLD_SIZES = [1, 2, 3, 4]


def net() -> nn.Module:
    """Parameters of five, one and three blocks of 4096 elements, and one that ends with a part of a block."""
    five, one, cube = nn.Linear(80, 256), nn.Linear(64, 64), nn.Parameter(torch.randn(3, 64, 64))
    return Composed(None, five=five, one=one, cube=cube, odd=nn.Linear(65, 100))


def made(world_size: int, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model = net()
    if world_size:
        choose = placements_for(model, class_of(KINDS[kind])) if "owned" not in kind else lambda p: Owned()
        fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=choose)
    return model, optimizer_for(KINDS[kind], [p for p in model.parameters() if p.ndim == 2 or kind not in MATRICES])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    for number in numbers:
        step(model, optimizer, number, scale=1 + number)
        optimizer.zero_grad()


def bits(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that one rank stores for a tensor, flat and plain."""
    local = local_of(value) if isinstance(value, DTensor) else value
    parts = {one: getattr(local, one) for one in ("codes", "scale", "qmap") if hasattr(local, one)} or {"": local}
    return {key: part.detach().reshape(-1).clone().view(torch.uint8) for key, part in parts.items()}


def label(name: str, key: str, part: str) -> str:
    """`exp_avg.codes` of our placements is `codes` of `exp_avg` in one process."""
    return f"{name} {key.replace('.', ' ')} {part}".strip()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The stored tensors of all ranks, in rank order. Blocks are cut in order, so they are the bits of one process."""
    mine: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not local_of(parameter).numel():  # state that it has read for other ranks goes at the next step
            continue
        held = {"parameter": parameter, **optimizer.state.get(parameter, {})}
        for key, value in held.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                mine |= {label(name, key, part): one for part, one in bits(value).items() if one.numel()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = dict.fromkeys(name for one in everyone for name in one)
    once = ("qmap", "qmap1", "qmap2")  # a table that every rank has
    return {
        name: next(one[name] for one in everyone if name in one)
        if name.endswith(once)
        else torch.cat([one[name] for one in everyone if name in one])
        for name in names
    }


def alone(kind: str, count: int) -> dict[str, torch.Tensor]:
    model, optimizer = made(0, kind, 1)
    steps(model, optimizer, range(count))
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in {"parameter": parameter, **optimizer.state.get(parameter, {})}.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found |= {label(name, key, part): one for part, one in bits(value).items()}
    return found


def _as_alone(rank: int, world_size: int, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = made(world_size, kind, 1)
    steps(model, optimizer, range(6))
    return everything(model, optimizer)


@pytest.mark.daily(world_size=[3], kind=QUANTISED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_states_and_parameters_are_those_of_one_process(world_size: int, kind: str) -> None:
    expected = alone(kind, 6)
    assert_equal(run_ranks(world_size, _as_alone, kind)[0], expected)


def _save(rank: int, world_size: int, kind: str, path: Path, stock: bool) -> None:
    model, optimizer = made(world_size, kind, 1)
    steps(model, optimizer, range(3))
    if not stock:
        with CheckpointManager(path) as manager:
            manager.save(3, TrainingState(model, optimizer))
        return
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


def _resume(
    rank: int, world_size: int, kind: str, path: Path, stock: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = made(world_size, kind, 2)
    steps(model, optimizer, [9])  # so that there is other state
    if stock:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    else:
        assert CheckpointManager(path).restore(TrainingState(model, optimizer)) is not None
    loaded = everything(model, optimizer)
    steps(model, optimizer, range(3, 6))
    return loaded, everything(model, optimizer)


@pytest.mark.daily(world_size=[3], stock=[False])
@pytest.mark.parametrize(("world_size", "stock"), [(1, False), (2, False), (3, False), (4, False), (3, True)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_resumes_on_other_world_sizes_with_the_same_bits(
    world_size: int, kind: str, stock: bool, tmp_path: Path
) -> None:
    run_ranks(world_size, _save, kind, tmp_path / "saved", stock)
    for other in {1: (2,), 2: (3, 4), 3: (2,), 4: (1, 3)}[world_size]:
        loaded, later = run_ranks(other, _resume, kind, tmp_path / "saved", stock)[0]
        if not stock or kind.startswith("bitsandbytes"):  # torch casts to the parameter's dtype until the next step
            assert_equal(loaded, alone(kind, 3))
        assert_equal(later, alone(kind, 6))


# -- state of one process, loaded into sharded parameters: an error, by name where stock has none ----------------------


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
