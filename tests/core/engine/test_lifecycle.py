"""Events in the life of a sharded model, against the same life of a whole model in one process."""

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.core import MixedPrecisionPolicy, clip_grad_norm_, events, fully_shard, register_fsdp_forward_method
from shardkit.core.engine.step import state_of
from tests.support import on_ranks, rank_mesh
from tests.support.heard import heard
from tests.support.meshes import impatient_mesh, networked_mesh
from tests.support.models import MLP, Composed
from tests.support.sharding import shard_children, shard_each
from tests.support.twins import Twins, assert_close, batch, square_loss
from tests.support.waiting import await_file

RESHARD = (None, True, False)


def _shard_mlp(model: Any, **options: Any) -> Any:
    return shard_each(*model.blocks, model, **options)


def _mlp_loss(model: nn.Module, rank: int, seed: int = 0) -> Tensor:
    dtype = next(model.parameters()).dtype
    return (model(batch(rank, 2, 5, seed=seed).to(dtype)) - 0.5).square().mean()


def _holds_no_unsharded(model: nn.Module) -> bool:
    states = [state for module in model.modules() if (state := state_of(module)) is not None]
    groups = [group for state in states for group in state.groups]
    return not any(flat.untyped_storage().size() for group in groups for param in group.params for flat in param.flats)


# -- the end of a model ------------------------------------------------------------------------------------------------


def _train(model: Any) -> None:
    for _ in range(2):
        _mlp_loss(model, 0).backward()


