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
from torch.distributed.tensor import DTensor, Placement, Shard

from shardkit.core import Blocks, Owned, fully_shard, optimizer_step_on_shards, overlap_step, placements_for
from shardkit.core.checkpoint import CheckpointManager, TrainingState
from shardkit.core.torch_compat import local_of
from tests.core.optimizer_steps.placed_training import class_of, optimizer_for, step
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


def stored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors that this rank stores."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and not local_of(parameter).numel():
            continue  # state that it has read for other ranks goes at the next step
        for key, value in {"parameter": parameter, **optimizer.state.get(parameter, {})}.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                found |= {label(name, key, part): one for part, one in bits(value).items() if one.numel()}
    return found


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The stored tensors of all ranks, in rank order. Blocks are cut in order, so they are the bits of one process."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, stored(model, optimizer))
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
    return stored(model, optimizer)


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


def matrices() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((64, 192), (192, 64), (64, 64))))


def sharded_beside_trained(kind: str, world_size: int, place: Placement) -> tuple[Any, ...]:
    """A sharded model and its optimizer; a whole model of the same weights, and its optimizer, which has stepped."""
    warnings.simplefilter("ignore")
    alone, model = matrices(), matrices()
    fully_shard(model, mesh=rank_mesh((world_size,)), shard_placement_fn=lambda p: place)
    trained, optimizer = (optimizer_for(kind, one.parameters()) for one in (alone, model))
    step(alone, trained, 0)
    return model, optimizer, alone, trained


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("kind", "place", "option"),
    [
        ("torch.optim.AdamW", Owned(), None),
        ("torch.optim.AdamW", Blocks(rows=64), None),
        ("torch.optim.AdamW", Shard(0), optimizer_step_on_shards),
        ("torch.optim.AdamW", Shard(0), overlap_step),
        ("torch.optim.AdamW", Shard(0), None),
        ("torchao.optim.AdamW8bit", Blocks(elements=4096), None),
        ("torchao.optim.AdamW8bit", Shard(0), None),
        ("bitsandbytes.optim.AdamW8bit", Owned(), None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_ranks(2, timeout=120)
def test_state_of_one_process(
    rank: int, world_size: int, kind: str, place: Placement, option: Any, later: bool
) -> None:
    """Before the first step, or later, when the optimizer has stepped with other state."""
    model, optimizer, _, trained = sharded_beside_trained(kind, world_size, place)
    if option is not None:
        option(optimizer)
    if later:
        step(model, optimizer, 7)
    optimizer.load_state_dict(trained.state_dict())
    with pytest.raises(RuntimeError, match=BY_TORCH if isinstance(place, Shard) and option is None else BY_NAME):
        step(model, optimizer, 1)


@on_ranks(2)
def test_torch_refuses_to_distribute_it(rank: int, world_size: int) -> None:
    model, optimizer, alone, trained = sharded_beside_trained("torch.optim.AdamW", world_size, Owned())
    named = get_optimizer_state_dict(alone, trained)
    with pytest.raises(RuntimeError, match="unsupported placements Owned"):
        set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))
