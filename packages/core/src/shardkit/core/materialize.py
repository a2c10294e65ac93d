"""`materialize`: memory and initial values for a model that was built on the meta device and then sharded.

Note [Marked memory]
Fresh memory is filled with NaN, or whole numbers of two and more bytes with one that no model uses: an element that
still has it was not written. Numbers of one byte are zeros, and count as written if an initialiser has run.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.engine.step import state_of
from shardkit.core.parameters.param import user_attributes
from shardkit.core.parameters.region import region_of
from shardkit.core.torch_compat import apply_to_tensors, like_dtensor, local_of


def materialize(
    module: nn.Module, *, device: torch.device | str | None = None, init: Callable[[nn.Module], object] | None = None
) -> None:
    """Allocates every parameter and buffer on the meta device and initialises it. Call it after `fully_shard`.

    Each submodule that owns a tensor on the meta device has its `reset_parameters()` called, or `_reset_parameters()`,
    the name in `nn.MultiheadAttention`. Submodules come before the module that holds them, in order of registration. A
    tensor that was not fully overwritten, often a non-persistent buffer, is an error; numbers of one byte, such as
    bool, begin as zeros. Other tensors stay, unless the `reset_parameters()` of their submodule writes to them.

    An initialiser sees whole plain tensors: each parameter is allocated, or gathered, when it is first read, and this
    rank keeps its part when the initialiser returns. So the values equal, bit for bit, those of the unsharded model on
    the same device, on any number of ranks and with any placement. Random values come from torch's default generators;
    all ranks need the same seed. The memory for it is that of the largest submodule that one initialiser writes.

    Collective over the meshes of the model where an initialiser writes what another one has initialised.

    Args:
        module: the outermost module.
        device: device of the sharded parameters; by default that of their mesh, or the CPU under `CPUOffloadPolicy`.
            Plain parameters and buffers go to the mesh's device, or to `device` if there is no mesh.
        init: called with each such submodule in place of its `reset_parameters()`; its parameters are whole.

    Raises:
        RuntimeError: if parameters or buffers were left uninitialised, also where an initialiser wrote to a sharded
            tensor that it did not get from its module; the message has their FQNs. If an initialiser replaces a
            parameter by one of another shape.
    """
    slots = [slot for slot in _slots(module) if slot.tensor().is_meta]
    if not slots:
        return
    owners = {id(slot.owner) for slot in slots}
    allocate(module, lambda tensor: tensor.is_meta, device)
    tensors = {id(tensor): tensor for tensor in (slot.tensor() for slot in slots)}
    with torch.no_grad():
        for tensor in tensors.values():
            if not isinstance(tensor, DTensor):
                _mark(tensor)
        whole = _WholeTensors({key for key, tensor in tensors.items() if isinstance(tensor, DTensor)})
        reached: set[int] = set()
        for submodule in _bottom_up(module, set()):
            if id(submodule) in owners and (initialise := init or _initialiser_of(submodule)) is not None:
                with whole.inside(submodule):
                    initialise(submodule)
                reached.update(map(id, submodule.modules()))
    left = []
    for slot in slots:
        tensor = slot.tensor()
        if whole.is_left(tensor) or (_mark_for(tensor.dtype) is None and id(slot.owner) not in reached):
            left.append(slot)
    if left:
        raise RuntimeError(_report(left, init))


def allocate(
    module: nn.Module, choose: Callable[[torch.Tensor], bool], device: torch.device | str | None = None
) -> None:
    """Allocates the tensors of a module that `choose` picks, uninitialised; `device` as for `materialize`.

    Tied parameters and buffers stay tied.
    """
    home_of = homes(module, device)

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=home_of(tensor)) if choose(tensor) else tensor

    ties: dict[int, list[_Slot]] = {}
    for slot in _slots(module):
        if not isinstance(tensor := slot.tensor(), DTensor) and choose(tensor):  # DTensors keep their identity
            ties.setdefault(id(tensor), []).append(slot)
    apply_to_tensors(module, replaced)
    for first, *others in ties.values():
        for slot in others:
            setattr(slot.owner, slot.name, first.tensor())


def homes(module: nn.Module, device: torch.device | str | None = None) -> Callable[[torch.Tensor], torch.device | str]:
    """The device for each parameter and buffer of a module; `device` as for `materialize`."""
    mesh_device = next((p.device_mesh.device_type for p in module.parameters() if isinstance(p, DTensor)), None)
    states = [state for submodule in module.modules() if (state := state_of(submodule)) is not None]
    params = [param for state in states for group in state.groups for param in group.params]
    offloaded = {id(param.sharded_param) for param in params if param.offload is not None}

    def home_of(tensor: torch.Tensor) -> torch.device | str:
        if not isinstance(tensor, DTensor):
            return mesh_device or device or torch.get_default_device()
        return device or ("cpu" if id(tensor) in offloaded else tensor.device_mesh.device_type)

    return home_of


@dataclass(frozen=True)
class _Slot:
    """One name of a submodule that holds a parameter or buffer."""

    fqn: str
    owner: nn.Module
    name: str

    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.name)
        return tensor


def _slots(module: nn.Module) -> Iterator[_Slot]:
    for prefix, owner in module.named_modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield _Slot(f"{prefix}.{name}" if prefix else name, owner, name)


def _bottom_up(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """Yields submodules before the module that holds them, each once: the order in which constructors initialise."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _bottom_up(child, seen)
    yield module