def _train_with_all_that_can_be_set(model: Any) -> None:
    """Prefetch lists, another method, hooks, an optimizer, a cast and a load."""
    blocks = list(model.blocks)
    for here, there in itertools.pairwise(blocks):
        here.set_modules_to_forward_prefetch([there])
        there.set_modules_to_backward_prefetch([here])
    model.set_modules_to_forward_prefetch([blocks[0]])
    model.set_all_reduce_hook(lambda flat: None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    register_fsdp_forward_method(model, "score")
    model.score(torch.ones(2, 5)).sum().backward()
    _train_with_an_optimizer(model)
    model.double()
    model.load_state_dict(model.state_dict(), assign=True)
    _train(model)


def _train_with_an_optimizer(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model)
    optimizer.step()


def _explicitly_unsharded(model: Any) -> None:
    model.unshard(async_op=True)
    model.blocks[0].unshard()


def _failed(model: Any) -> None:
    handle = model.out.register_forward_hook(_raise)
    with pytest.raises(RuntimeError, match="on purpose"):
        _mlp_loss(model, 0)
    handle.remove()


LIVES = {
    "all that can be set": _train_with_all_that_can_be_set,
    "forward only": lambda model: model(torch.ones(2, 5)),
    "unsharded": _explicitly_unsharded,
    "failed": _failed,
}


def _raise(*args: Any) -> None:
    raise RuntimeError("on purpose")


def _pieces(model: nn.Module) -> dict[str, weakref.ref[Any]]:
    pieces: dict[str, weakref.ref[Any]] = {"the model": weakref.ref(model)}
    for name, module in model.named_modules():
        if (state := state_of(module)) is None:
            continue
        pieces[f"state of '{name}'"] = weakref.ref(state)
        pieces[f"schedule of '{name}'"] = weakref.ref(state.schedule)
        for group in state.groups:
            pieces[f"group '{group.label}'"] = weakref.ref(group)
            for param in group.params:
                pieces[f"shard of {param.fqn}"] = weakref.ref(param.sharded_param)
                pieces[f"memory of {param.fqn}"] = weakref.ref(param.sharded_param.to_local())
                if param.unsharded_param is not None:
                    pieces[f"unsharded {param.fqn}"] = weakref.ref(param.unsharded_param)
    return pieces


@on_ranks(2)
def test_a_deleted_model_is_freed_at_once(rank: int, world_size: int) -> None:
    _train_with_an_optimizer(_shard_mlp(MLP()))  # torch's lazy imports keep frames alive, once
    gc.collect()
    gc.disable()
    try:
        for name, life in LIVES.items():
            for reshard in (None, False):
                model = MLP()
                originals = [weakref.ref(parameter) for parameter in model.parameters()]
                _shard_mlp(model, reshard_after_forward=reshard)
                assert not any(original() is not None for original in originals), "an original parameter lives on"
                life(model)
                pieces = _pieces(model)
                del model
                left = [what for what, piece in pieces.items() if piece() is not None]
                assert not left, f"{name}, reshard_after_forward={reshard}: {left} outlive the model"
    finally:
        gc.enable()


@on_ranks(3)
def test_a_shard_owns_its_chunk_alone(rank: int, world_size: int) -> None:
    large = torch.randn(64, 8)
    module = nn.Linear(8, 8, bias=False)
    module.weight = nn.Parameter(large[:8])
    fully_shard(module)
    local = module.weight.to_local()
    assert local.untyped_storage().nbytes() == local.numel() * 4
    assert torch.equal(module.weight.full_tensor(), large[:8])


# -- casts, loads, replacements, freezing ------------------------------------------------------------------------------


@on_ranks(3)
def test_cast_between_steps(rank: int, world_size: int) -> None:
    casts: list[Callable[[nn.Module], nn.Module]] = [
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        lambda model: model.half().to(torch.float32),
    ]
    twins = Twins.of(rank, world_size, MLP, _shard_mlp)
    for cast in casts:
        cast(twins.sharded)
        cast(twins.whole)
        twins.align()  # otherwise bfloat16's rounding differences would stay
        twins.step(_mlp_loss, times=2)
        twins.sharded(batch(rank, 2, 5).to(next(twins.whole.parameters()).dtype))  # the next cast finds the root whole


@pytest.mark.parametrize(("world_size", "reduce_dtype"), [(1, None), (3, torch.float64)])
@on_ranks()
def test_casts_and_moves_while_gradients_wait(rank: int, world_size: int, reduce_dtype: torch.dtype | None) -> None:
    precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for change, reshard in ((nn.Module.float, False), (functools.partial(nn.Module.to, device="cpu"), True)):
        shard = functools.partial(_shard_mlp, reshard_after_forward=reshard, mp_policy=precision)
        twins = Twins.of(rank, world_size, lambda: MLP().double(), shard)
        for synchronised in (True, False, False):  # the first leaves a sharded gradient beside those that wait
            twins.sharded.set_requires_gradient_sync(synchronised)
            twins.backward(_mlp_loss)
        for model in twins.both:
            change(model)
        twins.sharded.set_requires_gradient_sync(True)
        twins.backward(_mlp_loss)
        twins.check_gradients()
        twins.update()
        twins.sharded.set_requires_gradient_sync(False)
        twins.backward(_mlp_loss)
        for model in twins.both:
            change(model)
            model.zero_grad()
        twins.sharded.set_requires_gradient_sync(True)
        twins.step(_mlp_loss)


def _reload(model: Any, dtype: torch.dtype = torch.float32) -> None:
    values = {name: value.detach().to(dtype, copy=True) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)


@on_ranks(3)
def test_moves_and_loads_between_forward_and_backward(rank: int, world_size: int) -> None:
    """As stock does: backward goes on with the graph that forward has made, whatever memory the shards lie in now."""
    moved = functools.partial(nn.Module.to, device="cpu")
    for change, reshard in ((_reload, True), (moved, False), (lambda model: model._apply(torch.clone), True)):
        twins = Twins.of(rank, world_size, MLP, functools.partial(_shard_mlp, reshard_after_forward=reshard))
        for seed in range(2):
            loss = _mlp_loss(twins.sharded, rank, seed)
            change(twins.sharded)
            loss.backward()
            twins.reference_backward(lambda model, rank: _mlp_loss(model, rank, seed))  # noqa: B023
            twins.check_gradients()
            twins.update()


@on_ranks(1, 2)
def test_a_cast_between_forward_and_backward_is_refused(rank: int, world_size: int) -> None:
    """Also where backward reads none of the parameters."""
    model = fully_shard(Composed(lambda module, x: x + module.shift, shift=nn.Parameter(torch.zeros(4))))
    loss = model(torch.ones(2, 4)).sum()
    model.double()
    with pytest.raises(RuntimeError, match=r"'shift'.*between the forward and the backward.*\(4,\)"):
        loss.backward()


@on_ranks(3)
def test_load_between_steps(rank: int, world_size: int) -> None:
    for reshard, assign in ((True, False), (True, True), (None, True), (False, False)):
        twins = Twins.of(rank, world_size, MLP, functools.partial(_shard_mlp, reshard_after_forward=reshard))
        other = Twins.of(rank, world_size, MLP, _shard_mlp)
        twins.step(_mlp_loss)
        with torch.no_grad():
            twins.sharded(batch(rank, 2, 5))
        twins.sharded(batch(rank, 2, 5))
        before = dict(twins.sharded.named_parameters()) if reshard else {}
        twins.sharded.load_state_dict(other.sharded.state_dict(), assign=assign)
        twins.whole.load_state_dict(other.whole.state_dict())
        after = dict(twins.sharded.named_parameters())
        assert all((after[fqn] is parameter) != assign for fqn, parameter in before.items())
        twins.check_parameters()
        twins.step(_mlp_loss)
        twins.step(_mlp_loss)


@on_ranks(2)
def test_post_accumulate_grad_hooks(rank: int, world_size: int) -> None:
    """A hook runs once for each gradient that is reduced, also into one that is there, until it is removed."""
    model = _shard_mlp(MLP())
    fqns = [fqn for fqn, _ in model.named_parameters()]
    calls = dict.fromkeys(fqns, 0)

    def count(parameter: Tensor, fqn: str) -> None:
        assert parameter is model.get_parameter(fqn)
        assert isinstance(parameter.grad, DTensor)
        calls[fqn] += 1

    handles = [
        parameter.register_post_accumulate_grad_hook(functools.partial(count, fqn=fqn))
        for fqn, parameter in model.named_parameters()
    ]
    for expected, synced in ((1, True), (1, False), (2, True)):
        model.set_requires_gradient_sync(synced)
        _mlp_loss(model, rank).backward()
        assert calls == dict.fromkeys(fqns, expected)
    handles[0].remove()
    _mlp_loss(model, rank).backward()
    assert calls == {**dict.fromkeys(fqns, 3), fqns[0]: 2}


# -- forwards that no backward follows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [nn.Module.double, functools.partial(_reload, dtype=torch.float64)])
@on_ranks(2)
def test_local_tensors_after_a_cast_or_load(rank: int, world_size: int, change: Callable[[Any], Any]) -> None:
    """Local tensors that are asked for after a cast or load are those that train, whatever gathers come later."""
    twins = Twins.of(rank, world_size, MLP, _shard_mlp)
    twins.step(_mlp_loss)
    change(twins.sharded)
    twins.whole.double()
    parameters = list(twins.sharded.parameters())
    locals_of = [parameter.to_local().detach() for parameter in parameters]
    for seed in range(2):
        twins.backward(lambda model, rank: _mlp_loss(model, rank, seed))  # noqa: B023
        with torch.no_grad():
            for local, parameter in zip(locals_of, parameters, strict=True):
                local -= 0.5 * parameter.grad.to_local()
                parameter.grad = None
            for parameter in twins.whole.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        twins.check_parameters()


# -- exceptions --------------------------------------------------------------------------------------------------------


def _interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def _interrupted_at_its_end(model: Any) -> Any:
    """At the end of a backward that no hook has seen enter the first block, whose input needs no gradient."""

    def interrupt(event: events.Event) -> None:
        if isinstance(event, events.ReduceStarted) and event.fqn == "blocks.0":
            raise KeyboardInterrupt

    subscription = events.subscribe(interrupt)
    return mock.Mock(remove=subscription.close)


LATER: dict[str, Callable[[Any, Tensor, torch.optim.Optimizer], object]] = {
    "unshard": lambda model, earlier, optimizer: model.blocks[0].unshard(),
    "backward": lambda model, earlier, optimizer: earlier.backward(),
    "forward": lambda model, earlier, optimizer: _mlp_loss(model, 0),
    "a registered method": lambda model, earlier, optimizer: model.score(torch.ones(2, 5)),
    "clipping": lambda model, earlier, optimizer: clip_grad_norm_(model.parameters(), 1.0),
    "an optimizer's step": lambda model, earlier, optimizer: optimizer.step(),
    "a state dict": lambda model, earlier, optimizer: model.state_dict(),
    "a load": lambda model, earlier, optimizer: model.load_state_dict({}, strict=False),
}


def _raise_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(_raise)


def _hook(name: str, hook: Callable[..., Any], kind: str = "forward", **options: Any) -> Callable[[Any], Any]:
    return lambda model: getattr(model.get_submodule(name), f"register_{kind}_hook")(hook, **options)


# How an iteration ends, and which of the later calls cannot tell: a forward that Ctrl-C has ended looks like a running
# one, and a backward like one inside another.
FAILURES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "the root's forward": (_hook("out", _raise), set()),
    "before the root's forward": (_hook("", _raise, "forward_pre"), set()),
    "before our hook of the root": (_hook("", _raise, "forward_pre", prepend=True), {*LATER}),
    "a block's forward": (_hook("blocks.1.down", _raise), set()),
    "a block's own hook": (_hook("blocks.1", _raise), set()),
    "a block's pre-hook": (_hook("blocks.2", _raise, "forward_pre"), set()),
    "the root's own hook": (_hook("", _raise), {*LATER}),
    "the last block's backward": (_hook("blocks.2", _raise_in_backward), {"backward"}),
    "a middle block's backward": (_hook("blocks.1.down", _raise_in_backward), {"backward"}),
    "the first block's backward": (_hook("blocks.0.up", _raise_in_backward), {"backward"}),
    "Ctrl-C in forward": (
        _hook("blocks.1", _interrupt, "forward_pre"),
        {"unshard", "backward", "a registered method", "a state dict"},
    ),
    "Ctrl-C at the end of backward": (_interrupted_at_its_end, {"backward"}),
}


