"""Prefetching within a budget of bytes: never exceeded, as events count it; used; and the results are the same bits."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import fully_shard
from shardkit.core.module import groups_of
from tests.support import networked_mesh, on_ranks, rank_mesh
from tests.support.heard import Memory
from tests.support.models import Block, Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal, batch, local_gradients

WIDTH = 7  # no world size but 1 divides it: all shards are uneven
EVERYTHING = sys.maxsize
MESHES = {"shared": rank_mesh, "networked": networked_mesh}


def _needs(model: nn.Module) -> dict[str, int]:
    """The bytes that each group takes while it is gathered."""
    return {group.label: group.bytes_when_used(in_backward=False) for group in groups_of(model, recurse=True)}


HIDDEN = (5, 13, 29, 7, 17, 23)


def _tower(mesh: Any, budget: int | None = None, root: bool | None = None, **options: Any) -> Any:
    """Blocks of many sizes, some frozen, then a layer of the root; the first gets inputs that need no gradient."""

    def run(model: Any, x: Tensor) -> Tensor:
        for index in model.order:
            x = model.blocks[index](x)
        return model.out(x * model.gain)

    torch.manual_seed(0)
    out, gain = nn.Linear(WIDTH, 3), nn.Parameter(torch.tensor(0.5))  # 0-dim: a group of its own
    blocks = nn.ModuleList(Block(WIDTH, hidden).requires_grad_(hidden not in (5, 7)) for hidden in HIDDEN)
    model = Composed(run, out=out, gain=gain, blocks=blocks, order=range(len(HIDDEN)))
    shard_each(*model.blocks, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **({"reshard_after_forward": root} | options))
    model.set_prefetch_budget(budget)
    return model


Step = Callable[[Any, int, int], None]


def _one_forward(model: Any, rank: int, step: int) -> None:
    model(batch(rank, 4, WIDTH, seed=step)).square().mean().backward()


def _several_forwards(model: Any, rank: int, step: int) -> None:
    """A forward without grad, one whose output is dropped, and two for a single backward."""
    with torch.no_grad():
        model(batch(rank, 4, WIDTH, seed=step + 1))
    model(batch(rank, 4, WIDTH, seed=step + 2))
    one, two = (model(batch(rank, 4, WIDTH, seed=seed)).square().mean() for seed in (step, step + 3))
    (one * two).backward()


def _changing_order(model: Any, rank: int, step: int) -> None:
    """The learnt order is always wrong: blocks are skipped, repeated and reversed."""
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1], [2, 2, 4, 2], [0, 5, 0]):
        model.order = order
        _one_forward(model, rank, step)


def _accumulate(model: Any, rank: int, step: int) -> None:
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        _one_forward(model, rank, step + sync)


def _listed(model: Any, rank: int, step: int) -> None:
    """The user's own lists of modules to gather ahead."""
    blocks = model.blocks
    model.set_modules_to_forward_prefetch([blocks[0], blocks[1], blocks[2]])
    blocks[2].set_modules_to_forward_prefetch([blocks[4], blocks[3], blocks[5]])
    blocks[5].set_modules_to_backward_prefetch([blocks[4], blocks[2]])
    _one_forward(model, rank, step)


def _train(model: Any, rank: int, step: Step, meter: Memory) -> tuple[list[Tensor], list[int]]:
    """Gradients of three steps of SGD, and how many gathers each took."""
    gradients: list[Tensor] = []
    counts: list[int] = []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with meter:
        for index in range(3):
            before = len(meter.gathers)
            step(model, rank, index)
            counts.append(len(meter.gathers) - before)
            assert meter.now == 0, f"left over: {meter.held}"
            gradients += local_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return gradients, counts


