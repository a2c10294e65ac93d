"""The gradient that the sharded parameter shows while another gradient waits for its reduction.

Note [A gradient that waits]
After a backward without gradient sync the unsharded gradient stays with the unsharded parameter, which no optimizer
knows. Users zero, scale and read the gradients of sharded parameters nevertheless. So during that time the gradient of
the sharded parameter is a stand-in, a `WaitingGradient`. It shows a DTensor:

- the sharded gradient of an earlier backward with sync, if there is one;
- otherwise the waiting gradient, as a DTensor with Partial placements over its memory;
- zeros, if that does not fit: another dtype or device, tensor parallelism, two gradients that wait, or a divide factor
  that makes the gradient neither the mean over ranks nor the sum.

The same is done for a sum over the shard group that waits for its all-reduce (HSDP); the stand-in is then Partial over
the replicas only. Zeroing and scaling a stand-in act on the shown tensor and on the waiting ones; adding acts on the
shown one, in place of a pending sum on zeros. Other writes raise, by operators at once and to local tensors at the next
forward or backward, as far as version counters tell. If the stand-in is zeroed or removed before the next forward or
backward, the waiting gradients are dropped.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from shardkit.core.parameters.adapters import ParameterForm
from shardkit.core.parameters.lost_writes import check_gradient, lost_summand, mark_gradient
from shardkit.core.torch_compat import lies_like, like_dtensor, local_of, new_dtensor, version_of

__all__ = ["StandIn", "WaitingGradient", "refuse_waiting"]

_ZEROING = frozenset({"zero_", "_foreach_zero_"})
_SCALING = {"mul_": "mul_", "div_": "div_", "_foreach_mul_": "mul_", "_foreach_div_": "div_"}
_ADDING = frozenset({"add_", "sub_", "_foreach_add_", "_foreach_sub_"})
# Operators whose results have all elements of the tensor.
_WHOLE_VIEWS = frozenset({"alias", "detach", "permute", "t", "transpose", "view"})


class StandIn:
    """The stand-in of one parameter, if one of its gradients is waiting.

    Attributes:
        gradient: the stand-in; None if no gradient is waiting.
        is_made: whether the shown tensor was made for this, because the parameter has no other gradient; otherwise it
            is the sharded gradient of an earlier backward.
        fqn: FQN of the parameter.
        partial_op: "avg" if the gradient is the mean over ranks of the one that waits, "sum" for the sum, else None.
    """

    def __init__(self) -> None:
        self.gradient: WaitingGradient | None = None
        self.is_made = False
        self.fqn = ""
        self.partial_op: str | None = None
        self._waiting: tuple[torch.Tensor, ...] = ()
        self._zeros: Callable[[torch.dtype], DTensor]
        self._watched: list[tuple[torch.Tensor, int]] = []
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

        Raises:
            RuntimeError: if the user has assigned a gradient that does not lie like the parameter.
        """
        self.fqn = fqn
        before, self._waiting = self._waiting, tuple(one for one in (accumulated, partial) if one is not None)
        there, own, op = sharded.grad, self._intact, self.partial_op
        if own is not None and own is there:
            is_same = [*map(id, before)] == [*map(id, self._waiting)]
            if not own.is_pending or (is_same and op is not None and Partial(op) in own.shown.placements):
                return  # it goes on to stand in
        shown = None if own is not None and own is there else there
        if shown is not None and not lies_like(shown, sharded):
            raise lost_summand(fqn, shown, sharded)
        like = like_dtensor(torch.empty(0, dtype=sharded.dtype), sharded)  # holds no memory and no parameter

        def zeros(dtype: torch.dtype = dtype) -> DTensor:
            with torch.inference_mode(mode=False):  # later backwards add to them
                return like_dtensor(form.local(torch.zeros(shard.shape, dtype=dtype, device=shard.device)), like)

        self.is_made, pending, self._zeros = shown is None, False, zeros
        if shown is None and op is not None and (partial is None or accumulated is None):
            shown = _as_partial(sharded, accumulated, partial, form, shard, dtype, op)
            pending = shown is not None
        if shown is None:
            shown = zeros()
        self.gradient = sharded.grad = WaitingGradient.over(cast(DTensor, shown), self)
        self.gradient.is_pending = pending
        mark_gradient(self.gradient)
        self._watched = [(one, version_of(one)) for one in (shown, local_of(shown))]
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
        if self.gradient is None:
            return False
        check_gradient(self.fqn, sharded.grad)
        own = self._intact
        if sharded.grad is not None and sharded.grad is not own:
            raise RuntimeError(
                f"the gradient of parameter '{self.fqn}' was assigned while another gradient of it waits for its "
                "reduction; assign gradients after the last backward of a step, which is one with gradient sync, or "
                "remove them by zero_grad()"
            )
        if own is not None:
            self._refuse_hidden_writes()
        zeroed = sharded.grad is None or self._zeroed
        if zeroed and begun:
            raise RuntimeError(
                f"the gradient of parameter '{self.fqn}' was zeroed or removed during a backward that had begun to add "
                "to it, and gradients of earlier backwards are in that sum; call zero_grad() before or after a backward"
            )
        return zeroed

    def dismiss(self, sharded: torch.Tensor) -> None:
        """Removes the stand-in: no gradient is waiting any more. A change by the user stays."""
        if self.gradient is None and not self._waiting:
            return
        own = self._intact
        if own is not None and sharded.grad is own:
            sharded.grad = None
            if not self.is_made or self._changed or self._zeroed:
                sharded.grad = own.shown
            if self.is_made and sharded.grad is not None:
                mark_gradient(sharded.grad)
        if own is not None:
            own.is_over = sharded.grad is not own.shown
        self.gradient, self._waiting, self._watched = None, (), []
        self.is_made = False

    def zero(self) -> None:
        """The user zeroes the stand-in. Reductions may be adding to the waiting gradients, which are not written to."""
        self._zeroed, self._waiting = True, ()
        self._without_sum().zero_()

    def scale(self, operator: str, factor: Any) -> None:
        """The user multiplies the stand-in by a number (`mul_`) or divides it (`div_`)."""
        for one in self._all():
            getattr(one, operator)(factor.to(one.device) if isinstance(factor, torch.Tensor) else factor)

    def prepare_to_add(self) -> None:
        """The user is going to add something to the shown tensor, which is zeros in place of a pending sum."""
        self._without_sum()
        self._changed = True

    def watch(self, local: torch.Tensor) -> None:
        """A view of the shown tensor has a local tensor of its own, with another version counter."""
        self._watched.append((local, version_of(local)))

    @property
    def _intact(self) -> WaitingGradient | None:
        """The stand-in, unless `module.to_empty()` and its like have swapped its contents for another tensor's."""
        return self.gradient if isinstance(self.gradient, WaitingGradient) else None

    def _without_sum(self) -> DTensor:
        """The shown tensor, which is zeros from now on if it was a pending sum."""
        own = self._intact
        assert own is not None, self.fqn
        if _is_partial(own.shown):
            own.show(self._zeros(own.dtype))
            own.is_pending = False
            self._watched = [(one, version_of(one)) for one in (own.shown, local_of(own.shown))]
        return own.shown

    def _all(self) -> Iterator[torch.Tensor]:
        own = self._intact
        assert own is not None, self.fqn
        if not own.is_pending:
            yield own.shown
        yield from self._waiting

    def _refuse_hidden_writes(self) -> None:
        if any(version_of(one) != version for one, version in self._watched):
            raise RuntimeError(
                f"the gradient of parameter '{self.fqn}' was changed through its local tensor, or through a tensor "
                "taken from it before, while another gradient of it waits for its reduction; change `parameter.grad` "
                "itself, or change it after the last backward of a step, which is one with gradient sync"
            )