@pytest.mark.parametrize("how", FAILURES)
@on_ranks(2)
def test_an_iteration_that_did_not_end_is_refused_until_it_is_reset(rank: int, world_size: int, how: str) -> None:
    """A third of the later calls for each failure, before and after the order is learnt; then training goes on."""
    inject, unnoticed = FAILURES[how]
    for number, (name, later) in enumerate(LATER.items(), [*FAILURES].index(how)):
        if number % 3:
            continue
        reshard = (None, False)[number % 2]
        twins = Twins.of(rank, world_size, MLP, functools.partial(_shard_mlp, reshard_after_forward=reshard))
        register_fsdp_forward_method(twins.sharded, "score")
        if reshard is None:
            twins.step(_mlp_loss, times=2)
        optimizer = torch.optim.SGD(twins.sharded.parameters(), lr=0.1)
        earlier = _mlp_loss(twins.sharded, rank)
        handle = inject(twins.sharded)
        with pytest.raises((RuntimeError, KeyboardInterrupt), match=r"on purpose|^$"):
            _mlp_loss(twins.sharded, rank).backward()
        handle.remove()
        twins.sharded.reshard()  # in a `finally`, say
        if name not in unnoticed:
            with pytest.raises(RuntimeError, match=r"MLP.*call reset_iter_state\(\) on the root module first"):
                later(twins.sharded, earlier, optimizer)
        twins.sharded.reset_iter_state()
        twins.sharded.zero_grad()
        assert _holds_no_unsharded(twins.sharded), name
        twins.step(_mlp_loss, times=2)
        assert _holds_no_unsharded(twins.sharded), name


