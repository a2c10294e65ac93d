"""Steps under the next forward: the bits of plain steps, whoever reads what they write, and errors of theirs.

In most tests a job runs as late as it can, when somebody waits for it: whoever does not wait reads old values.
"""

import contextlib
import copy
import gc
import io
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit.core
from shardkit.core import Blocks, clip_grad_norm_, full_state_dict, optimizer_step_on_shards
from shardkit.core.beyond import FileTier, overlap_step, steps
from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.parameters.param import sharded_counterpart
from shardkit.core.torch_compat import held_local
from tests.core.beyond.late import late
from tests.core.optimizer_steps.placed_training import ELEMENTWISE, loss_of, optimizer_for, shard_layers
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.parity import Case, build, shard
from tests.support.schedules import Run, plain
from tests.support.sharding import shard_each
from tests.support.trace import EXACT, Trace, assert_same
from tests.support.twins import assert_equal

# -- the same bits -----------------------------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    *ELEMENTWISE,
    ("AdamW", {"lr": torch.tensor(0.05)}),
    ("SGD", {"fused": True, "momentum": 0.9}),
]


class Unread(Run):
    """A run that reads no gradients."""

    def record_gradients(self, step: int, where: str) -> None:
        pass


def _train(
    rank: int,
    world_size: int,
    case: Case,
    make: Callable[..., Any],
    kind: type[Run],
    when: Any = None,
    make_tier: Callable[[], FileTier | None] = lambda: None,
) -> Trace:
    """A run that reads nothing between a step and the next forward."""
    model = build(case)
    shard(model, case, shardkit.core, world_size)
    for feature in case.chosen:
        feature.prepare(model, shardkit.core, case.spec)
    few, many = (list(part) for part in (list(model.parameters())[:2], list(model.parameters())[2:]))
    optimizer = make([{"params": few, "weight_decay": 0.1}, {"params": many}])
    if when is not None:
        overlap_step(optimizer, when=when, states=make_tier())
    schedule = next((feature.schedule for feature in case.chosen if feature.schedule), plain)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    run = kind(rank, shardkit.core, case.spec, model, optimizer, Trace())
    run.reshard_before_update = any(feature.reshard_before_update for feature in case.chosen)
    for step in range(case.steps):
        schedule(run, step)
        rates.step()
    run.trace.add_tree("state dict", dict(model.state_dict()))
    run.trace.add_tree("optimizer", optimizer.state_dict())
    return run.trace


def _same_as_plain(
    rank: int,
    world_size: int,
    case: Case,
    name: str,
    options: dict[str, Any],
    when: str = "auto",
    make_tier: Callable[[], FileTier | None] = lambda: None,
) -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        copied = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in options.items()}
        return getattr(torch.optim, name)(groups, **({"lr": 0.05} | copied))

    kind = Unread if when == "backward" else Run
    expected = _train(rank, world_size, case, make, kind)
    assert_same(expected, _train(rank, world_size, case, make, kind, when, make_tier), EXACT)
    with late():
        assert_same(expected, _train(rank, world_size, case, make, kind, when, make_tier), EXACT)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=str)
def test_every_optimizer(name: str, options: dict[str, Any]) -> None:
    run_ranks(2, _same_as_plain, Case("mlp", steps=3), name, options)


IN_BACKWARD = [
    (1, "mlp", ()),
    (2, "mlp", ("accumulate_no_sync", "offload")),
    (2, "mlp", ("ignored", "evaluation")),
    (2, "mlp", ("one_f_one_b",)),
    (2, "mlp", ("keep_after_backward",)),
    (3, "transformer", ()),
    (4, "mlp", ("hsdp_2", "accumulate_no_all_reduce")),
]


@pytest.mark.parametrize(("world_size", "model", "features"), IN_BACKWARD, ids=str)
def test_steps_in_backward(world_size: int, model: str, features: tuple[str, ...]) -> None:
    """Each gradient is reduced once for a step; the learning rate changes after each."""
    run_ranks(world_size, _same_as_plain, Case(model, features, steps=4), "AdamW", {"fused": True}, "backward")