@pytest.mark.daily(kind=["networked"])
@pytest.mark.parametrize("step", [_one_forward, _several_forwards, _changing_order, _accumulate, _listed])
@pytest.mark.parametrize("kind", MESHES)
@on_ranks(2)
def test_budget_is_kept_and_used(rank: int, world_size: int, kind: str, step: Step) -> None:
    mesh = MESHES[kind]((world_size,))
    expected, plain = _train(_tower(mesh, root=True), rank, step, Memory())
    model = _tower(mesh)
    model(batch(rank, 4, WIDTH))
    need = _needs(model)
    # The root runs around every block, and the first block that trains stays until the end of backward.
    root, blocks = need.pop("FSDPComposed") + need.pop("FSDPComposed: gain"), [need[f"blocks.{i}"] for i in range(6)]
    least = root + max(blocks) + max(blocks[:3])
    before = plain
    for budget in (least, least + 1100, EVERYTHING):
        meter = Memory()
        seen, counts = _train(_tower(mesh, budget), rank, step, meter)
        assert meter.peak <= budget, f"{meter.peak} bytes at once, with a budget of {budget}"
        assert_equal(seen, expected, budget)
        # The first step has not learnt an order yet. More room only helps if the learnt order holds.
        limit = before if step in (_one_forward, _accumulate) else plain
        if step is _changing_order and budget == least:  # no room for the block that a depth keeps for backward
            limit = [count + 1 for count in plain]
        assert all(now <= then for now, then in zip(counts[1:], limit[1:], strict=True)), (budget, counts, limit)
        before = counts
    assert sum(before) < sum(plain)


@on_ranks(2)
def test_a_budget_is_the_number_of_groups_that_fit(rank: int, world_size: int) -> None:
    """How many equal blocks are under way when the first one runs, and how many stay, by the number that has room."""
    mesh = rank_mesh((world_size,))
    for room in range(1, 7):
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
        shard_each(*model, model, mesh=mesh)
        model.set_prefetch_budget(room * 8 * 8 * 4 + 17)
        held: list[int] = []
        count = lambda *unused: held.append(sum(g.is_unsharded for g in groups_of(model, recurse=True)))  # noqa: E731, B023
        model[0].register_forward_pre_hook(count)
        for iteration in range(3):
            with Memory() as meter:
                model(torch.ones(2, 8, requires_grad=True)).sum().backward()
            assert held.pop() == (room if iteration else 1)
            assert len(meter.gathers) == 6 + (6 - room)
            assert meter.peak == room * 8 * 8 * 4


# -- budgets that are too small ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_budget_that_is_too_small_names_the_group(rank: int, world_size: int) -> None:
    mesh = networked_mesh((world_size,))
    model = _tower(mesh)
    _one_forward(model, rank, 0)
    need = _needs(model)
    root, largest = need["FSDPComposed"] + need["FSDPComposed: gain"], need["blocks.2"]
    # The root's bytes once its gather is done and its packed buffer is freed.
    held = sum(param.unsharded_bytes for group in groups_of(model) for param in group.params)
    model.set_prefetch_budget(root - 1)
    with pytest.raises(
        ValueError, match=rf"budget of {root - 1} bytes does not hold group 'FSDPComposed.*set_prefetch_budget"
    ):
        model(batch(rank, 4, WIDTH))
    model.reset_iter_state()
    tight = max(root, held + largest - 1)
    model.set_prefetch_budget(tight)
    message = rf"group 'blocks\.2', which takes {largest} bytes.*{held} bytes.*at least {held + largest} bytes"
    with pytest.raises(ValueError, match=message):
        model(batch(rank, 4, WIDTH))
    model.reset_iter_state()
    with Memory() as meter:
        model.set_prefetch_budget(held + 2 * largest)  # a forward that raised leaves nothing behind
        _one_forward(model, rank, 0)
    assert meter.now == 0
    assert meter.peak <= held + 2 * largest


@on_ranks(2)
def test_what_the_user_unshards_counts(rank: int, world_size: int) -> None:
    """Blocks that the user unshards stay and count, and are refused if there is no room for them."""
    mesh = rank_mesh((world_size,))
    model = _tower(mesh)
    _one_forward(model, rank, 0)
    need = _needs(model)
    root = need["FSDPComposed"] + need["FSDPComposed: gain"]
    budget = root + need["blocks.0"] + need["blocks.2"] + need["blocks.5"]
    model.set_prefetch_budget(budget)
    with Memory() as meter:
        handles = [model.blocks[2].unshard(async_op=True), model.blocks[5].unshard(async_op=True)]
        model.blocks[0].unshard(async_op=True)
        with pytest.raises(ValueError, match=r"group 'blocks\.4'.*'blocks\.0', 'blocks\.2', 'blocks\.5'"):
            model.blocks[4].unshard(async_op=True)
        for handle in handles:
            handle.wait()
        for index in (2, 5):
            assert model.blocks[index].up.weight.shape == (HIDDEN[index], WIDTH)
        for block in model.blocks:
            block.reshard()
        assert meter.now == 0
        _one_forward(model, rank, 0)
    assert meter.peak <= budget