class _WholeTensors:
    """Shows initialisers whole plain tensors in place of sharded ones, and cuts them afterwards."""

    def __init__(self, unwritten: set[int]) -> None:
        self._unwritten = unwritten  # sharded tensors, by id
        self._whole: dict[int, torch.Tensor] = {}  # of the tensors that the running initialiser has read, by id

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Parameters at and below `module` are whole inside; unless it raises, the shards have their values then."""
        kept = [(submodule, submodule._parameters) for submodule in module.modules()]
        for submodule, parameters in kept:
            submodule.__dict__["_parameters"] = _Shown(parameters, self._shown)
        try:
            yield
            changed: dict[int, tuple[str, DTensor, torch.Tensor]] = {}
            for submodule, parameters in kept:
                for name, shown in submodule.__dict__["_parameters"].data.items():
                    if not isinstance(sharded := parameters.get(name), DTensor):
                        parameters[name] = shown
                    elif shown is not sharded:
                        changed[id(sharded)] = f"'{name}' of {type(submodule).__name__}", sharded, shown
            for one in changed.values():
                self._cut(*one)
        finally:
            for submodule, parameters in kept:
                submodule.__dict__["_parameters"] = parameters
            self._whole.clear()

    def _shown(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        if not isinstance(parameter, DTensor):
            return parameter
        if (whole := self._whole.get(id(parameter))) is None:
            local = local_of(parameter).detach()
            if id(parameter) in self._unwritten:
                values = _mark(torch.empty(parameter.shape, dtype=local.dtype, device=local.device))
            else:
                there = local.to(parameter.device_mesh.device_type)
                values = like_dtensor(there, parameter).full_tensor().to(local.device)
            whole = self._whole[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            whole.__dict__.update(user_attributes(parameter))
        return whole

    def _cut(self, name: str, sharded: DTensor, whole: torch.Tensor) -> None:
        if whole.shape != sharded.shape:
            raise RuntimeError(f"an initialiser made {name} {tuple(whole.shape)}; expected {tuple(sharded.shape)}")
        if not self.is_left(whole):
            self._unwritten.discard(id(sharded))
            if (part := region_of(name, sharded).take(whole)).numel():
                local_of(sharded).copy_(part)
            sharded.__dict__.update(user_attributes(whole))

    def is_left(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has elements that no initialiser has written."""
        if isinstance(tensor, DTensor):
            return tensor.is_meta or id(tensor) in self._unwritten
        mark = _mark_for(tensor.dtype)
        if tensor.is_meta or mark is None:
            return tensor.is_meta
        return bool((tensor.isnan() if math.isnan(mark) else tensor == mark).any())


def _mark_for(dtype: torch.dtype) -> float | None:
    if dtype.itemsize == 1:
        return None
    return math.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max - 1234


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(_mark_for(tensor.dtype) or 0)


class _Shown(UserDict[str, nn.Parameter | None]):
    """The parameters of a module, each passed through `show` when it is read."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], show: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self._show = show

    def __getitem__(self, name: str) -> nn.Parameter | None:
        self.data[name] = self._show(self.data[name])
        return self.data[name]


def _initialiser_of(submodule: nn.Module) -> Callable[[nn.Module], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(submodule, name, None)
        if callable(method):
            return lambda _: method()
    return None


def _report(left: list[_Slot], init: Callable[[nn.Module], object] | None) -> str:
    lines = []
    for slot in left:
        owner = type(slot.owner).__name__
        if init is not None:
            reason = f"init({owner}) did not write all of it"
        elif _initialiser_of(slot.owner) is None:
            reason = f"{owner} has no reset_parameters()"
        else:
            reason = f"reset_parameters() of {owner} did not write all of it"
        kind = "parameter" if slot.name in slot.owner._parameters else "buffer"
        lines.append(f"  {slot.fqn}: {kind} of shape {tuple(slot.tensor().shape)}; {reason}")
    return (
        f"tensors of the model are uninitialised memory after materialize() ({len(left)} of them):\n"
        + "\n".join(lines)
        + "\ngive each class a reset_parameters() that overwrites all of its parameters and buffers (also "
        "non-persistent ones), or pass init= to do so"
    )
