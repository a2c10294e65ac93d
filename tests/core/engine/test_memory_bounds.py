"""How much unsharded memory is held and when, to the byte, as the events tell it."""

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import MixedPrecisionPolicy, events, fully_shard
from shardkit.core.module import groups_of
from tests.support import on_ranks
from tests.support.heard import Memory, heard
from tests.support.models import Composed
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal, local_gradients

BLOCKS = 6
WIDTH = 12  # every world size from 1 to 4 divides it: no padding
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
ROOT_BYTES = 2 * BLOCK_BYTES


def _equal_blocks() -> Any:
    """Equal blocks between two linear layers that belong to the root."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.inp(x)
        for block in model.blocks:
            x = torch.tanh(block(x))
        return model.out(x)

    inp, out, *blocks = (nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS + 2))
    return Composed(run, inp=inp, out=out, blocks=nn.ModuleList(blocks))


def _chain(depth: int | None = None, root: bool | None = None, **options: Any) -> Any:
    model = _equal_blocks()
    shard_each(*model.blocks, **options)
    fully_shard(model, reshard_after_forward=root)
    if depth is not None:
        model.set_prefetch_depth(depth)
    return model


class Meter(Memory):
    """The unsharded memory of blocks, and of the root, and the prefetches of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.start_phase()

    def __call__(self, event: events.Event) -> None:
        super().__call__(event)
        self.peak_bytes = max(self.peak_bytes, self.block_bytes)
        if isinstance(event, events.PrefetchHit | events.PrefetchMiss) and event.fqn.startswith("blocks."):
            (self.hits if isinstance(event, events.PrefetchHit) else self.misses).append(event.fqn)

    def _bytes(self, *, of_blocks: bool) -> int:
        held = self.held.items()
        return sum(n for (kind, fqn), n in held if kind == "unsharded" and fqn.startswith("blocks.") is of_blocks)

    @property
    def block_bytes(self) -> int:
        return self._bytes(of_blocks=True)

    @property
    def root_bytes(self) -> int:
        return self._bytes(of_blocks=False)

    def start_phase(self) -> None:
        """Forget peaks and prefetches, but not the memory that is still held."""
        self.peak_bytes = self.block_bytes
        self.hits, self.misses = list[str](), list[str]()


@pytest.mark.parametrize(("world_size", "depth"), [(2, 0), (2, 1), (4, 3)])
@on_ranks()
def test_at_most_depth_plus_one_groups(rank: int, world_size: int, depth: int) -> None:
    model = _chain(depth)
    forward_order = [f"blocks.{index}" for index in range(BLOCKS)]
    with Meter() as meter:
        for iteration in range(4):
            for phase, order in (("forward", forward_order), ("backward", forward_order[::-1])):
                meter.start_phase()
                if phase == "forward":
                    loss = model(torch.randn(2, WIDTH)).square().sum()
                else:
                    loss.backward()
                where = f"{phase} of iteration {iteration} at prefetch depth {depth}"
                bound = (depth + 1) * BLOCK_BYTES
                assert meter.peak_bytes <= bound, (
                    f"{where}: {meter.peak_bytes} bytes of blocks unsharded at once, but at most depth + 1 groups of "
                    f"{BLOCK_BYTES} bytes may be"
                )
                # Backward uses first the block that forward used last.
                assert meter.block_bytes == (BLOCK_BYTES if phase == "forward" and depth else 0), where
                if iteration and depth:
                    # The bound is also reached, or nothing would have been ahead of anything.
                    assert meter.peak_bytes == bound, f"{where}: only {meter.peak_bytes} bytes of {bound}"
                    assert (meter.hits, meter.misses) == (order, []), where
                if not depth:
                    assert (meter.hits, meter.misses) == ([], order), where
            assert meter.root_bytes == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@on_ranks(2)