@on_ranks(1)
def test_what_is_no_budget_is_refused(rank: int, world_size: int) -> None:
    for wrong in (0, -1, 1.5, True, "1GB"):
        with pytest.raises(ValueError, match=r"positive number of bytes or None"):
            _tower(None, wrong)
    model = _tower(None, 1000)
    with pytest.raises(ValueError, match=r"set_prefetch_depth\(2\).*set_prefetch_budget.1000. was already called"):
        model.set_prefetch_depth(2)
    model.set_prefetch_budget(None)
    model.set_prefetch_depth(1)
    with pytest.raises(ValueError, match=r"set_prefetch_budget\(1000\).*set_prefetch_depth\(1\) was already called"):
        model.set_prefetch_budget(1000)
    below = _tower(None)
    below.blocks[1].set_prefetch_budget(77)
    with pytest.raises(RuntimeError, match=r"set_prefetch_budget\(77\).*'blocks\.1'.*root FSDPComposed.*call it there"):
        below(torch.ones(2, WIDTH))


@on_ranks(2)
def test_frozen_groups_that_backward_does_not_need(rank: int, world_size: int) -> None:
    """Backward skips a block whose output needs no gradient, so the block is neither kept nor gathered for it."""
    for budget in (None, EVERYTHING):
        model = _tower(rank_mesh((world_size,)), budget)
        for _ in range(2):
            output = model(batch(rank, 4, WIDTH))
            unsharded = [group.label for group in groups_of(model, recurse=True) if group.is_unsharded]
            assert ("blocks.0" in unsharded) is False
            with Memory() as meter:
                output.sum().backward()
            assert "blocks.0" not in meter.gathers


# -- nested, recomputed, in a new order --------------------------------------------------------------------------------


def _nested(draw: random.Random) -> Any:
    """Blocks of random sizes, some around another one that is sharded, recomputed or not."""

    def one(model: Any, index: int, x: Tensor) -> Tensor:
        x = model.blocks[index](x)
        return model.inner[holders.index(index)](x) if index in holders else x

    def run(model: Any, x: Tensor) -> Tensor:
        for index in model.order:
            x = checkpoint(one, model, index, x, use_reentrant=False) if recomputes else one(model, index, x)
        return x

    blocks = nn.ModuleList(Block(WIDTH, draw.choice([3, 9, 17, 31])) for _ in range(draw.randint(4, 7)))
    inner = nn.ModuleList(Block(WIDTH, draw.choice([3, 8])) for _ in range(2))
    holders, recomputes = draw.sample(range(len(blocks)), 2), draw.random() < 0.7
    return Composed(run, blocks=blocks, inner=inner, order=list(range(len(blocks))))


@on_ranks(2)
def test_a_budget_holds_for_random_models(rank: int, world_size: int) -> None:
    for seed in range(8):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model = _nested(draw)
        shard_each(*model.inner, *model.blocks, model, mesh=list(MESHES.values())[seed % 2]((world_size,)))
        model(batch(rank, 4, WIDTH)).square().mean().backward()
        needs = sorted(_needs(model).values())
        model.set_prefetch_budget(budget := sum(needs[-2:]) + draw.randrange(needs[-1]))
        with Memory() as meter:
            for step in range(5):
                draw.shuffle(model.order)
                _one_forward(model, rank, step)
        assert meter.peak <= budget, seed


@on_ranks(2)
def test_a_group_without_memory_waits_in_no_queue(rank: int, world_size: int) -> None:
    """Backward uses what forward has kept, without unsharding it: the group is cached for both, and freed once."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    shard_each(*model, model, mesh=networked_mesh((world_size,)), reshard_after_forward=False)
    model.set_prefetch_budget(EVERYTHING)
    for layer in model:
        layer.set_unshard_in_backward(False)
    seen: list[bool] = []

    def ask(gradient: Tensor) -> None:
        (group,) = groups_of(model[2])
        seen.extend((group.is_unsharded, group.schedule.room.uncache(group)))

    model[1].register_forward_hook(lambda module, args, output: output.register_hook(ask) and None)
    model(batch(rank, 4, WIDTH).requires_grad_()).sum().backward()
    assert seen == [False, False]