class WaitingGradient(DTensor):
    """The gradient of a sharded parameter while another one waits. See Note [A gradient that waits].

    Operators run on `shown`. Views of this tensor, and `detach()`, are of this class too.

    Attributes:
        shown: the tensor for readers, with the same local tensor.
        is_pending: whether that is over the memory of the waiting gradient.
        is_part: whether this is a view that may lack some elements, such as a row.
        is_over: whether this stood in for gradients that have been reduced or dropped since, and shows nothing now.
        is_traced: whether this is a symbol of torch.compile.
    """

    shown: DTensor
    is_pending: bool
    is_part: bool
    is_over: bool
    is_traced: bool
    _stand_in: weakref.ref[StandIn]  # a strong one would make a circle with the sharded parameter's gradient
    _whole: WaitingGradient | None  # if this is a view: the tensor below it

    @staticmethod
    def over(shown: DTensor, stand_in: StandIn) -> WaitingGradient:
        """A stand-in that shows `shown`."""
        made = cast(WaitingGradient, like_dtensor(local_of(shown), shown, WaitingGradient))
        made.shown, made._stand_in, made._whole = shown, weakref.ref(stand_in), None
        made.is_pending = made.is_part = made.is_over = made.is_traced = False
        return made

    def show(self, shown: DTensor) -> None:
        """Shows another tensor of the same shape."""
        self.shown, self._spec, self._local_tensor = shown, shown._spec, shown._local_tensor

    @property
    def active(self) -> StandIn | None:
        """The state of the gradients that wait; None if they wait no more."""
        stand_in = self._stand_in()
        return stand_in if stand_in is not None and stand_in.gradient is self._root else None

    @property
    def is_view_of_sum(self) -> bool:
        """Whether this is a view of a pending sum, to which nothing can be added."""
        return self._whole is not None and _is_partial(self.shown)

    @property
    def _root(self) -> WaitingGradient:
        return self if self._whole is None else self._whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a C function that is called like this one
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1]
        given = [*_stand_ins((args, kwargs))]
        for one in given:
            one.refuse_if_over(func)
        targets = [*_targets(func, args, kwargs)]
        waiting = [one for one in targets if isinstance(one, WaitingGradient) and one.active is not None]
        kind = _kind_of_write(name, args, kwargs)
        for one in waiting:
            if kind is None or one.is_part or (kind == "add" and one.is_view_of_sum):
                raise _refusal(func, one)
        if waiting and kind == "zero":
            for one in targets:
                _write(one, "zero_")
        elif waiting and kind == "scale":
            for one, factor in zip(targets, _factors(args[1], len(targets)), strict=True):
                _write(one, _SCALING[name], factor)
        else:
            for one in waiting:
                cast(StandIn, one.active).prepare_to_add()
            result = func(*_shown(args), **_shown(kwargs))
            for one in targets:
                _note_late_write(one)
            if not targets:
                return _wrapped(func, name, result, given)
            if not name.endswith("_") or name.startswith("_"):
                return result
        return None if name.startswith("_") else args[0]

    def refuse_if_over(self, func: Any) -> None:
        """Raises RuntimeError if this stood in for gradients that have been reduced or dropped since."""
        stand_in = self._stand_in()
        if self._root.is_over:
            raise RuntimeError(
                f"{func} uses a gradient of parameter '{'' if stand_in is None else stand_in.fqn}' that was read while "
                "it waited for its reduction, which is over; read `parameter.grad` again"
            )

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, plain, on every rank of the mesh (collective)."""
        self.refuse_if_over("full_tensor()")
        _warn_of_part([self])
        return self.shown.full_tensor(grad_placements=grad_placements)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Converts the shown tensor to other placements (collective)."""
        self.refuse_if_over("redistribute()")
        _warn_of_part([self])
        return self.shown.redistribute(device_mesh, placements, **options)

    @staticmethod
    def __tensor_unflatten__(*parts: Any) -> WaitingGradient:
        """For torch.compile, whose graphs may only read: they see the local tensor of the shown one."""
        traced = WaitingGradient.over(DTensor.__tensor_unflatten__(*parts), StandIn())
        traced.is_traced = True
        return traced

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copied = memo[id(self)] = like_dtensor(local_of(self.shown).clone(), self.shown)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.shown.__reduce_ex__(protocol)


