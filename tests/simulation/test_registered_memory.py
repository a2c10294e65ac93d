"""Memory of the process group: buffers of communication lie in its pool, and nothing else is different."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.simulation.configurations import optimize, registered
from tests.simulation.device import Access, Observer
from tests.simulation.model import BlockSpec
from tests.simulation.training import Scenario, fill, on_each, started, take_steps
from tests.support.pools import lies_in_pool

# Gathered and reduced in place; gathered in place and padded, reduced packed; packed both ways.
SHAPES = ((512, 512), (1023, 512), (512,))
IN_PLACE = 512 * 512

Setter: TypeAlias = Callable[[Any], None]


# The same by the setter that is named after symmetric memory.
symmetric = partial(on_each, "set_symm_mem_for_comm", ())


SCENARIOS = [
    Scenario("in place"),
    Scenario("packed", coalescing=False),
    Scenario("bf16", mixed=True),
    Scenario("HSDP", replicas=2),
    Scenario("reshard to two", options={"reshard_after_forward": 2}),
    Scenario("separate group", prepare=lambda model: model.set_separate_reduce_scatter_group(True)),
]


@dataclass
class Seen:
    """The kernels of the steps after the first, and the final values of training.

    `outside`: bytes of each buffer of a collective that lies in no pool, by name and whether it is written.
    """

    ran: list[tuple[str, tuple[tuple[bool, int], ...]]] = field(default_factory=list)
    outside: set[tuple[str, bool, int]] = field(default_factory=set)
    pooled: set[tuple[str, bool]] = field(default_factory=set)
    registrations: int = 0
    pools: int = 0
    values: list[bytes] = field(default_factory=list)


class _Watcher(Observer):
    def __init__(self) -> None:
        self.seen = Seen()

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        self.seen.ran.append((name, tuple((one.write, one.end - one.begin) for one in accesses)))

    def collective(self, name: str, stream: int, group: dist.ProcessGroup, accesses: Sequence[Access]) -> None:
        self.ran(name, stream, accesses)
        for access in accesses:
            if access.allocation.pool is None:
                self.seen.outside.add((name, access.write, access.allocation.nbytes))
            else:
                self.seen.pooled.add((name, access.write))


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.detach().to_local().cpu().numpy().tobytes())


def train(place: int, prepare: Setter | None) -> Seen:
    watcher = _Watcher()
    given = SCENARIOS[place]

    def prepared(model: Any) -> None:
        given.prepare(model)
        if prepare is not None:
            prepare(model)

    scenario = replace(given, blocks=(BlockSpec(shapes=SHAPES),) * 3, steps=3, build=fill, prepare=prepared)
    with started(scenario, "ours", watcher) as run:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for step in take_steps(run):
            if step == 0:  # pools are made
                watcher.seen.ran.clear()
                watcher.seen.outside.clear()
            if step == 2:
                watcher.seen.values = [_bytes(param.grad) for param in run.model.parameters()]
            optimize(run)
        watcher.seen.values += [_bytes(param) for param in run.model.parameters()]
        watcher.seen.registrations = len(run.simulation.registered)
        watcher.seen.pools = len({id(pool) for _, pool in run.simulation.registered})
    return watcher.seen


def _names(seen: Seen, part: str) -> set[str]:
    return {name for name, _ in seen.ran if part in name}


@pytest.mark.parametrize("place", range(len(SCENARIOS)), ids=[one.name for one in SCENARIOS])
def test_what_travels_lies_in_the_pool_and_nothing_else_differs(place: int, on_device: Callable[..., Any]) -> None:
    """The same kernels and collectives in the same order, of the same sizes, and the same bits.

    All buffers lie in the pool, except gradients that are reduced from where autograd has made them.
    """
    plain, seen = on_device(train, place, None), on_device(train, place, registered if place % 2 else symmetric)
    assert plain.registrations == 0
    assert not plain.pooled
    assert seen.ran == plain.ran
    assert all(any(value) for value in plain.values)
    assert seen.values == plain.values
    gathers, reductions = _names(seen, "allgather"), _names(seen, "reduce_scatter")
    assert gathers and reductions
    in_place = SCENARIOS[place].coalescing and not SCENARIOS[place].mixed
    assert seen.outside == ({(name, False, 4 * IN_PLACE) for name in reductions} if in_place else set())
    assert {(name, True) for name in gathers | reductions} <= seen.pooled
    assert {(name, False) for name in gathers | reductions} <= seen.pooled  # a chunk in its slot, packed gradients
    groups = 2 if SCENARIOS[place].name in ("reshard to two", "separate group") else 1
    assert seen.registrations == groups
    assert seen.pools == groups


def unsharded_in_pool(setter: Setter) -> tuple[list[bool], bool]:
    """Whether each unsharded parameter of a block lies in the pool, and whether an ordinary tensor does."""
    scenario = replace(SCENARIOS[0], blocks=(BlockSpec(shapes=SHAPES),) * 2, steps=1, prepare=setter)
    with started(scenario, "ours", _Watcher()) as run:
        for _ in take_steps(run):
            block = run.model.blocks[0]
            block.unshard()
        ordinary = torch.zeros(8, device="sim")
        return [lies_in_pool(block, weight) for weight in block.weights], lies_in_pool(block, ordinary)


def test_unsharded_parameters_lie_in_the_pool(on_device: Callable[..., Any]) -> None:
    """Asked as `tests.gpu` asks it of NCCL's pool, which no other test without a GPU does."""
    assert on_device(unsharded_in_pool, registered) == ([True] * len(SHAPES), False)
