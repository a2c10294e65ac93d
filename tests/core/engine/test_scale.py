"""A rank's work and memory must not grow with the number of ranks: counted, not timed, on torch's `fake` group."""

import contextlib
import functools
import gc
import itertools
import sys
import tracemalloc
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit.core
from shardkit.core import CompressionPolicy, MixedPrecisionPolicy, fully_shard
from shardkit.core.engine import group, room, schedule, step
from shardkit.core.parameters import param, registration
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.models import Composed
from tests.support.sharding import shard_each

WORLD_SIZES = (8, 256, 2048)
ROWS = 4096


def _as_rank_0_of(world_size: int) -> dist.ProcessGroup:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    return group


class Counting(TorchDispatchMode):
    """Operators, views and collectives included, and the bytes that this rank hands to collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        if func.namespace == "c10d":
            leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs))
            self.sent += sum(leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def _calls(work: Any, modules: tuple[ModuleType, ...] = ()) -> int:
    """How often `work` calls a function, of Python's or of C's; only functions and calls in these modules, if any."""
    calls = 0
    files = {module.__file__ for module in modules}

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and (not files or frame.f_code.co_filename in files)

    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls, f"no function of {files} was called, so nothing was counted"
    return calls


# -- fully_shard -------------------------------------------------------------------------------------------------------


def _block() -> nn.Module:
    """Rows that most world sizes divide, rows that none does, and columns that are cut."""
    return Composed(
        lambda block, x: x * block.even * block.odd[:ROWS] * block.columns[0],
        even=nn.Parameter(torch.ones(ROWS)),
        odd=nn.Parameter(torch.ones(ROWS + 5)),
        columns=nn.Parameter(torch.ones(2, ROWS)),
    )


GROUPS = 6


def _model(**options: Any) -> Any:
    model: Any = nn.Sequential(*(_block() for _ in range(GROUPS)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options |= {"mp_policy": policy, "shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}
    return shard_each(*model, model, **options)


def _step(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("compression", [None, CompressionPolicy(gather="int8", block=32)])
@on_ranks(1, isolated=True)
def test_a_step_runs_as_many_operators_for_any_number_of_ranks(rank: int, world_size: int, compression: Any) -> None:
    operators, calls = [], []
    for ranks in WORLD_SIZES:
        _as_rank_0_of(ranks)
        train = functools.partial(_step, _model(compression_policy=compression), torch.ones(ROWS, requires_grad=True))
        train()
        train()  # plans are made
        with Counting() as counting:
            train()
        operators.append(counting.operators)
        calls.append(_calls(train))
    # Whether a parameter has a short chunk, or ranks without one, depends on the number of ranks; rows of bytes have
    # parts wherever that is so for any parameter.
    parts, grown = (8, 1.1) if compression is None else (32, 1.25)
    assert max(operators) <= min(operators) + parts * 3 * GROUPS, operators
    assert max(calls) <= grown * min(calls), calls


@on_ranks(1, isolated=True)
def test_sharding_and_a_first_step_take_as_many_calls_for_any_number_of_ranks(rank: int, world_size: int) -> None:
    sharding, first = {}, {}
    # The first time counts what is made once, also DTensor's plans for each size of a mesh.
    for ranks in (size for size in WORLD_SIZES for _ in range(2)):
        _as_rank_0_of(ranks)
        mesh, made = rank_mesh((ranks,)), []
        sharding[ranks] = _calls(lambda made=made, mesh=mesh: made.append(_model(mesh=mesh)))
        x = torch.ones(ROWS, requires_grad=True)
        first[ranks] = _calls(lambda made=made, x=x: _step(made[0], x))
    assert max(sharding.values()) <= 1.1 * min(sharding.values()), sharding
    assert max(first.values()) <= 1.1 * min(first.values()), first


@on_ranks(1, isolated=True)
def test_a_parameter_takes_as_much_memory_for_any_number_of_ranks(rank: int, world_size: int) -> None:
    taken = {}
    # The first time counts objects that are made once; with torch 2.15 also DTensor's plans for each size of a mesh.
    for ranks in (size for size in WORLD_SIZES for _ in range(2)):
        _as_rank_0_of(ranks)
        mesh = rank_mesh((ranks,))  # knows all ranks, once
        gc.collect()
        tracemalloc.start()
        model, x = _model(mesh=mesh), torch.ones(ROWS, requires_grad=True)
        _step(model, x)
        _step(model, x)
        gc.collect()
        nbytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        taken[ranks] = nbytes / (3 * GROUPS)
        del model
    # A number for each rank would be 16 KiB at 2,048 ranks.
    assert max(taken.values()) <= min(taken.values()) + 2048, taken


@on_ranks(1, isolated=True)
def test_a_group_costs_as_much_among_many_others(rank: int, world_size: int) -> None:
    """Also where no order is known yet and a budget is full: no search for a group to free looks through all groups."""
    _as_rank_0_of(2)
    for part in (None, 0.0, 0.5, 2.0):
        first, later = [], []
        for groups in (20, 80):
            model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(groups)))  # of 64 bytes each
            shard_each(*model, model)
            model.set_prefetch_budget(None if part is None else int(part * groups * 64) + 300)
            train = functools.partial(_step, model, torch.ones(2, 4, requires_grad=True))
            first.append(_calls(train, (room, schedule)) / groups)
            train()
            later.append(_calls(train) / groups)
        for few, many in (first, later):
            assert many <= 1.15 * few, (part, first, later)


@on_ranks(1, isolated=True)
def test_a_load_costs_as_much_per_module_of_a_large_group(rank: int, world_size: int) -> None:
    """`load_state_dict` calls hooks for each module of a group, which must not look at the whole group.

    torch's own work is not counted: it filters the whole state dict for each module.
    """
    _as_rank_0_of(2)
    for assign, tied in itertools.product((False, True), (False, True)):
        each = []
        for modules in (20, 200):
            model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(modules)))
            for index in range(0, modules if tied else 0, 2):
                model[index + 1].weight = model[index].weight
            fully_shard(model)
            values = {name: one.clone() for name, one in model.state_dict().items()}
            model.load_state_dict(values)
            work = functools.partial(model.load_state_dict, values, assign=assign)
            each.append(_calls(work, (step, group, registration, param)) / modules)
        assert each[1] <= 1.15 * each[0], (assign, tied, each)


# -- calls, ours beside stock's ----------------------------------------------------------------------------------------

# Of a later step, ours over stock's: 0.66 with torch 2.11, 0.60 with 2.13, 0.58 with 2.15.
CALLS_OVER_STOCK = 0.62 if torch.__version__ >= (2, 13) else 0.68
# Of a later step with a prefetch budget, over those with a depth; 1.09 where the budget is full.
CALLS_WITH_BUDGET = 1.2


def _scales() -> nn.Module:
    """The group of `benchmarks/scale.py`: nine parameters that every world size divides."""
    run = lambda module, x: functools.reduce(torch.mul, module.scales, x)  # noqa: E731
    return Composed(run, scales=nn.ParameterList(nn.Parameter(torch.ones(ROWS)) for _ in range(9)))


def _calls_of_a_later_step(library: ModuleType, mesh: Any, budget: int | None = None) -> int:
    model: Any = nn.Sequential(*(_scales() for _ in range(GROUPS)))
    policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_each(*model, model, api=library, mesh=mesh, mp_policy=policy)
    if budget is not None:
        model.set_prefetch_budget(budget)
    x = torch.ones(ROWS, requires_grad=True)
    for _ in range(2):
        _step(model, x)
    return _calls(lambda: _step(model, x))


@on_ranks(1, isolated=True)
def test_a_step_takes_fewer_calls_than_stocks(rank: int, world_size: int) -> None:
    for ranks in (8, 1024):
        _as_rank_0_of(ranks)
        mesh = rank_mesh((ranks,))
        theirs, ours = (_calls_of_a_later_step(library, mesh) for library in (stock, shardkit.core))
        assert ours <= CALLS_OVER_STOCK * theirs, (ours, theirs)
        group = 9 * ROWS * 2  # bf16
        for part in (0.0, 0.5, 2.0):
            within = _calls_of_a_later_step(shardkit.core, mesh, int(part * GROUPS * group) + 3 * group)
            assert within <= CALLS_WITH_BUDGET * ours, (part, within, ours)


@on_ranks(1)
def test_a_step_on_one_rank_gathers_nothing_after_an_optimizers(rank: int, world_size: int) -> None:
    """Shards that are the unsharded parameters are up to date after an optimizer has written to them."""
    model: Any = nn.Sequential(*(_scales() for _ in range(GROUPS)))
    shard_each(*model, model, mesh=rank_mesh((1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # foreach bumps no version counter
    x = torch.ones(ROWS, requires_grad=True)
    counts = []
    for stepped in (False, False, False, True, True):
        counts.append(_calls(lambda: model(x).sum().backward()))
        if stepped:
            optimizer.step()
        model.zero_grad()
    assert counts[-1] == counts[2]  # the order is learnt by then


# -- the comparison of models at the start -----------------------------------------------------------------------------


def _compares(rank: int, world_size: int, layers: int, differ: bool) -> int:
    """The bytes that this rank hands to collectives while models of so many layers are compared."""
    from shardkit.core.engine.root import initialise_root

    model: Any = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(layers)))
    if differ and rank == world_size - 1:
        model[layers - 2] = nn.Linear(3, 4, bias=False)
    fully_shard(model)
    told = rf"number {layers - 2} .*'{layers - 2}\.weight' of shape \(3, 3\)"
    with Counting() as counting, pytest.raises(RuntimeError, match=told) if differ else contextlib.nullcontext():
        initialise_root(fully_shard.state(model))
    assert counting.sent
    return counting.sent


def test_the_comparison_moves_few_bytes_for_any_model() -> None:
    """Ranks that differ get the descriptions of the first one: 6 KB for 100 layers, on any number of ranks."""
    sizes = [(world_size, layers) for world_size in (2, 4) for layers in (4, 100)]
    alike = [run_ranks(world_size, _compares, layers, False)[0] for world_size, layers in sizes]
    assert len(set(alike)) == 1 and max(alike) <= 16, alike
    differing = [max(run_ranks(world_size, _compares, 100, True)) for world_size in (2, 4)]
    assert max(differing) <= 10_000, differing
