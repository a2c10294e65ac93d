"""Tries which classes of optimizers step on each parameter by itself; the package keeps their names as data.

    python -m scripts.separate_optimizers

writes the names of those classes of the installed torch, bitsandbytes, torchao, heavyball and pytorch-optimizer.
A slow test of tests/core/optimizer_steps/test_placements_for.py compares.

On `Owned` an optimizer sees only the matrices of one rank. If it computes a number from all of its parameters (a norm
for clipping, a step size, the direction of a line search), or communicates, its result would be wrong, and nothing in
its class shows this. So each class steps on small tensors, and once more with other gradients for one tensor of each
shape. If other tensors, their state or a setting come out differently, or if anything is sent, the class is left out.
So is a class of which this holds with any other value of a single option, and one that cannot be tried.
"""

import contextlib
import enum
import importlib
import inspect
import io
import json
import random
import typing
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardkit.core.optimizer_steps

DATA = Path(shardkit.core.optimizer_steps.__file__).with_name("separate_optimizers.json")
PACKAGES = {
    "torch": "torch.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "torchao": "torchao.optim",
    "heavyball": "heavyball",
    "pytorch-optimizer": "pytorch_optimizer",
}
STEPS = 12
LARGER = (1.0, 1e3, 1e8)  # enough to be clipped, and for bounds that few gradients exceed
MATRICES = {(10, 12): 3, (12, 10): 2}
SHAPES = {**MATRICES, (16,): 2}
_Shapes: TypeAlias = dict[tuple[int, ...], int]
_COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")

# Arguments without a default, or without which a class does not run.
_REQUIRED: dict[str, dict[str, Any]] = {"BSAM": {"num_data": 10}, "Ranger21": {"num_iterations": 100}}
# Values of options whose default does not suggest them.
_VALUES: dict[str, list[Any]] = {
    "gradient_clipping": ["global_l2norm_clip", "l2_clip_"],
    "update_clipping": ["global_l2norm_clip", "l2_clip_"],
}
_TOO_SLOW = {"SpectralSphere"}
# Not tried: settings that schedulers change, names of tensors, and ways of computing the same.
_NO_OPTIONS = {"self", "params", "lr", "betas", "eps", "foreach", "fused", "differentiable", "capturable", "maximize"}


def classes_of(package: str) -> list[type[torch.optim.Optimizer]]:
    """The public optimizer classes of a package."""
    module = importlib.import_module(PACKAGES[package])
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)]
    theirs = {one for one in found if one.__module__.startswith(module.__name__.split(".")[0])}
    return sorted((one for one in theirs if one.__name__ not in _TOO_SLOW), key=name_of)


def name_of(kind: type) -> str:
    """The name under which the package's data has a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def steps_alone(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a class steps on each parameter by itself, with its defaults and with every single other option."""
    first = joins(kind, {})
    return first is False and not any(joins(kind, options) for options in variants(kind))


