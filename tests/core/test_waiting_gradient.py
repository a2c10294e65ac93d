"""Gradients of backwards without sync, if a user casts, moves, loads or zeroes before the next backward."""

import contextlib
import copy
import functools
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardkit.core import FSDPModule, MixedPrecisionPolicy, Owned, clip_grad_norm_, events, fully_shard
from shardkit.core.parameters import waiting_gradient
from tests.core.single_process import Twins, assert_close, batch
from tests.support import rank_mesh, run_ranks


class _Skipping(nn.Module):
    """Three layers, of which the second is left out on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(x if self.skips else self.second(x))


def _loss(model: nn.Module, rank: int) -> Tensor:
    return (model(batch(rank, 2, 5).to(next(model.parameters()).dtype)) - 0.5).square().mean()


def _shard(model: Any, *, alone: bool = False, **options: Any) -> None:
    for layer in () if alone else model.children():
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _twins(rank: int, world_size: int, **options: Any) -> Twins:
    """In float64, so that a cast to float32 gives both the same numbers."""
    twins = Twins.of(rank, world_size, lambda: _Skipping().double(), functools.partial(_shard, **options))
    twins.sharded.set_requires_gradient_sync(False)
    twins.backward(_loss)
    return twins


def _go_on(twins: Twins, *, skipping: bool) -> None:
    """The backward with sync, an optimizer's step, and a whole step, in which nothing of before may be left."""
    twins.sharded.set_requires_gradient_sync(True)
    for skips in (skipping, False):
        twins.sharded.skips = twins.whole.skips = skips
        twins.backward(_loss)
        twins.check_gradients()
        twins.update()


def _cast(model: nn.Module) -> None:
    model.float()


def _cast_a_plain_submodule(model: Any) -> None:
    model.second.half()
    model.second.double()


def _fail_to_move(model: nn.Module) -> None:
    """Fails after moving two tensors, as model.cuda() may with a PyTorch for CPUs."""
    calls = iter((True, True, False))

    def move(tensor: Tensor) -> Tensor:
        if not next(calls):
            raise RuntimeError("no such device")
        return tensor.clone()

    with contextlib.suppress(RuntimeError):
        model._apply(move)


def _empty_the_root(model: nn.Module) -> None:
    model.to_empty(device="cpu", recurse=False)


WAYS: dict[str, tuple[Callable[[Any], None], bool]] = {
    "a cast": (_cast, False),
    "a cast of one group": (_cast, True),
    "a move that fails": (_fail_to_move, False),
    "a move that fails in one group": (_fail_to_move, True),
    "to_empty of the root alone": (_empty_the_root, True),
}


def _goes_on(rank: int, world_size: int, way: str) -> None:
    change, alone = WAYS[way]
    for skipping in (False, True):
        twins = _twins(rank, world_size, alone=alone)
        for model in (twins.sharded, twins.whole):
            change(model)
        _go_on(twins, skipping=skipping)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_waits_on(world_size: int, way: str) -> None:
    run_ranks(world_size, _goes_on, way)


def _finalizes(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, lambda: _Skipping().double(), _shard)
    twins.step(_loss)
    twins.sharded.set_manual_backward_finalization(True)
    twins.sharded.set_requires_gradient_sync(False)
    twins.backward(_loss)
    for model in (twins.sharded, twins.whole):
        model.float()
    twins.sharded.set_requires_gradient_sync(True)
    twins.sharded.finalize_backward()
    twins.check_gradients()


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_reduced_by_finalize_backward_after_a_cast(world_size: int) -> None:
    run_ranks(world_size, _finalizes)


def _zeroes(rank: int, world_size: int) -> None:
    for set_to_none in (True, False):
        for alone, change in ((False, None), (True, None), (True, _cast_a_plain_submodule)):
            twins = _twins(rank, world_size, alone=alone)
            for model in (twins.sharded, twins.whole):
                if change is not None:
                    change(model)
                torch.optim.SGD(model.parameters()).zero_grad(set_to_none)
            _go_on(twins, skipping=set_to_none)


@pytest.mark.parametrize("world_size", [1, 2])
def test_zeroed_by_an_optimizer_it_does_not_come_back(world_size: int) -> None:
    """It does not come back even if the next backward leaves its module out."""
    run_ranks(world_size, _zeroes)


