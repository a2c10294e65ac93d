"""Optimizers of other packages on `Owned`: every one steps as in one process, bit for bit, or is an error."""

import contextlib
import copy
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardkit.core import Owned, plan_owners
from shardkit.core.optimizer_steps.separate_steps import joins_parameters
from tests.core.test_whole_steps import build, gradients_for, matrices, shard
from tests.support import run_ranks

STEPS = 5
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _outcome(rank: int, world_size: int, make: Make) -> str:
    """same, refused, random, differs, or fails if it does so in one process as well; the same on all ranks.

    random: it draws numbers, so that other seeds give one process other weights, too.
    """
    reference, again, model = build(), build(), build()
    model = shard(model, world_size, plan_owners(model))
    try:
        theirs = make(matrices(reference))
    except Exception as error:  # noqa: BLE001
        return f"fails: {error!r:.80}"
    ours, seeded = make(matrices(model)), make(matrices(again))
    for step in range(STEPS):
        model.zero_grad()
        gradients_for(model, reference, rank, step)
        for one, whole in zip(matrices(again), matrices(reference), strict=True):
            one.grad = whole.grad.clone()
        failed = _failure(theirs, step)
        if failed:
            return f"fails: {failed:.80}"
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, _failure(ours, step))
        if any(everyone):
            refused = all("is placed on Owned()" in one for one in everyone)
            return "refused" if refused and not step else f"raises: {everyone}"
        _failure(seeded, step + 100)
        if not _equal([p.full_tensor() for p in matrices(model)], matrices(reference)):
            return "differs" if _equal(matrices(again), matrices(reference)) else "random"
    return "same"