def variants(kind: type[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    """The options of a class, one at a time, with other values than the default."""
    try:
        hints = typing.get_type_hints(kind.__init__)
    except Exception:  # noqa: BLE001  # names that only a type checker knows
        hints = {}
    options = inspect.signature(kind.__init__).parameters
    for name, parameter in sorted(options.items(), key=lambda one: "clip" not in one[0]):  # likely to combine them
        if name in _NO_OPTIONS or parameter.default is inspect.Parameter.empty:
            continue
        for value in _values(name, parameter.default, hints.get(name)):
            yield {name: value}


def _values(name: str, default: Any, hint: Any) -> list[Any]:
    if name in _VALUES:
        return _VALUES[name]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int | float):
        return [value for value in (0, 1, 0.5) if value != default]
    if isinstance(default, enum.Enum):
        return [value for value in type(default) if value is not default]
    literals = [value for one in (hint, *typing.get_args(hint)) for value in typing.get_args(one)]
    words = [value for value in literals if isinstance(value, str) and value != default]
    return words + ([True, 1, 0.5] if default is None else [])


def joins(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool | None:
    """Whether the class combines parameters, or sends anything; None if it cannot be tried."""
    found = [_joins(kind, options, with_closure) for with_closure in ((False,) if options else (False, True))]
    return True if True in found else False if False in found else None


def _joins(kind: type[torch.optim.Optimizer], options: dict[str, Any], with_closure: bool) -> bool | None:
    for shapes in (SHAPES, MATRICES):  # some take matrices only
        outcomes: list[Any] = []
        for times in LARGER[:2] if options else LARGER:
            try:
                outcomes.append(_after_steps(kind, options, with_closure, shapes, times))
            except CommunicationError:
                return True
            except Exception:  # noqa: BLE001  # an optimizer may raise anything, also for gradients that are too large
                continue
            if not _same(outcomes[0], outcomes[-1]):
                return True
        if len(outcomes) > 1:
            return False
    return None


def _after_steps(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], with_closure: bool, shapes: _Shapes, times: float
) -> list[Any]:
    """Other tensors after some steps in which one of each shape has had gradients of magnitude `times`, and settings.

    Raises:
        RuntimeError: if the steps show nothing, because tensors do not move or end as nan.
    """
    generator = torch.Generator().manual_seed(0)
    draws = torch.Generator().manual_seed(int(times))
    alike = [[nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(n)] for shape, n in shapes.items()]
    tensors = [one for some in alike for one in some]
    others = [one for some in alike for one in some[:1] + some[2:]]
    starts = {one: one.detach().clone() for one in tensors}
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    optimizer = _made(kind, tensors, options)
    if any(isinstance(one, torch.optim.Optimizer) for one in vars(optimizer).values()):
        raise RuntimeError("it steps through another optimizer, whose state would get plain tensors")

    def closure() -> torch.Tensor:
        for one in tensors:
            one.grad = starts[one].flip(0) + one.detach()
        for some in alike:
            some[1].grad = times * torch.randn(some[1].shape, generator=draws)
        return torch.ones((), requires_grad=True)

    with RefuseCommunication() if times == LARGER[0] else contextlib.nullcontext():
        for _ in range(STEPS // 2 if options else STEPS):
            closure()
            optimizer.step(*([closure] if with_closure else []))
    if any(torch.equal(one, starts[one]) or not one.isfinite().all() for one in others):
        raise RuntimeError("its steps leave tensors as they are, or make them infinite")
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return [*others, *settings, *(dict(optimizer.state.get(one, {})) for one in others)]


def _made(kind: type, tensors: list[nn.Parameter], options: dict[str, Any]) -> Any:
    options = {**_REQUIRED.get(kind.__name__, {}), **options}
    by_kind = [[one for one in tensors if one.ndim > 1], [one for one in tensors if one.ndim < 2]]
    groups = [{"params": some, "use_muon": number == 0} for number, some in enumerate(by_kind) if some]
    attempts: list[Callable[[], Any]] = [
        lambda: kind(tensors, lr=0.01, **options),
        lambda: kind(tensors, lr=0.01, momentum=0.9, **options),
        lambda: kind(tensors, **options),
        lambda: kind(groups, lr=0.01, **options),
    ]
    for attempt in attempts[:-1]:
        with contextlib.suppress(Exception):
            return attempt()
    return attempts[-1]()


class CommunicationError(Exception):
    """An optimizer has sent something."""


class RefuseCommunication(TorchDispatchMode):
    """Within this context nothing is sent."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in _COMMUNICATION:
            raise CommunicationError(str(func))
        return func(*args, **(kwargs or {}))


def _same(one: Any, other: Any) -> bool:
    """Whether two results hold the same numbers; values without numbers are not compared."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return not isinstance(one, float) or one == other or (one != one and other != other)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Two ranks, of which this process is one and the other does nothing; no compilation, no output."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def tried(package: str) -> dict[str, Any]:
    """The version of an installed package, and its classes that step on each parameter by itself."""
    with quiet():
        found = [name_of(kind) for kind in classes_of(package) if steps_alone(kind)]
    return {"version": version(package).split("+")[0], "classes": found}


if __name__ == "__main__":
    DATA.write_text(json.dumps({package: tried(package) for package in PACKAGES}, indent=1) + "\n")
