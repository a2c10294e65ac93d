"""The gradient that the sharded parameter shows while another gradient waits for its reduction.

Note [A gradient that waits]
After a backward without gradient sync the unsharded gradient stays with the unsharded parameter, which no optimizer
knows. Users zero, scale and read the gradients of sharded parameters nevertheless. So during that time the gradient of
the sharded parameter is a stand-in, a `WaitingGradient`. It shows a DTensor:

- the sharded gradient of an earlier backward with sync, if there is one;
- otherwise the waiting gradient, as a DTensor with Partial placements over its memory;
- zeros, if that does not fit: another dtype or device, tensor parallelism, or two gradients that wait.

The same is done for a sum over the shard group that waits for its all-reduce (HSDP); the stand-in is then Partial over
the replicas only. Zeroing and scaling a stand-in act on the shown tensor and on the waiting ones; adding acts on the
shown one. All other writes raise. If the stand-in is zeroed or removed before the next forward or backward, the waiting
gradients are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from shardkit.core.parameters.adapters import ParameterForm
from shardkit.core.parameters.lost_writes import check_gradient, mark_gradient
from shardkit.core.torch_compat import like_dtensor, local_of, new_dtensor, version_of

__all__ = ["StandIn", "WaitingGradient"]

_ZEROING = frozenset({"zero_", "_foreach_zero_"})
_SCALING = {"mul_": "mul_", "div_": "div_", "_foreach_mul_": "mul_", "_foreach_div_": "div_"}
_ADDING = frozenset({"add_", "sub_", "_foreach_add_", "_foreach_sub_"})


class StandIn:
    """The stand-in of one parameter, if one of its gradients is waiting.

    Attributes:
        gradient: the stand-in; None if no gradient is waiting.
        is_made: whether the shown tensor was made for this, because the parameter has no other gradient; otherwise it
            is the sharded gradient of an earlier backward.
    """

    def __init__(self) -> None:
        self.gradient: WaitingGradient | None = None
        self.is_made = False
        self.fqn = ""
        self._waiting: tuple[torch.Tensor, ...] = ()
        self._zeroed = self._changed = False

    def put(
        self,
        fqn: str,
        sharded: DTensor,
        accumulated: torch.Tensor | None,
        partial: torch.Tensor | None,
        form: ParameterForm,
        shard: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """After each backward without sync: makes `sharded.grad` stand in for a waiting gradient.

        Args:
            fqn: FQN of the parameter.
            sharded: the sharded parameter.
            accumulated: the unsharded gradient, if one waits: of the unsharded parameter's shape; a DTensor with tensor
                parallelism.
            partial: the sum over the shard group, if one waits: of the shape of `shard`.
            form: form of the parameter.
            shard: the plain tensor inside `sharded`.
            dtype: dtype of the future gradient of `sharded`.
        """
        self.fqn = fqn
        self._waiting = tuple(one for one in (accumulated, partial) if one is not None)
        there = sharded.grad
        if there is not None and there is self.gradient and not self.gradient.is_pending_sum:
            return  # it goes on to stand in
        shown = None if there is self.gradient else there
        self.is_made = shown is None
        if shown is None and (accumulated is None or partial is None):
            shown = _as_partial(sharded, accumulated, partial, form, shard, dtype)
        if shown is None:
            shown = like_dtensor(form.local(torch.zeros(shard.shape, dtype=dtype, device=shard.device)), sharded)
        assert isinstance(shown, DTensor), fqn
        self.gradient = sharded.grad = WaitingGradient.over(shown, self)
        mark_gradient(self.gradient)
        self._zeroed = self._changed = False

    def was_zeroed(self, sharded: torch.Tensor, *, begun: bool) -> bool:
        """Whether the user has zeroed or removed the gradient of `sharded` since `put`.

        Args:
            sharded: the sharded parameter.
            begun: whether a backward has begun to add to the gradient that waits.

        Raises:
            RuntimeError: if another gradient or its data was assigned, if it was changed through another tensor, or if
                it was zeroed or removed after the backward had begun.
        """
        stand_in = self.gradient
        if stand_in is None:
            return False
        check_gradient(self.fqn, sharded.grad)
        if sharded.grad is None:
            return self._refuse_if(begun)
        if sharded.grad is not stand_in or not isinstance(stand_in, WaitingGradient):  # its contents can be swapped
            raise RuntimeError(
                f"the gradient of parameter '{self.fqn}' was assigned while another gradient of it waits for its "
                "reduction; assign gradients after the last backward of a step, which is one with gradient sync, or "
                "remove them by zero_grad()"
            )
        if not stand_in.is_pending_sum and _versions(stand_in.shown) != stand_in.versions:
            raise RuntimeError(
                f"the gradient of parameter '{self.fqn}' was changed through its local tensor, or through a tensor "
                "taken from it before, while another gradient of it waits for its reduction; change `parameter.grad` "
                "itself, or change it after the last backward of a step, which is one with gradient sync"
            )
        return self._zeroed and self._refuse_if(begun)

    def _refuse_if(self, begun: bool) -> bool:
        if begun:
            raise RuntimeError(
                f"the gradient of parameter '{self.fqn}' was zeroed or removed during a backward that had begun to add "
                "to it, and gradients of earlier backwards are in that sum; call zero_grad() before or after a backward"
            )
        return True

    def dismiss(self, sharded: torch.Tensor) -> None:
        """Removes the stand-in: no gradient is waiting any more. A change by the user stays."""
        stand_in = self.gradient
        if isinstance(stand_in, WaitingGradient) and sharded.grad is stand_in:
            sharded.grad = None
            if not stand_in.is_pending_sum and (self._changed or self._zeroed or not self.is_made):
                sharded.grad = stand_in.shown
            elif self._zeroed:
                zeros = torch.zeros_like(local_of(sharded), dtype=stand_in.dtype)
                sharded.grad = like_dtensor(zeros, sharded)
            if self.is_made and sharded.grad is not None:
                mark_gradient(sharded.grad)
        self.gradient, self._waiting = None, ()
        self.is_made = False

    def zero(self) -> None:
        """The user zeroes the stand-in."""
        self._zeroed = True
        for one in self._written():
            one.zero_()

    def scale(self, operator: str, factor: Any) -> None:
        """The user multiplies the stand-in by a number (`mul_`) or divides it (`div_`)."""
        for one in self._written():
            getattr(one, operator)(factor.to(one.device) if isinstance(factor, torch.Tensor) else factor)

    def note_change(self) -> None:
        """The user has added something to the shown tensor."""
        self._changed = True

    def _written(self) -> Iterator[torch.Tensor]:
        assert self.gradient is not None, self.fqn
        shown = self.gradient.shown
        if not self.gradient.is_pending_sum or local_of(shown).data_ptr() != self._waiting[0].data_ptr():
            yield shown
        yield from self._waiting


class WaitingGradient(DTensor):
    """The gradient of a sharded parameter while another one waits. See Note [A gradient that waits].

    Operators run on `shown`. Views of this tensor, and `detach()`, are of this class too. When nothing waits any more,
    it is another reference to `shown`.

    Attributes:
        shown: the tensor for readers, with the same local tensor.
        versions: the version counters of `shown` and its local tensor, which operators on this one do not change.
    """

    shown: DTensor
    versions: tuple[int, int]
    _stand_in: weakref.ref[StandIn]  # a strong one would make a circle with the sharded parameter's gradient
    _whole: WaitingGradient | None  # if this is a view: the tensor below it

    @staticmethod
    def over(shown: DTensor, stand_in: StandIn) -> WaitingGradient:
        """A stand-in that shows `shown`."""
        made = like_dtensor(local_of(shown), shown, WaitingGradient)
        assert isinstance(made, WaitingGradient)
        made.shown, made.versions = shown, _versions(shown)
        made._stand_in, made._whole = weakref.ref(stand_in), None
        return made

    @property
    def is_pending_sum(self) -> bool:
        """Whether it shows the waiting gradient itself, over the same memory."""
        return any(placement.is_partial() for placement in self.shown.placements)

    @property
    def _root(self) -> WaitingGradient:
        return self if self._whole is None else self._whole

    @property
    def active(self) -> StandIn | None:
        """The state of the gradients that wait; None if they wait no more."""
        stand_in = self._stand_in()
        return stand_in if stand_in is not None and stand_in.gradient is self._root else None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function that is called like this one
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        written = [*_written(func, args, kwargs)]
        waiting = [one for one in written if isinstance(one, WaitingGradient) and one.active is not None]
        if waiting and (name in _ZEROING or (name == "fill_" and _is_zero(args[1]))):
            for one in written:
                _zero(one)
            return None if name.startswith("_") else args[0]
        if waiting and name in _SCALING and (factors := _factors(args[1], len(written))) is not None:
            for one, factor in zip(written, factors, strict=True):
                _scale(one, _SCALING[name], factor)
            return None if name.startswith("_") else args[0]
        for one in waiting:
            if name not in _ADDING or one.is_a_part or one.is_pending_sum:
                raise _refusal(func, one)
        result = func(*_shown(args), **_shown(kwargs))
        for one in waiting:
            if (stand_in := one.active) is not None:
                stand_in.note_change()
        if written:
            return args[0] if name.endswith("_") and not name.startswith("_") else result
        if name == "_to_copy" and (stand_in := args[0]._stand_in()) is not None:
            return WaitingGradient.over(result, stand_in)  # swapped with the gradient if its module is cast or moved
        return _views(result, args[0]) if func.is_view else result

    @property
    def is_a_part(self) -> bool:
        """Whether it is a view of some elements only, such as a row."""
        return self._whole is not None and self.numel() != self._whole.numel()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, plain, on every rank of the mesh (collective)."""
        return self.shown.full_tensor(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Converts the shown tensor to other placements (collective)."""
        return self.shown.redistribute(device_mesh, placements, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied = memo[id(self)] = like_dtensor(local_of(self.shown).clone(), self.shown)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.shown.__reduce_ex__(protocol)


def _as_partial(
    sharded: DTensor,
    accumulated: torch.Tensor | None,
    partial: torch.Tensor | None,
    form: ParameterForm,
    shard: torch.Tensor,
    dtype: torch.dtype,
) -> DTensor | None:
    """The only gradient that waits as a Partial DTensor over its memory; None if it does not fit."""
    waiting = partial if accumulated is None else accumulated
    if waiting is None or isinstance(waiting, DTensor) or (waiting.dtype, waiting.device) != (dtype, shard.device):
        return None
    if accumulated is None and type(sharded) is not DTensor:
        return None
    sums = [accumulated is not None or placement.is_replicate() for placement in form.placements]
    places = [Partial("avg") if one else own for one, own in zip(sums, form.placements, strict=True)]
    return new_dtensor(waiting if accumulated is not None else form.local(waiting), form.mesh, places, form.shape)


def _versions(shown: DTensor) -> tuple[int, int]:
    return version_of(shown), version_of(local_of(shown))


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _factors(value: Any, count: int) -> list[Any] | None:
    """The numbers, or plain 0-dim tensors, by which each of `count` tensors is scaled; None for other operands."""
    factors = value if isinstance(value, list | tuple) else [value] * count
    if any(isinstance(one, torch.Tensor) and one.ndim for one in factors):
        return None
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in factors]


def _is_zero(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value == 0


def _zero(one: torch.Tensor) -> None:
    if isinstance(one, WaitingGradient):
        if (stand_in := one.active) is None:
            one.shown.zero_()
        elif one.is_a_part:
            raise _refusal("zeroing", one)
        else:
            stand_in.zero()
    else:
        one.zero_()


def _scale(one: torch.Tensor, operator: str, factor: Any) -> None:
    if isinstance(one, WaitingGradient) and (stand_in := one.active) is not None:
        if one.is_a_part:
            raise _refusal(operator, one)
        stand_in.scale(operator, factor)
    else:
        getattr(_shown(one), operator)(factor)


def _refusal(func: Any, gradient: WaitingGradient) -> RuntimeError:
    stand_in = gradient.active
    assert stand_in is not None
    part = f" of {tuple(gradient.shape)} elements" if gradient.is_a_part else ""
    waits = "a gradient" if gradient.is_pending_sum else "another gradient"
    return RuntimeError(
        f"{func} writes to the gradient of parameter '{stand_in.fqn}'{part} while {waits} of it waits for its "
        "reduction; until then, zero a whole gradient or multiply it by a number. Do the rest after the last backward "
        "of a step, which is one with gradient sync"
    )


def _shown(value: Any) -> Any:
    """Arguments with the shown tensors in place of stand-ins."""
    if isinstance(value, WaitingGradient):
        return value.shown
    if isinstance(value, list | tuple):
        return type(value)(map(_shown, value))
    if isinstance(value, dict):
        return {key: _shown(one) for key, one in value.items()}
    return value


def _views(result: Any, of: WaitingGradient) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_views(one, of) for one in result)
    stand_in = of.active
    if stand_in is None or not isinstance(result, DTensor):
        return result
    view = WaitingGradient.over(result, stand_in)
    view._whole = of._root
    return view
