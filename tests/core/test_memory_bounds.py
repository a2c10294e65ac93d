"""How much unsharded memory is held and when, to the byte, as the events tell it."""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardkit.core import events, fully_shard
from shardkit.core.state import state_of
from tests.support import run_ranks

BLOCKS = 6
WIDTH = 12  # every world size from 1 to 4 divides it: no padding
BLOCK_BYTES = (WIDTH * WIDTH + WIDTH) * 4
ROOT_BYTES = 2 * BLOCK_BYTES


class Chain(nn.Module):
    """Equal blocks between two linear layers that belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def _chain(depth: int | None = None, root: bool | None = None, **options: Any) -> Any:
    model = Chain()
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, reshard_after_forward=root)
    if depth is not None:
        model.set_prefetch_depth(depth)
    return model


@dataclass
class Meter:
    """Follows unsharded storage while it is open; ``blocks`` and ``root`` are the bytes held now, by parameter."""

    blocks: dict[str, int] = field(default_factory=dict)
    root: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_blocks: int = 0
    hits: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)

    def __enter__(self) -> "Meter":
        self._subscription = events.subscribe(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._subscription.close()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.StorageAllocated | events.StorageFreed) and event.kind == "unsharded":
            held = self.blocks if event.fqn.startswith("blocks.") else self.root
            if isinstance(event, events.StorageAllocated):
                assert event.fqn not in held, f"{event.fqn} was allocated twice"
                held[event.fqn] = event.bytes
            else:
                assert held.pop(event.fqn) == event.bytes
            self.peak_bytes = max(self.peak_bytes, self.block_bytes)
            self.peak_blocks = max(self.peak_blocks, len({fqn.rsplit(".", 1)[0] for fqn in self.blocks}))
        elif isinstance(event, events.PrefetchHit | events.PrefetchMiss) and event.fqn.startswith("blocks."):
            (self.hits if isinstance(event, events.PrefetchHit) else self.misses).append(event.fqn)

    @property
    def block_bytes(self) -> int:
        return sum(self.blocks.values())

    @property
    def root_bytes(self) -> int:
        return sum(self.root.values())

    def start_phase(self) -> None:
        """Forget peaks and prefetches, keep what is held."""
        self.peak_bytes, self.peak_blocks = self.block_bytes, len({fqn.rsplit(".", 1)[0] for fqn in self.blocks})
        self.hits, self.misses = [], []


def _bounds(rank: int, world_size: int, depth: int) -> None:
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
                assert meter.peak_blocks <= depth + 1, where
                assert meter.blocks == {}, where
                if iteration and depth:
                    # The bound is also reached, or nothing would have been ahead of anything.
                    assert meter.peak_bytes == bound, f"{where}: only {meter.peak_bytes} bytes of {bound}"
                    assert (meter.hits, meter.misses) == (order, []), where
                if not depth:
                    assert (meter.hits, meter.misses) == ([], order), where
            assert meter.root_bytes == 0


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 4])
def test_at_most_depth_plus_one_groups(world_size: int, depth: int) -> None:
    run_ranks(world_size, _bounds, depth)


def _bounds_without_grad(rank: int, world_size: int) -> None:
    for depth in (0, 1, 2):
        model = _chain(depth)
        with Meter() as meter:
            for iteration in range(3):
                meter.start_phase()
                with torch.no_grad():
                    model(torch.randn(2, WIDTH))
                assert meter.peak_bytes == (depth + 1 if iteration else 1) * BLOCK_BYTES
                assert meter.block_bytes == meter.root_bytes == 0


def test_bound_in_evaluation() -> None:
    run_ranks(2, _bounds_without_grad)


def _changing_order(rank: int, world_size: int) -> None:
    """Blocks that are skipped, or come in another order than was learnt, do not break the bound."""
    for depth in (1, 2):
        model = _chain(depth)
        with Meter() as meter:
            for order in ([0, 1, 2, 3, 4, 5], [0, 2, 4], [5, 3, 1], [0, 1, 2, 3, 4, 5], [1, 1, 4, 1], [2, 0]):
                model.forward = lambda x, model=model, order=order: model.out(
                    _run_through([model.inp, *(model.blocks[index] for index in order)], x)
                )
                meter.start_phase()
                loss = model(torch.randn(2, WIDTH)).square().sum()
                assert meter.peak_bytes <= (depth + 1) * BLOCK_BYTES, f"forward {order} at depth {depth}"
                assert meter.block_bytes == 0, f"forward {order} at depth {depth}: {meter.blocks} left over"
                loss.backward()
                assert meter.peak_bytes <= (depth + 1) * BLOCK_BYTES, f"backward {order} at depth {depth}"
                assert meter.block_bytes == meter.root_bytes == 0, f"backward {order} at depth {depth}"


def _run_through(modules: list[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def test_bound_when_the_order_changes() -> None:
    run_ranks(2, _changing_order)


def _depth_after_explicit_unshard(rank: int, world_size: int) -> None:
    """What the user gathers by hand before the first forward counts, and stops counting when it is freed."""
    model = _chain(1)
    model.blocks[0].unshard(async_op=True)  # before the root has told it its name, which the meter goes by
    model(torch.randn(2, WIDTH)).square().sum().backward()
    with Meter() as meter:
        for iteration in range(3):
            meter.start_phase()
            model(torch.randn(2, WIDTH)).square().sum().backward()
            assert meter.peak_bytes == 2 * BLOCK_BYTES, f"iteration {iteration}"
            assert meter.block_bytes == 0


def test_bound_after_an_explicit_unshard() -> None:
    run_ranks(2, _depth_after_explicit_unshard)


def _between_forward_and_backward(rank: int, world_size: int) -> None:
    for reshard, root in ((True, None), (True, True), (False, None), (False, False), (False, True), (None, None)):
        model = _chain(root=root, reshard_after_forward=reshard)
        with Meter() as meter:
            for iteration in range(3):
                loss = model(torch.randn(2, WIDTH)).square().sum()
                where = f"reshard_after_forward={reshard} (root: {root}), iteration {iteration}"
                assert meter.block_bytes == (BLOCKS * BLOCK_BYTES if reshard is False else 0), where
                assert meter.root_bytes == (0 if root else ROOT_BYTES), where
                loss.backward()
                assert (meter.block_bytes, meter.root_bytes) == (0, 0), where


@pytest.mark.parametrize("world_size", [2, 4])
def test_reshard_after_forward(world_size: int) -> None:
    run_ranks(world_size, _between_forward_and_backward)


def _kept_on_neighbours(rank: int, world_size: int) -> None:
    model = _chain(root=True, reshard_after_forward=2)
    blocks = [state_of(block) for block in model.blocks]
    params = [param for state in blocks for group in state.groups for param in group.params]
    with Meter() as meter:
        for _ in range(3):
            loss = model(torch.randn(2, WIDTH)).square().sum()
            kept = sum(tensor.numel() * tensor.itemsize for param in params for tensor in param.kept)
            assert (meter.block_bytes, meter.root_bytes, kept) == (0, 0, BLOCKS * BLOCK_BYTES // 2)
            loss.backward()
            assert (meter.block_bytes, meter.root_bytes) == (0, 0)
            assert not any(param.kept for param in params)


def test_reshard_after_forward_to_neighbours() -> None:
    run_ranks(4, _kept_on_neighbours)


def _kept_by_settings(rank: int, world_size: int) -> None:
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
        model(torch.randn(2, WIDTH))
        model.state_dict()
        assert meter.block_bytes + meter.root_bytes == 0
        handle = model.blocks[3].unshard(async_op=True)
        handle.wait()
        assert meter.block_bytes == BLOCK_BYTES
        model.blocks[3].reshard()
        assert meter.block_bytes == 0


def test_settings_that_keep_parameters() -> None:
    run_ranks(2, _kept_by_settings)