def test_bound_of_micro_batches(rank: int, world_size: int, depth: int) -> None:
    """Three forwards, then their backwards, as a pipeline runs them: none gathers for the passes of another one."""
    model = _chain(depth)
    order = [f"blocks.{index}" for index in reversed(range(BLOCKS))]
    with Meter() as meter:
        for iteration in range(3):
            model.set_is_last_backward(False)
            losses = [model(torch.randn(2, WIDTH, requires_grad=True)).square().sum() for _ in range(3)]
            for number in ((0, 1, 2), (2, 0, 1), (1, 2, 0))[iteration]:
                meter.start_phase()
                losses[number].backward()
                assert sorted(meter.hits + meter.misses, reverse=True) == order
                assert meter.peak_bytes == (depth + 1) * BLOCK_BYTES
                assert meter.hits[depth == 0 :] == order[BLOCKS - len(meter.hits) + (depth == 0) :]
            model.set_is_last_backward(True)
            (model(torch.randn(2, WIDTH)).sum() * 0).backward()
            assert meter.block_bytes == meter.root_bytes == 0


@on_ranks(2)
def test_bound_with_inner_backwards(rank: int, world_size: int) -> None:
    """The bound does not grow with the number of blocks between recomputed ones."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.inp(x)
        for index, block in enumerate(model.blocks):
            x = checkpoint(block, x, use_reentrant=True) if index % 2 else block(x)
        return model.out(x)

    model = _chain()
    model.run = run
    with Meter() as meter:
        for _ in range(3):
            loss = model(torch.randn(2, WIDTH)).sum()
            meter.start_phase()
            loss.backward()
            # A block that recomputes stays unsharded until its inner backward has ended.
            assert meter.peak_bytes == 3 * BLOCK_BYTES


@on_ranks(1)
def test_forwards_without_backward_before_a_step(rank: int, world_size: int) -> None:
    """An evaluation that forgets `no_grad`, then a training step, whose gradients are those of that step alone."""
    reference = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].load_state_dict(reference.state_dict())
    fully_shard(model)
    x = torch.randn(2, 4)
    for _ in range(sys.getrecursionlimit()):
        model(x)
    model(x).sum().backward()
    reference(x).sum().backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad.full_tensor(), expected.grad)


@on_ranks(1)
def test_many_inputs_without_gradients(rank: int, world_size: int) -> None:
    """Blocks none of whose inputs needs a gradient: no hook reports that backward leaves them."""
    towers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(sys.getrecursionlimit() // 2))
    model = Composed(lambda module, x: sum(tower(x) for tower in module.towers), towers=towers)
    shard_each(*model.towers, model)
    model(torch.ones(2, 1)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_a_block_that_returns_an_input_is_gathered_once(rank: int, world_size: int) -> None:
    """Blocks hand on a tensor that they were given, as those of T5 do with their position bias."""

    def block(module: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(module.linear(x) + bias), bias

    def run(model: Any, x: Tensor) -> Tensor:
        bias = x = model.inp(x)
        for one in model.blocks:
            x, bias = one(x, bias)
        return x.float()

    for dtype in (None, torch.bfloat16):
        blocks = nn.ModuleList(Composed(block, linear=nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
        model = Composed(run, inp=nn.Linear(WIDTH, WIDTH), blocks=blocks)
        shard_each(*blocks, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        fully_shard(model)
        for _ in range(2):
            loss = model(torch.randn(2, WIDTH)).sum()
            with heard(events.GatherStarted) as gathers:
                loss.backward()
        assert len(gathers) == len({one.fqn for one in gathers})


def _run_through(modules: list[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


@on_ranks(2)
def test_bound_when_the_order_changes(rank: int, world_size: int) -> None:
    """Blocks that are skipped, or come in another order than was learnt, do not break the bound."""
    for depth in (1, 2):
        model = _chain(depth)
        with Meter() as meter:
            for order in ([0, 1, 2, 3, 4, 5], [0, 2, 4], [5, 3, 1], [0, 1, 2, 3, 4, 5], [1, 1, 4, 1], [2, 0]):
                model.run = lambda model, x, order=order: model.out(
                    _run_through([model.inp, *(model.blocks[index] for index in order)], x)
                )
                meter.start_phase()
                loss = model(torch.randn(2, WIDTH)).square().sum()
                assert meter.peak_bytes <= (depth + 1) * BLOCK_BYTES, f"forward {order} at depth {depth}"
                assert meter.block_bytes == BLOCK_BYTES, f"forward {order} at depth {depth}: {meter.held} left over"
                loss.backward()
                assert meter.peak_bytes <= (depth + 1) * BLOCK_BYTES, f"backward {order} at depth {depth}"
                assert meter.block_bytes == meter.root_bytes == 0, f"backward {order} at depth {depth}"


@on_ranks(2)
def test_explicit_prefetch_lists(rank: int, world_size: int) -> None:
    """The modules in a module's list are gathered when it begins, in that order, and none of the learnt order."""
    for depth in (0, 2):
        model = _chain(depth, root=True)
        blocks = model.blocks
        root = type(model).__name__
        model.set_modules_to_forward_prefetch([blocks[2], blocks[0]])
        for index, ahead in enumerate(([4], [3], [5], [5], [5], [5])):
            blocks[index].set_modules_to_forward_prefetch([blocks[one] for one in ahead])
        model.set_modules_to_backward_prefetch([blocks[3]])
        for index, ahead in enumerate(([0], [0], [1], [2], [2], [1, 0])):
            blocks[index].set_modules_to_backward_prefetch([blocks[one] for one in ahead])
        for iteration in range(3):
            with heard(events.GatherStarted) as forward:
                loss = model(torch.randn(2, WIDTH)).square().sum()
            with heard(events.GatherStarted) as backward:
                loss.backward()
            where = f"iteration {iteration} at prefetch depth {depth}"
            order = (3, 1, 0, 4, 2) if depth else (3, 5, 1, 0, 4, 2)
            assert [one.fqn for one in forward] == [root, *(f"blocks.{index}" for index in (2, 0, 4, 1, 3, 5))], where
            assert [one.fqn for one in backward] == [root, *(f"blocks.{index}" for index in order)], where