def _first_or_second(module: Any, x: Tensor) -> Tensor:
    try:
        return module.first(x)
    except RuntimeError:
        return module.second(x)


@on_ranks(2)
def test_an_error_that_forward_catches_needs_no_reset(rank: int, world_size: int) -> None:
    build = lambda: Composed(_first_or_second, first=nn.Linear(5, 5), second=nn.Linear(5, 5))  # noqa: E731
    twins = Twins.of(rank, world_size, build, shard_children)
    for _ in range(2):
        twins.step(square_loss(2, 5))
        handles = [model.first.register_forward_hook(_raise) for model in (twins.sharded, twins.whole)]
        twins.step(square_loss(2, 5))
        for handle in handles:
            handle.remove()
        assert _holds_no_unsharded(twins.sharded)


@pytest.mark.parametrize(("networked", "where"), [(False, "forward"), (True, "backward")])
@on_ranks(2, isolated=True)
def test_after_an_error_nothing_waits_for_a_peer(
    rank: int, world_size: int, networked: bool, where: str, tmp_path: Path
) -> None:
    """Rank 0 raises while it has started gathers that rank 1 joins only after rank 0's error has come out."""
    returned = tmp_path / "returned"

    def late(*args: Any) -> None:
        await_file(returned, "rank 0 has its error")
        raise RuntimeError("on purpose")

    mesh = (networked_mesh if networked else rank_mesh)((world_size,))
    model = _shard_mlp(MLP(), mesh=mesh)
    for _ in range(2):
        _mlp_loss(model, rank).backward()  # from now on gathers are started ahead
    if where == "forward":
        model.blocks[0].register_forward_pre_hook(late if rank else _raise, prepend=bool(rank))
    else:
        (model.out if rank else model.blocks[2]).register_forward_hook(
            lambda module, args, output: output.register_hook(late if rank else _raise) and None
        )
    with pytest.raises(RuntimeError, match="on purpose"):
        _mlp_loss(model, rank).backward()
    returned.touch()