def _equal(some: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def _failure(optimizer: torch.optim.Optimizer, step: int) -> str:
    torch.manual_seed(step)
    with torch.compiler.set_stance("force_eager"), contextlib.redirect_stdout(io.StringIO()):
        try:
            optimizer.step()
        except Exception as error:  # noqa: BLE001
            return repr(error)
    return ""


def _with_lr(kind: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return kind(parameters, lr=0.01)
        except TypeError:
            return kind(parameters)

    return make


def _outcomes(rank: int, world_size: int, kinds: dict[str, Make]) -> dict[str, str]:
    warnings.simplefilter("ignore")
    return {name: _outcome(rank, world_size, make) for name, make in kinds.items()}


REFUSED = (
    *(
        "adagc",
        "adai",
        "adams",
        "asgd",
        "avagrad",
        "dadaptadagrad",
        "dadaptadam",
        "dadaptadan",
        "dadaptlion",
        "swats",
    ),
    *("dadaptsgd", "lorarite", "prodigy", "lamb that clips", "lookahead"),
)
RANDOM = ("gravity", "kron")
MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")
OFTEN_USED = (
    *("adabelief", "adafactor", "adan", "adopt", "apollo", "came", "galore", "lamb", "lars", "lion", "madgrad", "muon"),
    *("mars", "normuon", "radam", "ranger", "schedulefreeadamw", "scion", "shampoo", "soap", "sophiah", "stableadamw"),
)


def _kinds() -> dict[str, Make]:
    package = pytest.importorskip("pytorch_optimizer")
    kinds: dict[str, Make] = {
        "lamb that clips": lambda parameters: package.Lamb(parameters, pre_norm=True),
        "lookahead": lambda parameters: package.Lookahead(torch.optim.AdamW(parameters)),
    }
    for name in package.get_supported_optimizers():
        kind = package.load_optimizer(name)
        if name in MUONS:
            kinds[name] = lambda parameters, kind=kind: kind([{"params": parameters, "use_muon": True}])
        elif name not in ("magma", "spectralsphere"):  # wraps others as lookahead does; takes ten seconds
            kinds[name] = _with_lr(kind)
    return kinds


def _of_pytorch_optimizer(rank: int, world_size: int, names: tuple[str, ...] | None) -> dict[str, str]:
    return _outcomes(rank, world_size, {name: one for name, one in _kinds().items() if names is None or name in names})


def test_optimizers_that_join_parameters_are_refused_and_others_are_right() -> None:
    found = run_ranks(2, _of_pytorch_optimizer, REFUSED + OFTEN_USED, timeout=120)[0]
    assert {name for name, one in found.items() if one == "refused"} == set(REFUSED), found
    assert {one for name, one in found.items() if name not in REFUSED and not one.startswith("fails")} == {"same"}, (
        found
    )


@pytest.mark.slow
def test_every_optimizer_of_pytorch_optimizer_is_right_or_refused() -> None:
    found = run_ranks(2, _of_pytorch_optimizer, None, timeout=400)[0]
    refused = {*REFUSED, "sara"}  # which changes the rank of one parameter, drawn from all that it holds
    assert {name for name, one in found.items() if one == "refused"} == refused, found
    assert {name for name, one in found.items() if one == "random"} <= set(RANDOM), found
    others = [one for name, one in found.items() if name not in {*refused, *RANDOM} and not one.startswith("fails")]
    assert set(others) == {"same"}, found
    assert len(others) > 80


def _of_heavyball(rank: int, world_size: int, names: tuple[str, ...], alone: tuple[str, ...]) -> dict[str, str]:
    heavyball = pytest.importorskip("heavyball")
    heavyball.utils.compile_mode = None
    kinds: dict[str, Make] = {name: _with_lr(getattr(heavyball, name)) for name in names}
    for name in alone:
        kinds[f"{name} alone"] = lambda parameters, name=name: getattr(heavyball, name)(parameters, multi_tensor=False)
    return _outcomes(rank, world_size, kinds)


def test_psgd_on_all_matrices_at_once_is_refused() -> None:
    assert run_ranks(2, _of_heavyball, ("PSGDKron",), (), timeout=120) == [{"PSGDKron": "refused"}] * 2


@pytest.mark.slow  # ten optimizers, most of them slow; the test above has the most common kind
def test_heavyballs_psgd_on_all_matrices_at_once_is_refused() -> None:
    joined = ("LATHER", "PSGDKron", "PSGDPRO", "QSGD", "PSGDLRA")
    names = ("AdamW", "LaProp", "Muon", "SOAP", "Scion", *joined)
    found = run_ranks(2, _of_heavyball, names, ("PSGDKron", "PSGDPRO"), timeout=200)[0]
    assert {name for name, one in found.items() if one == "refused"} == set(joined), found
    assert {one for name, one in found.items() if name not in joined} <= {"same", "random"}, found
    assert [found[name] for name in ("AdamW", "LaProp", "SOAP")] == ["same"] * 3, found


class Sends(torch.optim.SGD):
    """Communicates in its step, as Muon implementations do that distribute the work themselves."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.data)


class SharpnessAware(torch.optim.SGD):
    """Moves up along all gradients, scaled by their norm, and back."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.data.add_(move)
        closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.data.sub_(move)
        super().step()
        return loss


class JoinsWide(torch.optim.SGD):
    """Clips some of its parameters together."""

    @staticmethod
    def is_joined(parameter: torch.Tensor) -> bool:
        return parameter.ndim == 2 and parameter.shape[0] < parameter.shape[1]

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        some = [p for group in self.param_groups for p in group["params"] if self.is_joined(p)]
        torch.nn.utils.clip_grad_norm_(some, 1.0)
        super().step()
        return loss


class JoinsVectors(JoinsWide):
    @staticmethod
    def is_joined(parameter: torch.Tensor) -> bool:
        return parameter.ndim == 1


class Untried(torch.optim.SGD):
    """Its step fails on the small tensors of a trial."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].shape[0] > 12
        return super().step(closure)


def _refuses(rank: int, world_size: int) -> None:
    model = build()
    model = shard(model, world_size, lambda p: Owned(rank=0))
    before = [p.full_tensor() for p in model.parameters()]

    def closure() -> float:
        model.zero_grad()
        model(torch.ones(2, 12)).sum().backward()
        return 1.0

    for make, said in (
        (Sends, r"Sends communicates in its step \(c10d\S*\).*weight' is placed on Owned"),
        (SharpnessAware, "SharpnessAware uses other parameters' gradients in a parameter's step"),
        (torch.optim.LBFGS, "LBFGS uses other parameters' gradients in a parameter's step"),
        (JoinsWide, "JoinsWide uses other parameters' gradients in a parameter's step"),
        (JoinsVectors, "JoinsVectors uses other parameters' gradients in a parameter's step"),
        (Untried, r"could not be tried on small tensors \(AssertionError.*steps_each_parameter_alone = True"),
    ):
        optimizer = make(model.parameters() if make is JoinsVectors else matrices(model), lr=0.1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                optimizer.step(closure)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), old)
    vouched = Untried(matrices(model), lr=0.1)
    vouched.steps_each_parameter_alone = True
    assert joins_parameters(vouched, True) is None
    prodigy = Sends(matrices(model), lr=0.1)
    prodigy.param_groups[0]["fsdp_in_use"] = True  # its own: it adds up over the ranks
    assert joins_parameters(prodigy, True) is None


def test_what_joins_parameters_sends_or_cannot_be_tried_is_refused_before_it_steps() -> None:
    run_ranks(2, _refuses)


class Clips(torch.optim.Optimizer):
    """Clips by a norm of all gradients, if a setting of a group, or an attribute, says so."""

    def __init__(self, parameters: list[nn.Parameter], clip_at: float = 0.0) -> None:
        super().__init__(parameters, {"lr": 0.1, "clip_at": clip_at})
        self.always_at: float | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            some = [parameter for parameter in group["params"] if parameter.grad is not None]
            bound = group["clip_at"] or self.always_at
            norm = torch.stack([parameter.grad.norm() for parameter in some]).norm() if some else torch.zeros(())
            factor = min(1.0, bound / norm.item()) if bound and norm else 1.0
            for parameter in some:
                parameter.sub_(parameter.grad, alpha=group["lr"] * factor)


def _changes_settings(rank: int, world_size: int, how: str) -> None:
    model = build()
    model = shard(model, world_size, lambda p: Owned(rank=0))
    optimizer = Clips(matrices(model), clip_at=2e4 if how == "from the start" else 1e11 if how == "lowered" else 0.0)
    reference = build()
    steps = 0
    with pytest.raises(RuntimeError, match="Clips uses other parameters' gradients"):  # noqa: PT012
        for _ in range(2):
            gradients_for(model, reference, rank, steps)
            optimizer.step()
            steps += 1
            if how == "loaded":
                state_dict = optimizer.state_dict()
                state_dict["param_groups"][0]["clip_at"] = 0.01
                optimizer.load_state_dict(state_dict)
            elif how == "attribute":
                optimizer.always_at = 0.01
            else:
                optimizer.param_groups[0]["clip_at"] = 0.01
    assert steps == (how != "from the start")


@pytest.mark.parametrize("how", ["turned on", "lowered", "loaded", "attribute", "from the start"])
def test_other_settings_are_tried_again(how: str) -> None:
    run_ranks(2, _changes_settings, how)


def _trials(rank: int, world_size: int) -> int:
    """Steps on small tensors in 40 steps whose learning rate and momentum change each time."""
    model = build()
    model = shard(model, world_size, lambda p: Owned(rank=0))
    reference = build()
    optimizer = Counted(matrices(model), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    Counted.tried = 0
    for step in range(40):
        gradients_for(model, reference, rank, step)
        optimizer.step()
        schedule.step()
    return Counted.tried


class Counted(torch.optim.SGD):
    """Counts its steps on the small tensors of a trial."""

    tried = 0

    def step(self, closure: Any = None) -> Any:
        if next(iter(self.param_groups[0]["params"])).shape == (12, 12):
            Counted.tried += 1
        return super().step(closure)


def test_a_schedule_asks_for_no_more_trials() -> None:
    assert max(run_ranks(2, _trials)) <= 3 * 12 * 2


def _alone(rank: int, world_size: int) -> None:
    model = build()
    model = shard(model, world_size, plan_owners(model))
    torch.optim.LBFGS(matrices(model)).step(lambda: model(torch.ones(2, 12)).sum())


def test_one_rank_alone_may_join_them() -> None:
    run_ranks(1, _alone)


class Noisy(torch.optim.SGD):
    """Draws from every generator there is, as users' optimizers may."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(torch.randn_like(parameter) * random.random() * float(np.random.rand()))
        return super().step(closure)


def test_a_trial_leaves_optimizer_random_numbers_and_hooks_alone() -> None:
    called: list[object] = []
    parameters = [nn.Parameter(torch.randn(9, 7)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn(9, 7)
    optimizer = Noisy(parameters, lr=0.1, momentum=0.9)
    optimizer.step()
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    handle = register_optimizer_step_pre_hook(lambda *_: called.append(2))
    before = copy.deepcopy(optimizer.state_dict())
    kept = [(p.detach().clone(), p.grad.clone()) for p in parameters]
    numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert joins_parameters(optimizer, False) is None
    handle.remove()
    assert not called
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert (np.random.get_state()[1] == numbers[2]).all()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close([(p.detach(), p.grad) for p in parameters], kept, rtol=0, atol=0)
    assert joins_parameters(AllAtOnce(parameters, lr=0.0), False) is not None, (
        "a warm-up from nothing hides no joint step"
    )


class AllAtOnce(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


@pytest.mark.parametrize("name", ["soap", "shampoo", "adan", "lion", "came", "scalableshampoo"])
def test_an_optimizer_that_resumes_can_be_tried(name: str) -> None:
    """Its settings count steps, and its state has sizes of the parameters."""
    make = _kinds()[name]
    parameters = [nn.Parameter(torch.randn(9, 7)) for _ in range(2)]
    first, resumed = make(parameters), make(parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(9, 7)
        first.step()
    resumed.load_state_dict(first.state_dict())
    assert joins_parameters(resumed, False) is None


def _compiled(rank: int, world_size: int) -> None:
    class Own(torch.optim.SGD):
        pass

    model = build()
    model = shard(model, world_size, plan_owners(model))
    optimizer = Own(matrices(model), lr=0.1)
    model(torch.ones(2, 12)).sum().backward()
    before = [p.full_tensor() for p in matrices(model)]
    torch.compile(optimizer.step, backend="eager")()
    assert not _equal([p.full_tensor() for p in matrices(model)], before)


def test_a_compiled_step_is_tried_as_any_other() -> None:
    run_ranks(2, _compiled, timeout=120)
