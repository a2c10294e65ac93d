"""Tests on small tensors whether an optimizer steps on each parameter separately, before it steps on owned ones.

Note [Tried on small tensors]
On `Owned` an optimizer sees only the matrices of one rank. If it computes a number from all of its parameters (a norm
for clipping, a step size, the direction of a line search), or communicates, its result would be wrong, and nothing in
its class shows this. So a copy of the optimizer with the same settings steps on small tensors, twice, and the second
time one tensor of each shape gets other gradients. If the results of other tensors differ, or if anything is sent, the
optimizer is refused. Each parameter group has three tensors like its largest parameter, and two like each of the next
most common shapes: equal sizes stay equal, and a larger size larger. An optimizer that cannot be tried is refused too,
unless its user vouches for it by the attribute `steps_each_parameter_alone`. Changed settings cause another trial. The
state of the process's random generators is restored.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardkit.core.torch_compat import TorchDispatchMode, is_without_numbers, local_of, without_global_step_hooks

__all__ = ["joins_parameters", "settings_of"]

_STEPS = 12  # more than the usual intervals at which optimizers refresh cached values
_KEPT = 8  # sizes up to this stay as they are
_SHAPES = 3  # shapes per parameter group, besides that of its largest parameter
_LARGER = 1e3  # how much larger the other gradients are: enough to be clipped
_HUGE = 1e8  # enough for bounds that few gradients exceed; not every optimizer can compute with them
_LEAST_LR = 0.01  # a warm-up may begin at 0, and then no parameter moves
_SCHEDULED = ("lr", "initial_lr", "betas", "momentum", "weight_decay")
_COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")


def joins_parameters(optimizer: torch.optim.Optimizer, with_closure: bool, *, again: bool = False) -> str | None:
    """The reason why a step on one rank's parameters would be wrong, as the end of a sentence; None if it is right.

    With `again` it was right with other settings. A trial that fails is then ignored: state may have other sizes.

    Not collective; all ranks get the same answer. See Note [Tried on small tensors].
    """
    groups = optimizer.param_groups
    params = [parameter for group in groups for parameter in group["params"]]
    sums_over_ranks = all(group.get("fsdp_in_use") for group in groups)  # Prodigy
    vouched = sums_over_ranks or getattr(optimizer, "steps_each_parameter_alone", False)
    if vouched or any(map(is_without_numbers, params)):
        return None
    inner = next((one for one in vars(optimizer).values() if isinstance(one, torch.optim.Optimizer)), None)
    if inner is not None and {id(one) for group in inner.param_groups for one in group["params"]} & set(
        map(id, params)
    ):
        return f"steps through another optimizer ({type(inner).__name__}), whose state would get plain tensors"
    failure = ""
    for resumed in (True, False):  # its state may have other sizes than that of small tensors
        try:
            one, other = (_neighbours_after_steps(optimizer, with_closure, times, resumed) for times in (1, _LARGER))
            if not _same(one, other) or not _same(one, _after_huge_gradients(optimizer, with_closure, resumed, one)):
                return "uses other parameters' gradients in a parameter's step"
            return None
        except _CommunicationError as sent:
            return f"communicates in its step ({sent})"
        except Exception as error:  # noqa: BLE001  # an optimizer may raise anything
            failure = failure or f"{type(error).__name__}: {error!s:.200}"
    if again:
        return None
    return f"could not be tried on small tensors ({failure}), and may compute a step from more than one parameter"


def settings_of(optimizer: torch.optim.Optimizer, *, exact: bool) -> tuple[Any, ...]:
    """Settings that an optimizer's steps may depend on: if they change, another trial is due.

    Args:
        optimizer: its parameter groups and attributes are read.
        exact: whether numbers are compared by value. If not, and always for values that schedulers change, only whether
            they are zero is compared. Numeric attributes are compared unless they are integers, which count steps.
    """
    groups = tuple(
        tuple((key, _look(group[key], exact and key not in _SCHEDULED)) for key in optimizer.defaults if key in group)
        for group in optimizer.param_groups
    )
    attributes = ((key, one) for key, one in vars(optimizer).items() if not key.startswith("_"))
    return groups, tuple((key, _look(one, exact=False)) for key, one in attributes if type(one) is not int)


def _look(value: Any, exact: bool) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value if exact else value != 0
    return tuple(_look(one, exact) for one in value) if type(value) is tuple else None


def _after_huge_gradients(
    optimizer: torch.optim.Optimizer, with_closure: bool, resumed: bool, otherwise: list[Any]
) -> list[Any]:
    try:
        return _neighbours_after_steps(optimizer, with_closure, _HUGE, resumed)
    except Exception:  # noqa: BLE001  # the tensor in the middle has ended as nan, perhaps
        return otherwise


class _CommunicationError(Exception):
    pass


class _RefuseCommunication(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in _COMMUNICATION:
            raise _CommunicationError(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _apart(params: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restores random numbers at the end, so that every trial uses the same. Disables compilation and hooks."""
    numpy = sys.modules.get("numpy")
    numbers, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    devices = {one.device for one in params if one.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    try:
        with (
            torch.random.fork_rng(devices, device_type=kind),
            torch.compiler.set_stance("force_eager"),
            without_global_step_hooks(),
            _RefuseCommunication(),
        ):
            yield
    finally:
        random.setstate(numbers)
        if numpy:
            numpy.random.set_state(of_numpy)


def _neighbours_after_steps(
    optimizer: torch.optim.Optimizer, with_closure: bool, times: float, resumed: bool
) -> list[Any]:
    """First and third tensor of each shape after some steps, with their state, and the groups' settings.

    The second tensors get random gradients of magnitude `times`.

    Raises:
        RuntimeError: if the steps show nothing, because tensors do not move or end as nan.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    small = _small_groups(optimizer, generator)
    alike = [tensors for group in small for tensors in group.values()]
    begun = [[one.detach().clone() for one in tensors] for tensors in alike]
    trial = _copy_for(optimizer, small, resumed)
    others = torch.Generator("cpu").manual_seed(int(times))

    def closure() -> torch.Tensor:
        for tensors, first in zip(alike, begun, strict=True):
            for one, start in zip(tensors, first, strict=True):
                one.grad = start.flip(0) + one.detach()
            for one in tensors[1:2]:
                gradient = times * torch.randn(one.shape, generator=others, device="cpu")
                one.grad = gradient.to(one.device, one.dtype)
        return torch.ones(())

    step: Callable[..., Any] = trial.step
    with _apart([one for tensors in alike for one in tensors]):
        for _ in range(_STEPS):
            closure()
            step(closure) if with_closure else step()
    neighbours = [one for tensors in alike for one in tensors[::2]]
    starts = [one for tensors in begun for one in tensors[::2]]
    if any(torch.equal(one, start) or not one.isfinite().all() for one, start in zip(neighbours, starts, strict=True)):
        raise RuntimeError("its steps leave tensors as they are, or make them infinite")
    settings = [{key: value for key, value in group.items() if key != "params"} for group in trial.param_groups]
    return [*neighbours, *settings, *(dict(trial.state.get(one, {})) for one in neighbours)]


def _same(one: Any, other: Any) -> bool:
    """Whether two results hold the same numbers; values without numbers are not compared."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return not isinstance(one, float) or one == other or (one != one and other != other)


_Small = dict[torch.Size, list[nn.Parameter]]
"""Small tensors by the shape of the parameters that they stand for, the largest parameter's first."""


def _small_groups(optimizer: torch.optim.Optimizer, generator: torch.Generator) -> list[_Small]:
    """Small tensors for each parameter group; dims of different sizes keep their order of size."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    larger = sorted({size for parameter in params for size in parameter.shape if size > _KEPT})
    sizes = {size: _KEPT + 2 * number for number, size in enumerate(larger, 1)}
    return [_small_tensors(group["params"], sizes, generator) for group in optimizer.param_groups]


def _small_tensors(params: Sequence[torch.Tensor], sizes: dict[int, int], generator: torch.Generator) -> _Small:
    counts = Counter(parameter.shape for parameter in params if parameter.numel())
    if not counts:
        return {}
    like = max(params, key=torch.Tensor.numel)
    others = [shape for shape, _ in counts.most_common() if shape != like.shape][:_SHAPES]
    local = local_of(like) if hasattr(like, "placements") else like
    found: _Small = {}
    for shape in (like.shape, *others):
        small = [sizes.get(size, size) for size in shape]
        numbers = [torch.randn(small, generator=generator, device="cpu") for _ in range(3 if not found else 2)]
        found[shape] = [nn.Parameter(one.to(local.device, local.dtype)) for one in numbers]
    return found


def _copy_for(optimizer: torch.optim.Optimizer, small: Sequence[_Small], resumed: bool) -> torch.optim.Optimizer:
    """A copy for other parameters with the same settings. Copies all attributes; `Optimizer` itself copies only some.

    With `resumed` it keeps the counts, and gets zeros in place of state of a parameter's shape, or ones if that is a
    mask.
    """
    memo: dict[int, Any] = {}
    for group, by_shape in zip(optimizer.param_groups, small, strict=True):
        memo[id(group["params"])] = [one for tensors in by_shape.values() for one in tensors]
        left = {shape: list(tensors) for shape, tensors in by_shape.items()}
        for parameter in group["params"]:
            tensors = left.get(parameter.shape) or next(iter(left.values()), [parameter])
            memo[id(parameter)] = tensors.pop(0) if len(tensors) > 1 else tensors[0]
    trial: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = trial
    memo[id(optimizer.state)] = _small_state(optimizer, memo) if resumed else defaultdict(dict)
    for key, value in vars(optimizer).items():
        if key.endswith("_hooks"):
            setattr(trial, key, type(value)())
        elif key != "step":  # a scheduler's or our wrapper around it
            setattr(trial, key, copy.deepcopy(value, memo))
    for group in trial.param_groups:
        if group.get("lr") is not None and group["lr"] < _LEAST_LR:
            group["lr"] = group["lr"] * 0 + _LEAST_LR
        for key in () if resumed else [key for key, value in group.items() if type(value) is int]:
            if key not in optimizer.defaults:
                del group[key]
    return trial


def _small_state(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> defaultdict[Any, Any]:
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, values in optimizer.state.items():
        small = memo.get(id(key))
        if small is not None:
            state[small] = {name: _small_value(value, key, small, memo) for name, value in values.items()}
        elif not isinstance(key, torch.Tensor):  # some keep state for all parameters together
            state[key] = copy.deepcopy(values, memo)
    return state


def _small_value(value: Any, parameter: torch.Tensor, small: torch.Tensor, memo: dict[int, Any]) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return copy.deepcopy(value, memo)
    return torch.full_like(small, value.dtype is torch.bool, dtype=value.dtype)
