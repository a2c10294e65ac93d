"""Optimizers on `Owned`: classes that were tried, or that users vouch for, step as in one process; others raise."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.core import Owned, plan_owners
from tests.core.optimizer_steps.placed_training import Layers, backward_alike, matrices, shard_layers
from tests.core.optimizer_steps.separate_optimizers import DATA, joins, name_of, quiet, steps_alone, tried
from tests.support import on_ranks, run_ranks

KNOWN: dict[str, Any] = json.loads(DATA.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("package", KNOWN)
def test_classes_that_step_on_each_parameter_by_itself(package: str) -> None:
    """If this fails: python -m tests.core.optimizer_steps.separate_optimizers --write."""
    pytest.importorskip(package.replace("-", "_"))
    assert tried(package) == KNOWN[package]


class Sends(torch.optim.SGD):
    """Communicates in its step, as Muon implementations do that distribute the work themselves."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.data)


class Clips(torch.optim.SGD):
    """Clips the parameters of some kinds together, if an option says so."""

    def __init__(self, parameters: Any, lr: float, clip_at: float | None = None) -> None:
        super().__init__(parameters, lr=lr)
        self.clip_at = clip_at

    @staticmethod
    def is_clipped(parameter: torch.Tensor) -> bool:
        return True

    def step(self, closure: Any = None) -> Any:
        if self.clip_at is not None:
            some = [parameter for parameter in self.param_groups[0]["params"] if self.is_clipped(parameter)]
            torch.nn.utils.clip_grad_norm_(some, self.clip_at)
        return super().step(closure)


class ClipsVectors(Clips):
    @staticmethod
    def is_clipped(parameter: torch.Tensor) -> bool:
        return parameter.ndim == 1


class SharpnessAware(torch.optim.SGD):
    """Moves up along all gradients, scaled by their norm, and back."""

    def step(self, closure: Any = None) -> Any:
        closure()
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.data.add_(move)
        closure()
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.data.sub_(move)
        return super().step()


def test_trials_find_what_combines_parameters_or_sends() -> None:
    with quiet():
        assert joins(torch.optim.SGD, {}) is False
        assert joins(torch.optim.LBFGS, {}) is True
        assert joins(Sends, {}) is True
        assert joins(SharpnessAware, {}) is True
        assert joins(Clips, {}) is joins(ClipsVectors, {}) is False
        assert joins(Clips, {"clip_at": 1.0}) is joins(ClipsVectors, {"clip_at": 1.0}) is True
        assert not steps_alone(Clips)
        assert steps_alone(torch.optim.SGD)


class Own(torch.optim.SGD):
    """A subclass of a known class: it may do anything."""


@on_ranks(2)
def test_an_unknown_class_is_refused_before_it_steps(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, lambda p: Owned(rank=0))
    model(torch.ones(2, 12)).sum().backward()
    before = [p.full_tensor() for p in model.parameters()]
    for kind in (Own, torch.optim.LBFGS):
        optimizer = kind(matrices(model), lr=0.1)
        name = kind.__name__
        said = rf"{name} is not known .* 'layers\.0\.weight' is placed .* {name}\.steps_each_parameter_alone = True"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                optimizer.step(lambda: 1.0)
    assert _equal([p.full_tensor() for p in model.parameters()], before)

    class Vouched(Own):
        steps_each_parameter_alone = True

    Vouched(matrices(model), lr=0.1).step()
    assert not _equal([p.full_tensor() for p in matrices(model)], before)


@on_ranks(1)
def test_one_rank_alone_may_combine_them(rank: int, world_size: int) -> None:
    model = shard_layers(world_size, plan_owners(Layers()))
    torch.optim.LBFGS(matrices(model)).step(lambda: model(torch.ones(2, 12)).sum())


STEPS = 5
RANDOM = ("Gravity", "Kron", "BSAM")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _outcome(rank: int, world_size: int, make: Make) -> str:
    """same, random, differs, or fails if it does so in one process as well; the same on all ranks.

    random: it draws numbers, so that other seeds give one process other weights, too.
    """
    reference, again, model = Layers(), Layers(), shard_layers(world_size, plan_owners(Layers()))
    try:
        theirs = make(matrices(reference))
    except Exception as error:  # noqa: BLE001
        return f"fails: {error!r:.80}"
    ours, seeded = make(matrices(model)), make(matrices(again))
    for step in range(STEPS):
        model.zero_grad()
        backward_alike(model, reference, rank, step)
        for one, whole in zip(matrices(again), matrices(reference), strict=True):
            one.grad = whole.grad.clone()
        failed = _failure(theirs, step)
        if failed:
            return f"fails: {failed:.80}"
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, _failure(ours, step))
        if any(everyone):
            return f"raises: {everyone}"
        _failure(seeded, step + 100)
        if not _equal([p.full_tensor() for p in matrices(model)], matrices(reference)):
            return "differs" if _equal(matrices(again), matrices(reference)) else "random"
    return "same"


def _equal(some: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=False))


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
        if kind.__name__ in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon"):
            return kind([{"params": parameters, "use_muon": True}])
        try:
            return kind(parameters, lr=0.01)
        except TypeError:
            return kind(parameters)

    return make


def _outcomes(rank: int, world_size: int) -> dict[str, str]:
    package: Any = pytest.importorskip("pytorch_optimizer")
    warnings.simplefilter("ignore")
    kinds = {kind for name in package.get_supported_optimizers() if (kind := package.load_optimizer(name))}
    known = sorted((kind for kind in kinds if name_of(kind) in KNOWN["pytorch-optimizer"]["classes"]), key=name_of)
    return {kind.__name__: _outcome(rank, world_size, _with_lr(kind)) for kind in known}


@pytest.mark.slow
def test_known_classes_of_pytorch_optimizer_step_as_in_one_process() -> None:
    found = run_ranks(2, _outcomes, timeout=400)[0]
    assert {name for name, one in found.items() if one == "random"} <= set(RANDOM), found
    others = [one for name, one in found.items() if name not in RANDOM and not one.startswith("fails")]
    assert set(others) == {"same"}, found
    assert len(others) > 80