def _loads(rank: int, world_size: int) -> None:
    twins = _twins(rank, world_size)
    for model in (twins.sharded, twins.whole):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    _go_on(twins, skipping=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_assigning_load_drops_it(world_size: int) -> None:
    run_ranks(world_size, _loads)


def _casts_partial_sums(rank: int, world_size: int) -> None:
    for dtype in (torch.float64, torch.float16, torch.float32):
        mesh = rank_mesh((world_size, 1), ("replicas", "shards"))
        twins = Twins.of(rank, world_size, _Skipping, functools.partial(_shard, mesh=mesh))
        twins.sharded.set_requires_all_reduce(False)
        twins.backward(_loss)
        for model in (twins.sharded, twins.whole):
            model.to(dtype)
        twins.sharded.set_requires_all_reduce(True)
        twins.backward(_loss)
        for (fqn, seen), expected in zip(twins.sharded.named_parameters(), twins.whole.parameters(), strict=True):
            close = (1e-2, 1e-2) if dtype is torch.float16 else (1e-5, 1e-6)
            torch.testing.assert_close(seen.grad.full_tensor(), expected.grad, rtol=close[0], atol=close[1], msg=fqn)


def test_partial_sums_of_hsdp_are_divided_once() -> None:
    """float64 and float16 are divided before they are summed, float32 by the collective."""
    run_ranks(2, _casts_partial_sums)


ZERO: dict[str, Callable[[Any, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
}


def _zeroes_partial_sums(rank: int, world_size: int, way: str, cast: bool) -> None:
    """A step that is given up before its all-reduce: nothing of it is in the next one. Stock keeps it."""
    mesh = rank_mesh((2, world_size // 2), ("replicas", "shards"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cast else None, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy}
    torch.manual_seed(0)
    models = [_Skipping(), _Skipping()]
    models[1].load_state_dict(models[0].state_dict())
    for model, backwards in zip(models, ((0, 1), (1,)), strict=True):
        _shard(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in backwards:
            model.set_requires_all_reduce(number == 1)
            _loss(model, rank + 10 * number).backward()
            if number == 0:
                assert all(parameter.grad is not None for parameter in model.parameters())
                ZERO[way](model, optimizer)
    for (fqn, seen), expected in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(seen.grad.to_local(), expected.grad.to_local()), fqn


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("way", ZERO)
@pytest.mark.parametrize("world_size", [2, 4])
def test_zeroed_partial_sums_are_not_reduced(world_size: int, way: str, cast: bool) -> None:
    run_ranks(world_size, _zeroes_partial_sums, way, cast)


def _freezes_partial_sums(rank: int, world_size: int) -> None:
    """A parameter that is frozen before the all-reduce gets the gradient of the backwards before."""
    mesh = rank_mesh((2, world_size // 2), ("replicas", "shards"))
    twins = Twins.of(rank, world_size, _Skipping, functools.partial(_shard, mesh=mesh))
    for _ in range(2):
        for frozen in (False, True):
            twins.sharded.set_requires_all_reduce(frozen)
            for model in (twins.sharded, twins.whole):
                model.second.weight.requires_grad_(not frozen)
            twins.backward(_loss)
        twins.check_gradients()
        twins.sharded.zero_grad()
        twins.whole.zero_grad()


@pytest.mark.parametrize("world_size", [2, 4])
def test_partial_sums_of_a_frozen_parameter(world_size: int) -> None:
    run_ranks(world_size, _freezes_partial_sums)


KEPT: list[Tensor] = []


class _Prompted(nn.Module):
    """Frozen, and its output is unused: only a global list leads to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.prompts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        KEPT.append(self.second((self.first(x) * self.prompts[0]).tanh()).square().sum())
        return x.detach()


def _prompted(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, lambda: _Prompted().requires_grad_(False), fully_shard)
    gradients = []
    for model in (twins.sharded, twins.whole):
        model.prompts = [torch.ones(4, requires_grad=True)]
        model(torch.ones(2, 4))
        KEPT.pop().backward()
        gradients.append(model.prompts[0].grad)
    assert_close(gradients[0], gradients[1], "gradient of the prompt")


def test_a_frozen_root_stays_for_a_graph_that_no_output_shows() -> None:
    run_ranks(2, _prompted)


def _hsdp(world_size: int) -> Any:
    return rank_mesh((2, world_size // 2), ("replicas", "shards"))


def _cast_sums(rank: int, world_size: int, finalize: bool) -> None:
    """Sums wait for their all-reduce in a module that is not gathered again."""
    make = functools.partial(_shard, mesh=_hsdp(world_size))
    twins = Twins.of(rank, world_size, lambda: _Skipping().double(), make)
    twins.sharded.set_manual_backward_finalization(finalize)
    twins.sharded.set_requires_all_reduce(False)
    twins.backward(_loss)
    for model in (twins.sharded, twins.whole):
        _cast(model)
    twins.sharded.set_requires_all_reduce(True)
    if finalize:
        twins.sharded.finalize_backward()
    else:
        twins.sharded.skips = twins.whole.skips = True
        twins.backward(_loss)
    twins.check_gradients()


@pytest.mark.parametrize("finalize", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_cast_keeps_sums_of_a_module_that_is_not_gathered_again(world_size: int, finalize: bool) -> None:
    run_ranks(world_size, _cast_sums, finalize)


def _step_after_zeroing(rank: int, world_size: int) -> None:
    model: Any = _Skipping()
    _shard(model, mesh=_hsdp(world_size))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param.full_tensor().clone() for param in model.parameters()]
    model.set_requires_all_reduce(False)
    _loss(model, rank).backward()
    optimizer.zero_grad()
    model.set_requires_all_reduce(True)
    optimizer.step()
    torch.testing.assert_close([param.full_tensor() for param in model.parameters()], before)


def test_a_step_after_sums_were_zeroed_is_not_refused() -> None:
    run_ranks(2, _step_after_zeroing)


def _sequence(rank: int, world_size: int, seed: int, policy: MixedPrecisionPolicy) -> None:
    """Random backwards, of which some wait, and zeroing in between; the last backward reduces everything."""
    draw = random.Random(seed)
    make = functools.partial(_shard, mesh=_hsdp(world_size), mp_policy=policy)
    twins = Twins.of(rank, world_size, _Skipping, make)
    for _ in range(12):
        action = draw.choice(("reduce", "no all-reduce", "no sync", "zero", "zero in place", "zero a list", "scale"))
        if action == "scale":
            for model in (twins.sharded, twins.whole):
                for one in _gradients(model):
                    if one is not None:
                        one.mul_(0.5)
            continue
        if action.startswith("zero"):
            for model in (twins.sharded, twins.whole):
                optimizer = torch.optim.SGD(model.parameters(), foreach=action == "zero a list")
                optimizer.zero_grad(set_to_none=action == "zero")
            continue
        twins.sharded.skips = twins.whole.skips = draw.random() < 0.3
        twins.sharded.set_requires_gradient_sync(action != "no sync")
        twins.sharded.set_requires_all_reduce(action == "reduce")
        twins.backward(_loss)
    twins.sharded.set_requires_gradient_sync(True)
    twins.sharded.set_requires_all_reduce(True)
    twins.sharded.skips = twins.whole.skips = False
    twins.backward(_loss)
    twins.check_gradients()


@pytest.mark.daily(world_size=[4])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_sequence_of_backwards_and_zeroing(world_size: int, seed: int) -> None:
    reduce_dtype = torch.float64 if seed % 2 else None
    run_ranks(world_size, _sequence, seed, MixedPrecisionPolicy(reduce_dtype=reduce_dtype))


def _zeroes_both(rank: int, world_size: int) -> None:
    """A sum that waits for its all-reduce and an unsharded gradient are both zeroed in place."""
    twins = Twins.of(rank, world_size, _Skipping, functools.partial(_shard, mesh=_hsdp(world_size)))
    twins.sharded.set_requires_all_reduce(False)
    twins.backward(_loss)
    twins.sharded.set_requires_gradient_sync(False)
    twins.backward(_loss)
    for model in (twins.sharded, twins.whole):
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    twins.sharded.set_requires_gradient_sync(True)
    twins.sharded.set_requires_all_reduce(True)
    twins.backward(_loss)
    twins.check_gradients()


@pytest.mark.parametrize("world_size", [2, 4])
def test_both_kinds_of_waiting_gradients_are_zeroed_together(world_size: int) -> None:
    run_ranks(world_size, _zeroes_both)


def _adds(rank: int, world_size: int) -> None:
    """A user adds to zeros that stand in, as for a penalty: the sum has it."""
    make = functools.partial(_shard, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    twins = Twins.of(rank, world_size, _Skipping, make)
    twins.sharded.set_requires_gradient_sync(False)
    twins.backward(_loss)
    for model in (twins.sharded, twins.whole):
        for parameter in model.parameters():
            parameter.grad.add_(parameter.detach())
    twins.sharded.set_requires_gradient_sync(True)
    twins.backward(_loss)
    twins.check_gradients()


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_added_to_a_stand_in_are_kept(world_size: int) -> None:
    run_ranks(world_size, _adds)


def _masked_loss(model: nn.Module, rank: int) -> Tensor:
    """Leaves zeros in the last rows of the third layer's gradients, which are all that some ranks hold of them."""
    return ((model(batch(rank, 2, 5, seed=1)) - 0.5) * torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])).square().mean()


def _parallelize(grid: DeviceMesh, model: nn.Module) -> None:
    parallelize_module(model, grid["tp"], {"third": ColwiseParallel(output_layouts=Replicate())})
    _shard(model, mesh=grid["dp"])


def _waiting(kind: str, rank: int, world_size: int) -> Twins:
    """Twins with gradients that wait in one of the ways in which they can."""
    mesh = _hsdp(world_size) if kind in ("partial sums", "both") else None
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64 if kind == "in a wider dtype" else None)
    make: Callable[[Any], object] = functools.partial(_shard, mesh=mesh, mp_policy=policy)
    if kind == "with tensor parallelism":
        grid = rank_mesh((world_size // 2, 2), ("dp", "tp"))
        make = functools.partial(_parallelize, grid)
        rank, world_size = grid.get_local_rank("dp"), grid.size(0)
    twins = Twins.of(rank, world_size, _Skipping, make)
    if kind == "behind a reduced one":
        twins.backward(_masked_loss)
    if mesh is not None:
        twins.sharded.set_requires_all_reduce(False)
        twins.backward(_masked_loss)
    if kind != "partial sums":
        twins.sharded.set_requires_gradient_sync(False)
        twins.backward(_loss)
    return twins


KINDS = ("alone", "behind a reduced one", "in a wider dtype", "with tensor parallelism", "partial sums", "both")
ON_A_GRID = KINDS[3:]
ZEROING: dict[str, Callable[[list[Any]], object]] = {
    "zero_": lambda grads: [one.zero_() for one in grads],
    "zero_ of data": lambda grads: [one.data.zero_() for one in grads],
    "zero_ of a detached one": lambda grads: [one.detach().zero_() for one in grads],
    "zero_ of a view": lambda grads: [one.view(one.shape).zero_() for one in grads],
    "an index of everything": lambda grads: [one.__setitem__(..., 0) for one in grads],
    "_foreach_zero_": torch._foreach_zero_,
    "fill_": lambda grads: [one.fill_(0.0) for one in grads],
}
SCALING: dict[str, Callable[[list[Any]], object]] = {
    "mul_": lambda grads: [one.mul_(0.5) for one in grads],
    "mul_ of data": lambda grads: [one.data.mul_(0.5) for one in grads],
    "div_ by a tensor": lambda grads: [one.div_(torch.tensor(4.0)) for one in grads],
    "_foreach_mul_": lambda grads: torch._foreach_mul_(grads, 0.25),
    "_foreach_div_ by numbers": lambda grads: torch._foreach_div_(
        grads, [2.0 + number for number in range(len(grads))]
    ),
    "mul_ by zero": lambda grads: [one.mul_(0.0) for one in grads],
}
ADDING: dict[str, Callable[[list[Any]], object]] = {
    "add_ of zero": lambda grads: [one.add_(0.0) for one in grads],
    "sub_": lambda grads: [one.sub_(0.125) for one in grads],
    "_foreach_add_": lambda grads: torch._foreach_add_(grads, 0.25),
}
REFUSED: dict[str, Callable[[Any], object]] = {
    "abs_": lambda grad: grad.abs_(),
    "clamp_": lambda grad: grad.clamp_(-1.0, 1.0),
    "mul_ by other numbers for each element": lambda grad: grad.mul_(grad.detach().clone()),
    "zero_ of a row": lambda grad: grad[0].zero_(),
    "mul_ of a column": lambda grad: grad.unbind(1)[0].mul_(2.0),
    "an out argument": lambda grad: torch.mul(grad, 2.0, out=grad),
    "foreach_abs_": lambda grad: torch._foreach_abs_([grad]),
    "div_ with rounding": lambda grad: grad.div_(3.0, rounding_mode="floor"),
    "add_ of itself": lambda grad: grad.add_(grad),
    "zero_ of an expanded row": lambda grad: grad[:1].expand(grad.shape).zero_(),
    "_foreach_zero_ of a whole one and a row": lambda grad: torch._foreach_zero_([grad, grad[:1]]),
}
HIDDEN: dict[str, Callable[[Any], object]] = {
    "to_local": lambda grad: grad.to_local().mul_(2.0),
    "to_local of data": lambda grad: grad.data.to_local().mul_(2.0),
    "to_local of a transposed one": lambda grad: grad.t().to_local().add_(2.0),
}


def _gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _writes(rank: int, world_size: int, kind: str) -> None:
    """Writes to gradients between backwards have the same effect as in one process."""
    for number, (way, write) in enumerate({**ZEROING, **SCALING, **ADDING}.items()):
        twins = _waiting(kind, rank, world_size)
        held = _gradients(twins.sharded)
        for model in (twins.sharded, twins.whole):
            write(_gradients(model))
        assert all(one is other for one, other in zip(held, _gradients(twins.sharded), strict=True)), way
        twins.sharded.set_requires_all_reduce(True)
        try:
            _go_on(twins, skipping=number % 2 == 1)
        except AssertionError as error:
            raise AssertionError(way) from error


@pytest.mark.parametrize(
    ("world_size", "kind"), [(size, kind) for size in (1, 2, 4) for kind in KINDS if size > 1 or kind not in ON_A_GRID]
)
def test_writes_reach_what_waits(world_size: int, kind: str) -> None:
    """On 4 ranks, the last one's shards are empty."""
    run_ranks(world_size, _writes, kind)


def _writes_with_owners(rank: int, world_size: int) -> None:
    for way, write in {**ZEROING, **SCALING, **ADDING}.items():
        make = functools.partial(_shard, shard_placement_fn=lambda parameter: Owned(0))
        twins = Twins.of(rank, world_size, _Skipping, make)
        for syncs in (False, True):
            twins.sharded.set_requires_gradient_sync(syncs)
            twins.backward(_loss)
            for model in (twins.sharded, twins.whole) if not syncs else ():
                write(_gradients(model))
        for seen, whole in zip(_gradients(twins.sharded), _gradients(twins.whole), strict=True):
            assert_close(seen.full_tensor(), whole, way)


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_reach_what_waits_with_owners(world_size: int) -> None:
    run_ranks(world_size, _writes_with_owners)


def _adds_through_a_view(rank: int, world_size: int) -> None:
    twins = _waiting("alone", rank, world_size)
    with pytest.raises(RuntimeError, match=r"aten.add_.Tensor writes to the gradient of parameter 'second.weight'"):
        twins.sharded.second.weight.grad.data.add_(0.1)
    _go_on(twins, skipping=False)


def test_adding_through_a_view_of_a_pending_sum_is_refused() -> None:
    run_ranks(2, _adds_through_a_view)


def _steps_after_zeroing_in_place(rank: int, world_size: int, kind: str) -> None:
    """AdamW decays weights whose gradients are zeros, and leaves those without."""
    ways: dict[str, Callable[[nn.Module], object]] = {
        "zero_grad of the module": lambda model: model.zero_grad(set_to_none=False),
        **{way: lambda model, write=write: write(_gradients(model)) for way, write in ZEROING.items()},  # type: ignore[misc]
    }
    for way, zero in ways.items():
        twins = _waiting(kind, rank, world_size)
        for model in (twins.sharded, twins.whole):
            zero(model)
            torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1).step()
        twins.check_parameters()
        twins.check_gradients()
        assert {type(one) for one in _gradients(twins.sharded)} == {DTensor}, way


@pytest.mark.daily(world_size=[4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_after_zeroing_in_place_sees_zeros(world_size: int, kind: str) -> None:
    run_ranks(world_size, _steps_after_zeroing_in_place, kind)


def _write_and_go_on(write: Callable[[Any], object], model: Any, fqn: str) -> None:
    write(model.get_parameter(fqn).grad)
    model(torch.ones(2, 5))


def _refuses(rank: int, world_size: int, kind: str) -> None:
    for way, write in {**REFUSED, **HIDDEN}.items():
        for fqn in ("second.weight", "third.weight"):
            twins = _waiting(kind, rank, world_size)
            match = rf"writes to the gradient of parameter '{fqn}'.* while a gradient of it waits"
            if way in HIDDEN:
                match = rf"gradient of parameter '{fqn}' was changed through its local"
            with pytest.raises(RuntimeError, match=match):
                _write_and_go_on(write, twins.sharded, fqn)


@pytest.mark.daily(world_size=[4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_other_writes_are_refused(world_size: int, kind: str) -> None:
    run_ranks(world_size, _refuses, kind)


def _writes_too_late(rank: int, world_size: int) -> None:
    """A stand-in that somebody has kept is a reference to the gradient, and to no gradient that waits later."""
    twins = _waiting("behind a reduced one", rank, world_size)
    held = _gradients(twins.sharded)
    _go_on(twins, skipping=False)
    for syncs in (True, False):
        twins.sharded.set_requires_gradient_sync(syncs)
        twins.backward(_loss)
        for way in (*ZEROING, *SCALING):
            if way != "an index of everything":  # torch has no rule for it on a DTensor
                {**ZEROING, **SCALING}[way](held)
    twins.sharded.set_requires_gradient_sync(True)
    twins.backward(_loss)
    twins.check_gradients()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stand_in_kept_for_too_long_changes_nothing(world_size: int) -> None:
    run_ranks(world_size, _writes_too_late)


def _compiles(rank: int, world_size: int, kind: str) -> None:
    """A graph does not know of gradients that wait."""
    twins = _waiting(kind, rank, world_size)
    gradients = _gradients(twins.sharded)
    squares = [one.square().sum().full_tensor() for one in gradients]
    compiled = torch.compile(lambda ones: [one.square().sum() for one in ones], backend="aot_eager")
    torch.testing.assert_close([one.full_tensor() for one in compiled(gradients)], squares)
    with pytest.raises(RuntimeError, match="compiled code writes to a gradient that waits for its reduction"):
        torch.compile(lambda one: one.zero_(), backend="aot_eager")(gradients[0])
    twins.sharded.set_requires_all_reduce(True)
    _go_on(twins, skipping=False)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_reads_and_does_not_write(kind: str) -> None:
    run_ranks(2, _compiles, kind)


def _writes_late(rank: int, world_size: int) -> None:
    """The same tensor is shown twice; between its two stand-ins a sum is reduced."""
    for write in (lambda one: one.zero_(), lambda one: one.mul_(2.0), lambda one: one.abs_()):
        twins = _waiting("behind a reduced one", rank, world_size)
        held = twins.sharded.second.weight.grad
        for syncs in (True, False):
            twins.sharded.set_requires_gradient_sync(syncs)
            twins.backward(_loss)
        write(held)
        with pytest.raises(RuntimeError, match=r"'second\.weight' was changed through"):
            twins.sharded(batch(rank, 2, 5))


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_to_an_earlier_stand_in_are_refused(world_size: int) -> None:
    run_ranks(world_size, _writes_late)


def _uses_what_is_over(rank: int, world_size: int, kind: str) -> None:
    twins = _waiting(kind, rank, world_size)
    held = twins.sharded.second.weight.grad
    twins.sharded.set_requires_all_reduce(True)
    twins.sharded.set_requires_gradient_sync(True)
    twins.backward(_loss)
    for use in (functools.partial(held.mul_, 2.0), held.norm, held.full_tensor):
        with pytest.raises(
            RuntimeError, match=r"a gradient of parameter 'second\.weight' that was read while it waited"
        ):
            use()
    twins.check_gradients()


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "behind a reduced one"])
def test_a_stand_in_of_reduced_gradients_is_refused(kind: str) -> None:
    run_ranks(2, _uses_what_is_over, kind)


def _adds_a_penalty(rank: int, world_size: int, kind: str) -> None:
    """Autograd adds the gradient of a loss that uses sharded parameters to the stand-in."""
    twins = _waiting(kind, rank, world_size)
    sum(parameter.square().sum() for parameter in twins.sharded.parameters()).full_tensor().backward()
    sum(parameter.square().sum() for parameter in twins.whole.parameters()).backward()  # type: ignore[union-attr]
    twins.sharded.set_requires_all_reduce(True)
    twins.sharded.set_requires_gradient_sync(True)
    twins.backward(_loss)
    twins.check_gradients()


@pytest.mark.parametrize("kind", [one for one in KINDS if one != "with tensor parallelism"])  # torch: two meshes
def test_a_penalty_of_its_own_is_added(kind: str) -> None:
    run_ranks(2, _adds_a_penalty, kind)


def _clips(rank: int, world_size: int, kind: str) -> None:
    twins = _waiting(kind, rank, world_size)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter .* was left unreduced by a backward without"):
        clip_grad_norm_(twins.sharded.parameters(), 0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_is_refused(kind: str) -> None:
    run_ranks(2, _clips, kind)


def _warns(rank: int, world_size: int, kind: str) -> None:
    twins = _waiting(kind, rank, world_size)
    waiting_gradient._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="a part waits for its reduction") as seen:
        torch.nn.utils.get_total_norm(_gradients(twins.sharded))
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["behind a reduced one", "in a wider dtype"])
def test_reading_a_part_warns_once(kind: str) -> None:
    run_ranks(2, _warns, kind)


def _reads(rank: int, world_size: int, kind: str) -> None:
    """Readers see DTensors with torch's class or a subclass of it, and copies are plain DTensors."""
    twins = _waiting(kind, rank, world_size)
    for parameter, whole in zip(twins.sharded.parameters(), twins.whole.parameters(), strict=True):
        copied = copy.deepcopy(parameter.grad)
        assert type(copied) is type(parameter.grad + 0.0) is DTensor
        seen_as = [parameter.grad, copied, parameter.grad.detach(), parameter.grad * 1.0]
        if not parameter.grad.to_local().storage_offset():  # torch cannot save a DTensor that starts within a buffer
            buffer = io.BytesIO()
            torch.save(parameter.grad, buffer)
            buffer.seek(0)
            seen_as.append(torch.load(buffer, weights_only=False))
            assert type(seen_as[-1]) is DTensor
        for seen in seen_as:
            full = seen.full_tensor()
            assert full.shape == parameter.shape
            if kind in ("alone", "partial sums"):
                assert_close(full, whole.grad, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_readers_see_a_dtensor(kind: str) -> None:
    run_ranks(2, _reads, kind)


def _divide_by(model: nn.Module, factor: float) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def _reads_other_sums(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> None:
    """With a divide factor, the tensor that is read equals the future gradient, or a warning says that it does not."""
    waiting_gradient._warn_once.cache_clear()
    for factor in (1.0, float(world_size), 3.0):
        mesh = _hsdp(world_size) if kind == "partial sums" else None
        make = functools.partial(_shard, mesh=mesh)
        twins = Twins.of(rank, world_size, lambda: _Skipping().to(dtype), make)
        _divide_by(twins.sharded, factor)
        (twins.sharded.set_requires_gradient_sync if mesh is None else twins.sharded.set_requires_all_reduce)(False)
        # Partial sums in float64 have been divided in part.
        can_show = factor != 3 if mesh is None else dtype == torch.float32 or factor == 1
        for _ in range(2):
            twins.backward(_loss)
            with contextlib.nullcontext() if can_show else pytest.warns(UserWarning, match="values lack that part"):
                seen = [one.full_tensor() for one in _gradients(twins.sharded)]
            waiting_gradient._warn_once.cache_clear()
            for one, whole in zip(seen, _gradients(twins.whole), strict=True):
                assert_close(one, whole * (world_size / factor if can_show else 0), (factor, "shown"))
        twins.sharded.set_requires_gradient_sync(True)
        twins.sharded.set_requires_all_reduce(True)
        twins.backward(_loss)
        for one, whole in zip(_gradients(twins.sharded), _gradients(twins.whole), strict=True):
            assert_close(one.full_tensor(), whole * (world_size / factor), (factor, "reduced"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["alone", "partial sums"])
def test_reading_follows_the_divide_factor(kind: str, dtype: torch.dtype) -> None:
    run_ranks(4, _reads_other_sums, kind, dtype)


def _changes_the_factor(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _Skipping, _shard)
    twins.sharded.set_requires_gradient_sync(False)
    _divide_by(twins.sharded, 1.0)
    for factors in ((2.0, 1.0), (1.0, 2.0, 3.0)):
        twins.backward(_loss)
        for factor in factors:
            _divide_by(twins.sharded, factor)
            for one, whole in zip(_gradients(twins.sharded), _gradients(twins.whole), strict=True):
                assert_close(one.full_tensor(), whole * (0 if factor == 3 else world_size / factor), str(factor))


def test_reading_follows_a_change_of_the_divide_factor() -> None:
    run_ranks(2, _changes_the_factor)


def _changes_the_division(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Stock adds sums that were divided in one way to sums that were divided in another."""
    changes: dict[str, Callable[[Any], object]] = {
        "None to the number of ranks": lambda model: _divide_by(model, float(world_size)),
        "None to 1": lambda model: _divide_by(model, 1.0),
        "forced sums": lambda model: _force_sums(model, True),
    }
    for name, change in changes.items():
        for syncs in (True, False):  # in the last backward: with the change before it, or before another sum
            make = functools.partial(_shard, mesh=_hsdp(world_size))
            twins = Twins.of(rank, world_size, lambda: _Skipping().to(dtype), make)
            twins.sharded.set_requires_all_reduce(False)
            twins.backward(_loss)
            change(twins.sharded)
            for one, whole in zip(_gradients(twins.sharded), _gradients(twins.whole), strict=True):
                assert_close(one.full_tensor(), whole * (not name.startswith("None") and dtype == torch.float32), name)
            twins.sharded.set_requires_all_reduce(syncs)
            twins.backward(_loss)
            if not syncs:
                twins.sharded.set_requires_all_reduce(True)
                twins.backward(_loss)
            for one, whole in zip(_gradients(twins.sharded), _gradients(twins.whole), strict=True):
                assert_close(one.full_tensor(), whole * (world_size if name == "None to 1" else 1), name)


def _force_sums(model: nn.Module, enable: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(enable)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_hsdp_follow_a_change_of_the_division(dtype: torch.dtype) -> None:
    run_ranks(4, _changes_the_division, dtype)


def _leaves_a_sum_alone(rank: int, world_size: int, factor: float | None, dtype: torch.dtype) -> None:
    """A backward without sync that does not use a module, and a move, change nothing of its sum."""
    mesh = rank_mesh((world_size, 1), ("replicas", "shards"))
    make = functools.partial(_shard, mesh=mesh, alone=True)
    twins = Twins.of(rank, world_size, lambda: _Skipping().to(dtype), make)
    if factor is not None:
        _divide_by(twins.sharded, factor)
    twins.sharded.set_requires_all_reduce(False)
    twins.backward(_loss)
    twins.sharded.set_requires_gradient_sync(False)
    twins.sharded.skips = twins.whole.skips = True
    twins.backward(_loss)
    twins.sharded.to("cpu")
    for name in ("weight", "bias"):
        assert_close(
            getattr(twins.sharded.second, name).grad.full_tensor(), getattr(twins.whole.second, name).grad, name
        )


@pytest.mark.parametrize(
    ("factor", "dtype"), [(None, torch.float32), (2.0, torch.float32), (None, torch.float64), (2.0, torch.float64)]
)
def test_a_backward_that_does_not_use_a_module_leaves_its_sum_alone(factor: float | None, dtype: torch.dtype) -> None:
    run_ranks(2, _leaves_a_sum_alone, factor, dtype)


def _zeroes_in_inference_mode(rank: int, world_size: int, kind: str) -> None:
    for write in (lambda grads: [one.zero_() for one in grads], lambda grads: [one.add_(1.0) for one in grads]):
        twins = _waiting(kind, rank, world_size)
        with torch.inference_mode():
            for model in (twins.sharded, twins.whole):
                write(_gradients(model))
        twins.sharded.set_requires_gradient_sync(True)
        twins.sharded.set_requires_all_reduce(True)
        twins.backward(_loss)
        twins.check_gradients()


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_and_adding_in_inference_mode(kind: str) -> None:
    run_ranks(2, _zeroes_in_inference_mode, kind)


def _steps(rank: int, world_size: int, kind: str, reduce_dtype: torch.dtype | None) -> None:
    """AdamW would take a stand-in for a gradient and decay the weights."""
    model: Any = _Skipping()
    _shard(model, mesh=_hsdp(world_size), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    (model.set_requires_all_reduce if kind == "all-reduce" else model.set_requires_gradient_sync)(False)
    _loss(model, rank).backward()
    with pytest.raises(RuntimeError, match=r"parameter 'first\.weight' still waits for its reduction or"):
        optimizer.step()
    optimizer.zero_grad()
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    optimizer.step()
    torch.testing.assert_close([parameter.full_tensor() for parameter in model.parameters()], before, rtol=0, atol=0)


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["all-reduce", "reduction"])
def test_a_step_is_refused_while_a_gradient_waits(kind: str, reduce_dtype: torch.dtype | None) -> None:
    run_ranks(2, _steps, kind, reduce_dtype)


def _unused(rank: int, world_size: int) -> None:
    """Zeros are reduced for a module that backward left out only if its sums are all-reduced now."""
    model: Any = _Skipping()
    _shard(model, mesh=_hsdp(world_size))
    launched: list[int] = []
    for all_reduces in (False, False, True):
        model.set_requires_all_reduce(all_reduces)
        seen: list[events.Event] = []
        with events.subscribe(seen.append):
            _loss(model, rank).backward()
        launched.append([event.fqn for event in seen if isinstance(event, events.ReduceStarted)].count("second"))
        model.skips = True
    assert launched == [1, 0, 1], launched


def test_zeros_of_unused_modules_are_reduced_once() -> None:
    run_ranks(4, _unused)


def _assigns(rank: int, world_size: int, dtype: torch.dtype, first_syncs: bool) -> None:
    """Another tensor than the one that stands in: scaled by the user, or taken from an earlier micro-batch."""
    model: Any = nn.Sequential(nn.Linear(4, world_size), nn.Linear(world_size, 4))
    _shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    x = batch(rank, 2, 4)
    for syncs in (True, False) if first_syncs else (False,):
        model.set_requires_gradient_sync(syncs)
        model(x).sum().backward()
    parameter = model[0].weight
    parameter.grad = parameter.grad * 0.5
    model.set_requires_gradient_sync(True)
    with pytest.raises(RuntimeError, match=r"gradient of parameter '0.weight' was assigned while another gradient"):
        model(x).sum().backward()


@pytest.mark.parametrize("first_syncs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_that_is_assigned_meanwhile_is_refused(
    world_size: int, dtype: torch.dtype, first_syncs: bool
) -> None:
    run_ranks(world_size, _assigns, dtype, first_syncs)


def _assigns_replicated(rank: int, world_size: int) -> None:
    for syncs in (True, False):
        model: Any = fully_shard(nn.Linear(4, world_size, bias=False))
        model(batch(rank, 2, 4)).sum().backward()
        model.weight.grad = model.weight.grad.redistribute(placements=[Replicate()])
        model.set_requires_gradient_sync(syncs)
        with pytest.raises(RuntimeError, match=r"'weight' was assigned a gradient with \(Replicate\(\),\), and"):
            model(batch(rank, 2, 4)).sum().backward()


def test_a_reduced_gradient_is_added_to_its_like_only() -> None:
    run_ranks(2, _assigns_replicated)


def _steps_on_a_part(rank: int, world_size: int) -> None:
    """A gradient with sync is there, and one without waits behind it."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    _shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for syncs in (True, False):
        model.set_requires_gradient_sync(syncs)
        model(batch(rank, 2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0.weight' still waits for its reduction"):
        optimizer.step()


def test_a_step_is_refused_while_a_gradient_waits_behind_another() -> None:
    run_ranks(2, _steps_on_a_part)


def _zeroes_in_backward(rank: int, world_size: int, kind: str) -> None:
    """The hook of the last layer's output runs after our hook there, and before the last layer's gradient."""
    twins = _waiting(kind, rank, world_size)
    twins.sharded.set_requires_gradient_sync(kind != "alone")
    output = twins.sharded(batch(rank, 2, 5))
    optimizer = torch.optim.SGD(twins.sharded.third.parameters())
    output.register_hook(lambda gradient: optimizer.zero_grad())
    with pytest.raises(RuntimeError, match=r"'third\.weight' was zeroed or removed during a backward that had begun"):
        output.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_during_the_backward_that_adds_is_refused(kind: str) -> None:
    run_ranks(2, _zeroes_in_backward, kind)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_closure_that_leaves_waiting_gradients_is_refused(world_size: int) -> None:
    run_ranks(world_size, _steps_with_a_closure)


def _steps_with_a_closure(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _Skipping, _shard)
    optimizer = torch.optim.SGD(twins.sharded.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(twins.sharded, rank)
        loss.backward()
        return loss

    optimizer.step(closure)
    twins.reference_backward(_loss)
    twins.check_gradients()
    twins.sharded.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match=r"parameter 'first\.weight' still waits for its reduction"):
        optimizer.step(closure)