@on_ranks(2, isolated=True)
def test_a_forward_more_on_one_rank_is_an_error_on_both(rank: int, world_size: int) -> None:
    """Rank 0 runs a second forward while rank 1 runs the backward of the first; the error is that of a gather."""
    model = _shard_mlp(MLP(), mesh=impatient_mesh())
    for _ in range(2):
        _mlp_loss(model, rank).backward()
    loss = _mlp_loss(model, rank)
    with pytest.raises(RuntimeError, match=r"all-gather|reduce-scatter"):
        loss.backward() if rank else _mlp_loss(model, rank)
    with pytest.raises(RuntimeError, match="call reset_iter_state"):
        model.state_dict()


@on_ranks(2, 4)
def test_reset_drops_unreduced_gradients(rank: int, world_size: int) -> None:
    """Gradients accumulated without sync, or without all-reduce, belong to the failed iteration and are dropped."""
    hsdp = rank_mesh((2, world_size // 2), ("replicate", "shard"))
    for mesh, hold_back, reduce_dtype in (
        (rank_mesh((world_size,)), "set_requires_gradient_sync", torch.float64),
        (hsdp, "set_requires_gradient_sync", None),
        (hsdp, "set_requires_all_reduce", torch.float64),
    ):
        shard = functools.partial(_shard_mlp, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        twins = Twins.of(rank, world_size, MLP, shard)
        twins.step(_mlp_loss)
        getattr(twins.sharded, hold_back)(False)
        for _ in range(2):
            _mlp_loss(twins.sharded, rank).backward()
        twins.sharded.reset_iter_state()
        getattr(twins.sharded, hold_back)(True)
        with heard(events.ReduceStarted) as reductions:
            twins.step(_mlp_loss)
        # As if nothing had been accumulated, in reduce_dtype, before. A shard group of one rank reduces nothing.
        sent = {one.dtype for one in reductions}
        assert sent == ({torch.float32} if mesh.size(-1) > 1 else set())


# -- modules of other kinds --------------------------------------------------------------------------------------------


def _holder() -> nn.Module:
    """Returns its parameters, as they are and as views."""

    def run(module: Any) -> dict[str, Any]:
        return {"leaf": module.bias, "views": [module.table[1:3], module.table.t()], "number": 3}

    return Composed(run, table=nn.Parameter(torch.randn(6, 4)), bias=nn.Parameter(torch.randn(4)))


def _uses_holder() -> nn.Module:
    def run(module: Any, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        held = module.holder()
        first, second = held["views"]
        return module.plain(x @ second * 0.5).sum() + (first * held["leaf"]).square().sum(), held

    return Composed(run, holder=_holder(), plain=nn.Sequential(nn.Tanh(), nn.Flatten(1)))


@on_ranks(1, 2)
def test_outputs_that_are_parameters(rank: int, world_size: int) -> None:
    for reshard in RESHARD:
        shard = lambda model: shard_children(model, reshard_after_forward=reshard)  # noqa: B023, E731
        twins = Twins.of(rank, world_size, _uses_holder, shard)
        twins.step(lambda model, rank: model(batch(rank, 3, 4))[0], times=2)
        loss, held = twins.sharded(batch(rank, 3, 4))
        loss.backward()
        twins.sharded.zero_grad()
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                _, held = twins.sharded(batch(rank, 3, 4))
            twins.sharded.reshard()
            assert_close(held["leaf"].detach().clone(), twins.whole.holder.bias.detach(), "a leaf output")
            assert_close(held["views"][1].detach().clone(), twins.whole.holder.table.t().detach(), "a view output")
        alone = Twins.of(rank, world_size, _holder, lambda model: fully_shard(model, reshard_after_forward=reshard))  # noqa: B023
        alone.step(lambda model, rank: (model()["leaf"] * batch(rank, 4)).sum(), times=2)


def _zoo() -> nn.Module:
    """Modules that keep parameters in unusual places."""

    def run(module: Any, x: Tensor) -> Tensor:
        x = module.gru(module.lstm(x)[0])[0]
        x = module.attention(x, x, x, need_weights=False)[0]
        for parameter in module.several:
            x = x @ parameter if parameter.ndim == 2 else x + parameter
        return module.empty(x * module.named["gain"] + module.named["shift"])

    return Composed(
        run,
        lstm=nn.LSTM(4, 5, num_layers=2, batch_first=True),
        gru=nn.GRU(5, 4, bidirectional=True, batch_first=True),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        several=nn.ParameterList([torch.randn(8, 8) * 0.2, torch.randn(8)]),
        named=nn.ParameterDict({"gain": torch.randn(8), "shift": nn.Parameter(torch.randn(1, 8))}),
        unused=nn.Parameter(torch.ones(3)),
        empty=nn.Sequential(nn.Identity()),
    )


@on_ranks(2)
def test_modules_with_parameters_in_unusual_places(rank: int, world_size: int) -> None:
    for apply in (fully_shard, lambda model: shard_each(model.lstm, model.gru, model.attention, model)):
        twins = Twins.of(rank, world_size, _zoo, apply)
        twins.step(square_loss(2, 3, 4), times=3)


# -- groups of modules -------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_list_with_modules_inside_others(rank: int, world_size: int) -> None:
    """A module inside another one of the list belongs to that one."""
    twins = Twins.of(rank, world_size, MLP, lambda model: fully_shard([model, model.out, model.blocks[0].up]))
    assert type(twins.sharded).__name__ == "FSDPMLP"
    assert type(twins.sharded.out) is nn.Linear
    assert type(twins.sharded.blocks[0].up) is nn.Linear
    twins.step(_mlp_loss, times=2)