def refuse_waiting(name: str, gradient: torch.Tensor | None) -> None:
    """Raises RuntimeError if a part of the gradient of parameter `name` waits for its reduction."""
    if isinstance(gradient, WaitingGradient) and gradient.active is not None:
        raise RuntimeError(
            f"the gradient of parameter '{name}' was left unreduced by a backward without gradient sync, or without "
            "all-reduce; run a backward with both first"
        )


def _as_partial(
    sharded: DTensor,
    accumulated: torch.Tensor | None,
    partial: torch.Tensor | None,
    form: ParameterForm,
    shard: torch.Tensor,
    dtype: torch.dtype,
    op: str,
) -> DTensor | None:
    """The only gradient that waits as a Partial DTensor over its memory; None if it does not fit."""
    waiting = partial if accumulated is None else accumulated
    if waiting is None or isinstance(waiting, DTensor) or (waiting.dtype, waiting.device) != (dtype, shard.device):
        return None
    if accumulated is None and type(sharded) is not DTensor:
        return None
    sums = [accumulated is not None or placement.is_replicate() for placement in form.placements]
    places = [Partial(op) if one else own for one, own in zip(sums, form.placements, strict=True)]
    waiting = waiting.data  # its own version counter, which our additions to the sum do not change
    return new_dtensor(waiting if accumulated is not None else form.local(waiting), form.mesh, places, form.shape)