@pytest.mark.parametrize(
    ("world_size", "model", "features", "parameters"),
    [(*case, bool(number % 2)) for number, case in enumerate(IN_BACKWARD)],
    ids=str,
)
def test_steps_with_files(
    world_size: int, model: str, features: tuple[str, ...], parameters: bool, tmp_path: Path
) -> None:
    """Of the optimizer's state, or of the shards, too."""
    case, make_tier = Case(model, features, steps=4), partial(FileTier, tmp_path, "64kB", parameters=parameters)
    run_ranks(world_size, _same_as_plain, case, "AdamW", {"fused": True}, "auto", make_tier)


@on_ranks(2)
def test_steps_in_backward_are_hidden_by_it(rank: int, world_size: int) -> None:
    """A job begins while backward goes on, in backward's order; `step()` waits for none, and starts none again."""
    pair, seen = Pair(world_size, when="backward"), list[str]()
    model, optimizer = pair.both[0]
    run = steps.Job.run

    def noted(job: steps.Job, *args: Any) -> None:
        seen.append(job.label)
        run(job, *args)

    pair.step(rank, 0)
    with pytest.MonkeyPatch.context() as patch, late():
        patch.setattr(steps.Job, "run", noted)
        loss_of(model, rank, 1).backward()
        started = [job.label for job in pair.steps._jobs]
        optimizer.step()
        optimizer.zero_grad()
        assert [job.label for job in pair.steps._jobs] == started
        assert started == [f"layers.{number}.weight" for number in (3, 2, 1, 0)]
        assert seen == []
        loss_of(model, rank, 2)
        assert sorted(seen) == sorted(started)


def _unscale(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


TOO_LATE: dict[str, Callable[[Any, Any], Any]] = {
    "clipping": lambda model, optimizer: clip_grad_norm_(model.parameters(), 1.0),
    "torch's clipping": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a scaler": _unscale,
    "another sum": lambda model, optimizer: loss_of(model, 0, 9).backward(),
    "a step that is left out": lambda model, optimizer: (optimizer.zero_grad(), loss_of(model, 0, 9).backward()),
    "a gradient that is dropped": lambda model, optimizer: (
        setattr(model.layers[1].weight, "grad", None),
        optimizer.step(),
    ),
    "state that is loaded": lambda model, optimizer: (
        optimizer.load_state_dict(optimizer.state_dict()),
        optimizer.step(),
    ),
}
MISUSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    **{name: (misuse, "is used or dropped before optimizer.step") for name, misuse in TOO_LATE.items()},
    "another rate": (
        lambda model, optimizer: (optimizer.param_groups[0].update(lr=0.5), optimizer.step()),
        "lr was changed from 0.05 to 0.5 between backward and optimizer.step",
    ),
    "a closure": (lambda model, optimizer: optimizer.step(lambda: 0.0), "with a closure, whose backward would"),
}


@on_ranks(2)
def test_what_cannot_step_in_backward_is_refused(rank: int, world_size: int) -> None:
    for name, (misuse, message) in MISUSES.items():
        pair = Pair(world_size, when="backward")
        model, optimizer = pair.both[0]
        pair.step(rank, 0)
        loss_of(model, rank, 1).backward()
        with pytest.raises(RuntimeError, match=message):
            misuse(model, optimizer)
        model.reset_iter_state()
        optimizer.zero_grad()
        pair.align()
        pair.step(rank, 2)
        pair.step(rank, 3)
        pair.check(name)