@on_ranks(2)
def test_unshard_in_backward(rank: int, world_size: int) -> None:
    """Neither the backward of an embedding, nor the learnt order, nor a list gathers its table."""
    gradients = []
    for needed, explicit in ((True, False), (False, False), (False, True)):
        torch.manual_seed(0)
        blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        run = lambda module, x: _run_through([module.table, *module.blocks], x)  # noqa: E731
        model = Composed(run, table=nn.Embedding(5, WIDTH), blocks=blocks)
        shard_each(model.table, *model.blocks, model)
        model.table.set_unshard_in_backward(needed)
        if explicit:
            model.blocks[0].set_modules_to_backward_prefetch([model.table])
        for _ in range(2):
            model.zero_grad()
            loss = model(torch.tensor([[rank, 3]])).square().sum()
            with heard(events.GatherStarted) as gathers:
                loss.backward()
            assert [one.fqn for one in gathers] == ["blocks.0", *(["table"] if needed else [])]
        gradients.append(model.table.weight.grad.to_local())
    assert_equal(gradients, gradients[:1] * 3)


@on_ranks(2)
def test_reductions_at_once(rank: int, world_size: int) -> None:
    """At most ``max_input_buffers`` groups' gradients are in reduction, and so many there are."""
    for most in (1, 2, 4):
        model = _chain()
        model.set_reduce_scatter_max_input_buffers(most)
        with heard(events.ReduceStarted, events.ReduceFinished) as told:
            model(torch.randn(2, WIDTH)).square().sum().backward()
        running = [*itertools.accumulate(1 if isinstance(one, events.ReduceStarted) else -1 for one in told)]
        assert (running[-1], max(running)) == (0, most)


@on_ranks(2)
def test_a_backward_that_is_not_the_last_leaves_no_reduction_running(rank: int, world_size: int) -> None:
    """On a CPU nothing but a wait ends a reduction, so none runs on when its gradients may be zeroed or stepped on."""
    model = _chain()
    batch = torch.randn(2, WIDTH)
    model(batch).square().sum().backward()
    once = local_gradients(model)
    model.zero_grad()
    with heard(events.ReduceStarted, events.ReduceFinished) as told:
        for last in (False, False, True):
            model.set_is_last_backward(last)
            model(batch).square().sum().backward()
            started = [one for one in told if isinstance(one, events.ReduceStarted)]
            assert started and 2 * len(started) == len(told)
            if not last:
                model.zero_grad()
    assert_equal(local_gradients(model), once)