def _is_partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


# -- operators ---------------------------------------------------------------------------------------------------------


def _stand_ins(value: Any) -> Iterator[WaitingGradient]:
    if isinstance(value, WaitingGradient):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _stand_ins(one)


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _kind_of_write(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Whether an operator zeroes, scales or adds to its first argument; None if it does something else."""
    if name in _ZEROING or (name == "fill_" and _is_zero(args[1])):
        return "zero"
    if name in _SCALING and not kwargs:
        factors = args[1] if isinstance(args[1], list | tuple) else [args[1]]
        return None if any(isinstance(one, torch.Tensor) and one.ndim for one in factors) else "scale"
    if name in _ADDING and all(one.active is None for one in _stand_ins((args[1:], kwargs))):
        return "add"
    return None


def _is_zero(value: Any) -> bool:
    plain = not isinstance(value, torch.Tensor) or (value.device.type == "cpu" and type(value) is torch.Tensor)
    return plain and bool(value == 0)


def _factors(value: Any, count: int) -> list[Any]:
    """The numbers, or plain 0-dim tensors, by which each of `count` tensors is scaled."""
    if isinstance(value, list | tuple):
        return [one.full_tensor() if isinstance(one, DTensor) else one for one in value]
    return [value.full_tensor() if isinstance(value, DTensor) else value] * count


def _write(one: torch.Tensor, operator: str, *factor: Any) -> None:
    """Zeroes or scales a tensor, and if it stands in for others, those as well."""
    stand_in = one.active if isinstance(one, WaitingGradient) else None
    if stand_in is None:
        getattr(_shown(one), operator)(*factor)
        _note_late_write(one)
    elif operator == "zero_":
        stand_in.zero()
    else:
        stand_in.scale(operator, *factor)


def _note_late_write(one: torch.Tensor) -> None:
    """Counts a write through a former stand-in, for the checks of a later one that shows the same tensor."""
    if isinstance(one, WaitingGradient) and one.active is None:
        if one.is_traced:
            raise RuntimeError(
                "compiled code writes to a gradient that waits for its reduction; use eager mode, or write to it after "
                "the last backward of a step, which is one with gradient sync"
            )
        increment_version(local_of(one.shown))


def _wrapped(func: Any, name: str, result: Any, given: Sequence[WaitingGradient]) -> Any:
    """The result of an operator that does not write. Views are stand-ins as well, with a local tensor of their own."""
    (of,) = given[:1]
    stand_in = of._stand_in()
    if name == "_to_copy" and stand_in is not None:
        return WaitingGradient.over(result, stand_in)  # swapped with the gradient if its module is cast or moved
    if not func.is_view:
        _warn_of_part(given)
    elif of.active is not None and stand_in is not None:
        if isinstance(result, list | tuple):
            return type(result)(_view(one, name, of, stand_in) for one in result)
        return _view(result, name, of, stand_in)
    return result


def _view(result: Any, name: str, of: WaitingGradient, stand_in: StandIn) -> Any:
    if not isinstance(result, DTensor):
        return result
    view = WaitingGradient.over(result, stand_in)
    view._whole, view.is_part = of._root, of.is_part or name not in _WHOLE_VIEWS
    stand_in.watch(local_of(result))
    return view


def _shown(value: Any) -> Any:
    """Arguments with the shown tensors in place of stand-ins."""
    if isinstance(value, WaitingGradient):
        return value.shown
    if isinstance(value, list | tuple):
        return type(value)(map(_shown, value))
    if isinstance(value, dict):
        return {key: _shown(one) for key, one in value.items()}
    return value


def _refusal(func: Any, gradient: WaitingGradient) -> RuntimeError:
    stand_in = gradient._stand_in()
    part = f" of {tuple(gradient.shape)} elements" if gradient.is_part else ""
    return RuntimeError(
        f"{func} writes to the gradient of parameter '{'' if stand_in is None else stand_in.fqn}'{part} while a "
        "gradient of it waits for its reduction; until then, zero a whole gradient, multiply it by a number or add to "
        "it. Do the rest after the last backward of a step, which is one with gradient sync"
    )


def _warn_of_part(given: Sequence[WaitingGradient]) -> None:
    for one in given:
        if one.active is not None and not one._root.is_pending:
            _warn_once()


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "a gradient was read of which a part waits for its reduction, and the values lack that part; read gradients "
        "after the last backward of a step, which is one with gradient sync",
        stacklevel=2,
    )