def _move_to_the_front(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two layers get a group of their own, which makes that of all others the second one."""
    (group,) = optimizer.param_groups
    *group["params"], weight, bias = group["params"]
    optimizer.param_groups.insert(0, {**group, "params": [weight, bias], "lr": 0.5})


@on_ranks(2)
def test_parameters_move_to_other_groups_between_steps(rank: int, world_size: int) -> None:
    pair = Pair(world_size, when="backward")
    pair.step(rank, 0)
    for model, optimizer in pair.both:
        _move_to_the_front(model, optimizer)
    pair.step(rank, 1)
    pair.check("moved")
    for optimizer in pair.optimizers:
        for one in optimizer.param_groups.pop(0)["params"]:
            del optimizer.state[one]
    pair.step(rank, 2)
    pair.check("removed")
    model, optimizer = pair.both[0]
    loss_of(model, rank, 3).backward()
    _move_to_the_front(model, optimizer)
    with pytest.raises(RuntimeError, match="parameter groups were changed between backward"):
        optimizer.step()


@on_ranks(2)
def test_two_optimizers_that_share_parameters(rank: int, world_size: int) -> None:
    """They step one after the other; in backward only one of them can."""
    models = [shard_layers(world_size) for _ in range(2)]
    both = [
        (torch.optim.AdamW(model.parameters(), lr=0.05), torch.optim.SGD(model.layers[1].parameters(), lr=0.1))
        for model in models
    ]
    overlap_step(both[0][0], when="backward")
    with pytest.raises(RuntimeError, match=r"two optimizers have parameter '.*weight' and overlap_step"):
        overlap_step(both[0][1], when="backward")
    overlap_step(both[0][1])
    with late():
        for number in range(3):
            for model, optimizers in zip(models, both, strict=True):
                loss_of(model, rank, number).backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
    assert_equal(*(dict(model.state_dict()) for model in models), "weights")
    optimizers[0].itself = optimizers[0]  # which only the garbage collector frees
    del both, optimizers
    kept = [overlap_step(torch.optim.SGD(models[0].parameters(), lr=0.1), when="backward") for _ in range(2)]
    assert kept[0] is not kept[1]  # each optimizer is gone before the next


@pytest.mark.parametrize("kind", ["bitsandbytes.optim.AdamW8bit", "torchao.optim.AdamW8bit", "torchao.optim.AdamW4bit"])
@pytest.mark.parametrize("when", ["auto", "backward"])
@on_ranks(2, timeout=120)
def test_quantised_state(rank: int, world_size: int, kind: str, when: Any) -> None:
    """On `Blocks`, with shards of which some are whole blocks and some are empty; and after a load."""
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 3))
        blocks: dict[str, Any] = {"shard_placement_fn": lambda parameter: Blocks(elements=4096)}
        models.append(shard_each(*model[::2], model, mesh=rank_mesh((world_size,)), **blocks))
        optimizers.append(optimizer_for(kind, model.parameters()))
        optimizer_step_on_shards(optimizers[-1])
    overlap_step(optimizers[0], when=when)
    with torch.compiler.set_stance("force_eager"):
        for number in range(5):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + rank))
            for model, optimizer in zip(models, optimizers, strict=True):
                with late() if number % 2 else contextlib.nullcontext():
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if number == 2:
                        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_equal(*(dict(model.state_dict()) for model in models), "weights")  # after the last step
        assert_equal(*(optimizer.state_dict() for optimizer in optimizers), "state")


FEATURES = [
    (1, ("no_reshard",)),
    (1, ("keep_after_backward",)),
    (2, ("offload", "clipped")),
    (2, ("bfloat16_reduce_float32", "accumulate_no_sync", "offload")),
    (2, ("ignored", "evaluation")),
    (2, ("grad_scaler", "reshard_default")),
    (2, ("explicit_unshard",)),
    (2, ("forwards_backwards",)),
    (2, ("one_f_one_b",)),
    (2, ("replicate_only", "gradients_kept")),
    (3, ("no_unshard_in_backward",)),
    (3, ("prefetch", "retained_graph")),
    (4, ("hsdp_2", "accumulate_no_all_reduce")),
    (4, ("reshard_to_2", "input_gradients")),
]


@pytest.mark.parametrize(("world_size", "features"), FEATURES, ids=str)
def test_every_kind_of_training_step(world_size: int, features: tuple[str, ...]) -> None:
    run_ranks(world_size, _same_as_plain, Case("mlp", features, steps=3), "AdamW", {"fused": True})


@on_ranks(1)
def test_options_that_are_tensors_are_read_at_once(rank: int, world_size: int) -> None:
    rates = [(torch.tensor(0.05), (torch.tensor(0.5), torch.tensor(0.9))) for _ in range(2)]
    with late():
        pair = Pair(world_size, "Adam")
        for optimizer, (rate, betas) in zip(pair.optimizers, rates, strict=True):
            optimizer.param_groups[0] |= {"lr": rate, "betas": betas, "foreach": False}
        for number in range(3):
            pair.step(rank, number)
            for rate, betas in rates:
                for one in (rate, *betas):
                    one.mul_(0.9)
        pair.check("three steps")


@on_ranks(1)
def test_a_step_between_forward_and_backward_raises_as_without(rank: int, world_size: int) -> None:
    """The parameters of one rank alone are its shards, which autograd has saved, and plain steps count as writes."""
    with late():
        pair = Pair(world_size)
        optimizer_step_on_shards(pair.optimizers[1])
        pair.step(rank, 0)
        for model, optimizer in pair.both:
            loss_of(model, rank, 1).backward()
            loss = loss_of(model, rank, 2)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


# -- whoever reads -----------------------------------------------------------------------------------------------------


class Pair:
    """Two models that train alike; the first one's steps are overlapped."""

    def __init__(
        self, world_size: int, name: str = "AdamW", when: Any = "auto", states: FileTier | None = None, **options: Any
    ) -> None:
        self.models = [shard_layers(world_size) for _ in range(2)]
        kind = getattr(torch.optim, name)
        self.optimizers = [kind(model.parameters(), **({"lr": 0.05} | options)) for model in self.models]
        self.both = list(zip(self.models, self.optimizers, strict=True))
        self.steps = overlap_step(self.optimizers[0], when=when, states=states)
        assert overlap_step(self.optimizers[0]) is self.steps

    def step(self, rank: int, number: int) -> None:
        for model, optimizer in self.both:
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()

    @torch.no_grad()
    def align(self) -> None:
        """Give the first the parameters and the state of the second."""
        for one, other in zip(*(model.parameters() for model in self.models), strict=True):
            one.copy_(other)
        self.optimizers[0].load_state_dict(copy.deepcopy(self.optimizers[1].state_dict()))

    def check(self, where: str) -> None:
        assert_equal(*(dict(model.state_dict()) for model in self.models), where)
        assert_equal(*(optimizer.state_dict() for optimizer in self.optimizers), where)


def _reloaded(saved: Any) -> Any:
    stream = io.BytesIO()
    torch.save(saved, stream)
    return torch.load(io.BytesIO(stream.getvalue()), weights_only=False)


@torch.no_grad()
def _average(model: nn.Module, optimizer: Any) -> Any:
    averages = [torch.ones_like(parameter) for parameter in model.parameters()]
    torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
    return averages


@torch.no_grad()
def _scale_in_place(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def _assign_local(model: nn.Module, optimizer: Any) -> None:
    weight = model.layers[0].weight
    weight._local_tensor = weight._local_tensor.clone()


def _load_other_state(model: nn.Module, optimizer: Any) -> None:
    state = torch.optim.AdamW(model.parameters()).state_dict()
    optimizer.load_state_dict({**state, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_weights(model: nn.Module, optimizer: Any, **options: Any) -> None:
    model.load_state_dict({key: value.detach() * 0.5 for key, value in model.state_dict().items()}, **options)


def _assign_weights(model: nn.Module, optimizer: Any) -> None:
    """The optimizer, which holds the parameters before, gets the new ones: otherwise its step is refused."""
    before = list(model.parameters())
    _load_weights(model, optimizer, assign=True)
    optimizer.param_groups[0]["params"][:] = model.parameters()
    for old, new in zip(before, model.parameters(), strict=True):
        optimizer.state[new] = optimizer.state.pop(old)


def _in_other_memory(model: nn.Module, optimizer: Any) -> None:
    model.double()
    model.float()


def _step_with_a_closure(model: nn.Module, optimizer: Any) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0, 50)
        loss.backward()
        return loss

    return optimizer.step(closure)


def _add_a_group(model: nn.Module, optimizer: Any) -> None:
    if len(optimizer.param_groups) == 1:
        *rest, last = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = rest
        optimizer.add_param_group({"params": [last], "lr": 0.5})


READERS: dict[str, Callable[[Any, Any], Any]] = {
    "local": lambda model, optimizer: [one.to_local() for one in model.parameters()],
    "whole": lambda model, optimizer: [one.full_tensor() for one in model.parameters()],
    "data": lambda model, optimizer: [one.data for one in model.parameters()],
    "array": lambda model, optimizer: model.layers[0].weight.to_local().detach().numpy().tolist(),
    "text": lambda model, optimizer: repr(model.layers[0].weight),
    "all equal": lambda model, optimizer: torch.equal(model.layers[0].weight, model.layers[1].weight),
    "average": _average,
    "model's state dict": lambda model, optimizer: dict(model.state_dict()),
    "optimizer's state dict": lambda model, optimizer: optimizer.state_dict(),
    "state": lambda model, optimizer: list(optimizer.state.values()),
    "state of one": lambda model, optimizer: optimizer.state[model.layers[2].weight],
    "state as a dict": lambda model, optimizer: list(dict(optimizer.state).values()),
    "copied state": lambda model, optimizer: [list(one.values()) for one in map(copy.copy, [optimizer.state])],
    "whole state": dcp.get_state_dict,
    "full state": lambda model, optimizer: full_state_dict(model),
    "copy": lambda model, optimizer: (optimizer.zero_grad(), [copy.deepcopy(one) for one in model.parameters()]),
    "copied optimizer": lambda model, optimizer: (optimizer.zero_grad(), copy.deepcopy(optimizer).state_dict()),
    "saved": lambda model, optimizer: _reloaded([one.detach() for one in model.parameters()]),
    "saved optimizer": lambda model, optimizer: _reloaded(optimizer.state_dict()),
    "evaluated": lambda model, optimizer: loss_of(model.eval(), 0, 99).item(),
    "unsharded": lambda model, optimizer: (model.layers[3].unshard(), model.layers[3].weight.tolist())[1],
    "gradients": lambda model, optimizer: [one.grad.to_local() for one in model.parameters()],
    "clipped too late": lambda model, optimizer: (
        clip_grad_norm_(model.parameters(), 0.1),
        [one.grad for one in model.parameters()],
    ),
    "gradients of zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "written": _scale_in_place,
    "assigned": _assign_local,
    "moved": _in_other_memory,
    "weights loaded": _load_weights,
    "weights assigned": _assign_weights,
    "state taken over": lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "other state": _load_other_state,
    "a step again": lambda model, optimizer: optimizer.step(),
    "a step with a closure": _step_with_a_closure,
    "another group": _add_a_group,
    "another rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.2),
    "another optimizer": lambda model, optimizer: torch.optim.SGD(model.layers[1].parameters(), lr=0.1).step(),
}


@pytest.mark.parametrize("in_files", [False, True])
@on_ranks(2)
def test_whoever_reads_waits(rank: int, world_size: int, tmp_path: Path, in_files: bool) -> None:
    """Each after the first step, which makes the state, and after the second."""
    tier = FileTier(tmp_path, "5kB", parameters=True) if in_files else None
    with late():
        for name, read in READERS.items():
            pair = Pair(world_size, states=tier)
            for number in range(2):
                pair.step(rank, number)
                seen = [read(model, optimizer) for model, optimizer in pair.both]
                assert_equal(*seen, f"{name}, step {number}")
                for model in pair.models:
                    model.reshard()
                    model.layers[3].reshard()
            pair.step(rank, 2)
            pair.check(name)


# -- what waits for nothing --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_returns_at_once_and_forward_goes_on_with_it(rank: int, world_size: int) -> None:
    """The first forwards of a step wait for no later group, nor does what has no values."""
    pair, gate = Pair(world_size), threading.Event()
    model, optimizer = pair.both[0]
    pair.step(rank, 0)
    pair.steps.wait()
    loss_of(model, rank, 1).backward()
    steps._worker().submit(gate.wait)
    before = [(one.shape, one.dtype, one.placements, one._version) for one in model.parameters()]
    optimizer.step()
    assert before == [(one.shape, one.dtype, one.placements, one._version) for one in model.parameters()]
    assert all(isinstance(one, nn.Parameter) and isinstance(one, DTensor) for one in model.parameters())
    optimizer.zero_grad()
    model.train().requires_grad_(True)
    last = FSDPParamGroup.of(sharded_counterpart(model.layers[3].weight))
    waited: list[bool] = []
    model.layers[1].register_forward_hook(lambda *_: waited.append(not last.before_gather))
    gate.set()
    loss_of(model, rank, 2)
    assert waited == [False]
    assert not last.before_gather
    assert {type(one) for one in model.parameters()} == {DTensor}


# -- errors and ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("touch", ["forward", "parameter", "state", "step", "wait"])
@on_ranks(2)
def test_an_error_reaches_whoever_waits_once(rank: int, world_size: int, touch: str) -> None:
    pair = Pair(world_size)
    model, optimizer = pair.both[0]
    pair.step(rank, 0)
    loss_of(model, rank, 1).backward()
    optimizer.state[model.layers[2].weight]["exp_avg"] = torch.zeros(3)
    optimizer.step()
    touches: dict[str, Callable[[], object]] = {
        "forward": lambda: loss_of(model, rank, 2),
        "parameter": model.layers[2].bias.to_local,
        "state": optimizer.state_dict,
        "step": optimizer.step,
        "wait": pair.steps.wait,
    }
    with pytest.raises(RuntimeError, match=r"step of 'layers\.2\.weight' failed: .*; restore the last checkpoint"):
        touches[touch]()
    model.reset_iter_state()
    pair.align()
    pair.step(rank, 3)
    pair.check(touch)


@on_ranks(1)
def test_the_last_step_holds_no_model(rank: int, world_size: int) -> None:
    with late():
        model = shard_layers(world_size)
        optimizer = torch.optim.AdamW(model.parameters())
        overlap_step(optimizer)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        last, gradient, seen = model.layers[3].bias, model.layers[3].bias.grad, weakref.ref(model.layers[0].weight)
        del model, optimizer
        gc.collect()
        assert seen() is None
        assert last.isfinite().all() and gradient.isfinite().all()


@on_ranks(1)
def test_other_optimizers_are_refused(rank: int, world_size: int) -> None:
    class Mine(torch.optim.AdamW):
        pass

    model = shard_layers(world_size)
    for optimizer in (torch.optim.Adafactor(model.parameters()), Mine(model.parameters())):
        with pytest.raises(TypeError, match=f"{type(optimizer).__name__} is not known to update each element"):
            overlap_step(optimizer)


@on_ranks(1, isolated=True)
def test_a_fork_waits_and_leaves_errors_to_readers(rank: int, world_size: int) -> None:
    pair = Pair(world_size)
    with late():
        for number in range(2):
            pair.step(rank, number)
            child = os.fork()
            if not child:
                held = ([held_local(one) for one in model.parameters()] for model in pair.models)
                os._exit(not all(map(torch.equal, *held)))
            assert os.waitpid(child, 0)[1] == 0
            loss_of(pair.models[0], rank, 9).backward()
        pair.optimizers[0].state[pair.models[0].layers[2].weight]["exp_avg"] = torch.zeros(3)
        pair.optimizers[0].step()
        if not os.fork():
            os._exit(0)
        with pytest.raises(RuntimeError, match=r"step of 'layers\.2\.weight' failed"):
            pair.models[0].state_dict()


PROGRAM = """
import atexit, os, sys, time, torch, torch.distributed as dist
from torch import nn
from shardkit.core import fully_shard
assert not [name for name in sys.modules if "beyond" in name]
from shardkit.core import *
from shardkit.core import FileTier, offload_activations, overlap_step
from shardkit.core.beyond import steps
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group("gloo")

def last_step(buffer):
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    overlap_step(optimizer)
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        local = model.weight.to_local().detach()
        before = local.clone()
        if step:
            optimizer.state[model.weight]["momentum_buffer"] = buffer
            steps._worker().submit(time.sleep, 0.5)
        optimizer.step()
    return model, optimizer, local, before

failed, (*stepped, local, before) = last_step(torch.zeros(3)), last_step(torch.zeros(4, 4))
atexit.register(lambda: print("lost" if torch.equal(local, before) else "stepped"))
dist.destroy_process_group()
"""


def test_a_program_from_its_imports_to_its_end() -> None:
    """Core has the names and imports them when asked. The end waits for steps, and tells of one that has failed."""
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "step of 'weight' failed" in ended.stderr, ended.stderr
    assert ended.stdout == "stepped\n", ended.stderr


def test_a_name_that_core_has_not() -> None:
    with pytest.raises(AttributeError, match=r"^module 'shardkit\.core' has no attribute 'nothing'; see its __all__"):
        shardkit.core.nothing  # noqa: B018