@on_ranks(2)
def test_reshard_after_forward(rank: int, world_size: int) -> None:
    for reshard, root in ((True, None), (True, True), (False, None), (False, False), (False, True), (None, None)):
        model = _chain(root=root, reshard_after_forward=reshard)
        with Meter() as meter:
            for iteration in range(3):
                loss = model(torch.randn(2, WIDTH)).square().sum()
                where = f"reshard_after_forward={reshard} (root: {root}), iteration {iteration}"
                assert meter.block_bytes == (BLOCKS * BLOCK_BYTES if reshard is False else BLOCK_BYTES), where
                assert meter.root_bytes == (0 if root else ROOT_BYTES), where
                loss.backward()
                assert (meter.block_bytes, meter.root_bytes) == (0, 0), where


@on_ranks(4)
def test_reshard_after_forward_to_neighbours(rank: int, world_size: int) -> None:
    model = _chain(root=True, reshard_after_forward=2)
    groups = [group for block in model.blocks for group in groups_of(block)]
    with Meter() as meter:
        for _ in range(3):
            loss = model(torch.randn(2, WIDTH)).square().sum()
            kept = sum(tensor.nbytes for group in groups for tensor in group.kept)
            assert (meter.block_bytes, meter.root_bytes, kept) == (BLOCK_BYTES, 0, BLOCKS * BLOCK_BYTES // 2)
            assert all(parameter.device_mesh.size() == world_size for parameter in model.blocks[0].parameters())
            loss.backward()
            assert (meter.block_bytes, meter.root_bytes) == (0, 0)
            assert not any(group.kept for group in groups)


@on_ranks(2)
def test_forward_while_an_exception_is_handled(rank: int, world_size: int) -> None:
    """A forward that an except clause runs, such as one tried again on a smaller batch, has not failed."""
    model = _chain()
    with Meter() as meter:
        for _ in range(2):
            try:
                raise ValueError("on purpose")
            except ValueError:
                loss = model(torch.randn(2, WIDTH)).square().sum()
                assert (meter.block_bytes, meter.root_bytes) == (BLOCK_BYTES, ROOT_BYTES)
            loss.backward()
            assert meter.block_bytes + meter.root_bytes == 0


@on_ranks(2)
def test_settings_that_keep_parameters(rank: int, world_size: int) -> None:
    model = _chain()
    with Meter() as meter:
        model.set_reshard_after_forward(False)
        loss = model(torch.randn(2, WIDTH)).square().sum()
        assert meter.block_bytes == BLOCKS * BLOCK_BYTES
        loss.backward()
        assert meter.block_bytes + meter.root_bytes == 0
        model.set_reshard_after_backward(False)
        model(torch.randn(2, WIDTH)).square().sum().backward()
        assert meter.block_bytes + meter.root_bytes == BLOCKS * BLOCK_BYTES + ROOT_BYTES
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(True)
        model(torch.randn(2, WIDTH)).square().sum().backward()
        assert meter.block_bytes + meter.root_bytes == 0
        model.set_reshard_after_forward(False, recurse=False)
        model.set_reshard_after_backward(False, recurse=False)
        loss = model(torch.randn(2, WIDTH)).square().sum()
        assert (meter.block_bytes, meter.root_bytes) == (BLOCK_BYTES, ROOT_BYTES)
        loss.backward()
        assert (meter.block_bytes, meter.root_bytes) == (0, ROOT_BYTES)
    told_early = _chain()
    told_early.set_reshard_after_forward(True)  # before it is known that this is the root
    with Meter() as meter:
        told_early(torch.randn(2, WIDTH))
        assert (meter.block_bytes, meter.root_bytes) == (BLOCK_BYTES, 0)
