"""Places where modules hold parameters, and what their users change behind the engine's back.

Note [One sweep]
A user assigns parameters to modules, loads a state dict with `assign=True`, casts or moves the model, replaces the data
of a tensor, or writes to a parameter that is unsharded. One sweep finds all of it (`FSDPParamGroup.sweep`): over the
groups of a forward's modules when the outermost forward begins, over a module's own groups in its `unshard()`, and over
those that were cast, moved or loaded. Shards that fit are taken over; anything else is an error. Gathers check nothing
of this, but for writes that a DTensor counts, to a shard whose group is gathered for later use in that forward.

Note [Writes that would be lost]
`tensor.data = other` puts other storage under a tensor. A DTensor keeps its values in its local tensor, which does not
change, and an unsharded parameter is gathered into its original storage, so the write is lost. The storage of a DTensor
has no memory, but attributes: that of a sharded parameter or gradient is marked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.gradients import MARK
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.parameters.subclass_gather import HOOK
from shardkit.core.torch_compat import held_local, local_of, versions_of

# -- places in modules -------------------------------------------------------------------------------------------------


def register_unsharded(params: Iterable[FSDPParam]) -> None:
    """After a gather: puts unsharded parameters in place of the sharded ones, and makes missing ones."""
    for param in params:
        sharded, unsharded = param.sharded_param, param.unsharded_param
        if unsharded is None or param.shard.subclass is not None:
            unsharded = param.make_unsharded()
        param.required_grad = sharded.requires_grad
        if unsharded.requires_grad is not param.required_grad:
            unsharded.requires_grad_(param.required_grad)
            param.watch_direct_gradients()
        for slot in param.slots:
            if (module := slot.module()) is None:
                continue
            parameters = module._parameters  # no calls, `get` included: this runs for each parameter four times a step
            held = parameters[slot.name] if slot.name in parameters else None  # noqa: SIM401
            if held is sharded and slot.plain:
                parameters[slot.name] = unsharded
            elif held is sharded:
                slot.set(unsharded)
            elif held is not unsharded and held is not None:
                raise RuntimeError(
                    f"parameter '{param.fqn}' was replaced on its module since the forward of the outermost sharded "
                    "module began. Assign it before, and call torch.func.functional_call on that module"
                )


def register_sharded(params: Iterable[FSDPParam]) -> None:
    """Puts sharded parameters in place of unsharded ones, which may have been frozen, or trained again, meanwhile."""
    for param in params:
        sharded, unsharded = param.sharded_param, param.unsharded_param
        if unsharded is None:
            continue
        for slot in param.slots:
            if (module := slot.module()) is None:
                continue
            parameters = module._parameters
            held = parameters[slot.name] if slot.name in parameters else None  # noqa: SIM401
            if held is unsharded and slot.plain:
                parameters[slot.name] = sharded
            elif held is unsharded:
                slot.set(sharded)
        if unsharded.requires_grad is not param.required_grad:
            param.required_grad = unsharded.requires_grad
            sharded.requires_grad_(param.required_grad)


def pass_on_freezing(params: Iterable[FSDPParam]) -> None:
    """While they are unsharded: sharded parameters may have been frozen, or trained again."""
    for param in params:
        requires_grad = param.sharded_param.requires_grad
        if requires_grad is not param.required_grad and param.unsharded_param is not None:
            param.required_grad = requires_grad
            param.unsharded_param.requires_grad_(requires_grad)


# -- the sweep ---------------------------------------------------------------------------------------------------------


def changed(params: Iterable[FSDPParam]) -> list[FSDPParam]:
    """Those that the user has replaced, whose shard was, or that were written to where the write would be lost."""
    found = []
    for param in params:
        sharded, unsharded = param.sharded_param, param.unsharded_param
        for slot in param.slots:
            module = slot.module()
            held = sharded if module is None else module._parameters.get(slot.name)
            if held is not sharded and held is not unsharded and held is not None:
                found.append(param)
                break
        else:
            local = held_local(sharded)  # which a step may be writing to
            if (
                local is not param.shard.local_tensor
                or sharded.untyped_storage().__dict__.get(MARK) != id(sharded)
                or (param.shard.subclass is None and HOOK in local.__dict__)
                or (unsharded is not None and _was_written_to(param, unsharded))
            ):
                found.append(param)
    return found


def _was_written_to(param: FSDPParam, unsharded: nn.Parameter) -> bool:
    """Whether the user has written to the unsharded parameter: nothing of ours bumps its version counter.

    A DTensor (tensor parallelism) ignores `.data =`, as in stock.
    """
    if param.shard.subclass is not None:  # its hooks are allowed to
        return False
    if not param.shard.aliased and versions_of([unsharded])[0]:
        return True
    made_over = param.unsharded_storage
    return made_over is not None and unsharded.untyped_storage() is not made_over


def take_over(param: FSDPParam, *, loading: bool) -> bool:
    """Takes over the user's changes of a sharded parameter; returns whether its shard is another one now."""
    parameter = _replacement(param, loading=loading)
    if parameter is not None:
        _check_replacement(param, parameter)
        param.adopt_parameter(parameter, loading=loading)
    local = local_of(param.sharded_param)
    is_new = parameter is not None or local is not param.shard.local_tensor
    if is_new or (param.shard.subclass is None and HOOK in local.__dict__):
        param.sharded_param.untyped_storage().__dict__[MARK] = id(param.sharded_param)
        param.adopt_shard(local)
        return True
    if param.sharded_param.untyped_storage().__dict__.get(MARK) != id(param.sharded_param):
        raise RuntimeError(
            f"the data of parameter '{param.fqn}' was replaced (`parameter.data = ...`). The values of a DTensor lie "
            "in its local tensor, so the new ones would be lost. Write in place under torch.no_grad(): "
            "`parameter.copy_(...)` from a DTensor like it, or `parameter.to_local().copy_(...)` from this rank's rows"
        )
    if param.unsharded_param is not None and _was_written_to(param, param.unsharded_param):
        param.unsharded_param = None  # the next gather makes a new one
        raise RuntimeError(
            f"the data of parameter '{param.fqn}' was replaced (`parameter.data = ...`) or written to in place while "
            "it was unsharded: in forward, or after a forward that no backward has followed. That does not reach its "
            "shards, so the new values are lost. Write to the sharded parameter, in place, before forward or after "
            "backward; reshard() the module if it is unsharded there"
        )
    return False


def _replacement(param: FSDPParam, *, loading: bool) -> nn.Parameter | None:
    """The parameter that the user has put in the place of this one, if any.

    A load with `assign=True` makes a parameter for each use of a tied one: if their values are equal, one is taken for
    all. While `loading`, others are left where they are, for a model's `tie_weights` to decide; so are plain tensors,
    which stand in for parameters in legacy_fsdp_compat's summon_full_params.
    """
    known = (param.sharded_param, param.unsharded_param)
    current = [(slot, parameter) for slot in param.slots if (parameter := slot.get()) is not None]
    new = [(slot, parameter) for slot, parameter in current if parameter is not known[0] and parameter is not known[1]]
    if not new:
        return None
    slot, parameter = new[-1]
    if len(new) < len(current) or any(_differ(one, parameter) for _, one in new):
        if loading:
            return None
        others = len(current) - 1
        raise ValueError(
            f"parameter '{param.fqn}' is tied, and '{slot.name}' of a {type(slot.module()).__name__} was assigned a "
            f"parameter (or a state dict gave it values) that its other {others} use{'s' * (others != 1)} "
            f"do{'es' * (others == 1)} not have. Tied parameters stay tied after fully_shard: assign the same one to "
            "all uses (call torch.func.functional_call on a module that has all of them), or untie them before it"
        )
    return None if loading and not isinstance(parameter, DTensor) else parameter


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the shards of two parameters differ in any byte. Those of tensor subclasses are not compared."""
    if one is other:
        return False
    one, other = ((local_of(each) if isinstance(each, DTensor) else each).detach() for each in (one, other))
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return True
    if one.is_meta or type(one) is not torch.Tensor or type(other) is not torch.Tensor:
        return False
    return not torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _check_replacement(param: FSDPParam, parameter: torch.Tensor) -> None:
    fqn, shape, old = param.fqn, param.form.shape, cast(DTensor, param.sharded_param)
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter '{fqn}' was replaced by a plain tensor of shape {tuple(parameter.shape)}; expected a "
            f"DTensor with placements {tuple(old.placements)}. To load a full state dict use "
            "shardkit.core.load_full_state_dict; give torch.func.functional_call DTensors like state_dict()'s"
        )
    mesh, expected = parameter.device_mesh, old.device_mesh
    alike = parameter.shape == shape and tuple(parameter.placements) == tuple(old.placements)
    if not alike or (mesh is not expected and not torch.equal(mesh.mesh, expected.mesh)):
        raise ValueError(
            f"parameter '{fqn}' was replaced by a DTensor of shape {tuple(parameter.shape)} with placements "
            f"{tuple(parameter.placements)} on {mesh}; expected shape {tuple(shape)} with {tuple(old.placements)} on "
            f"{expected}, with the same ranks in the same order. Make it like that of state_dict()"
        )
    if not isinstance(parameter, nn.Parameter) and parameter.requires_grad:
        raise ValueError(
            f"parameter '{fqn}' was replaced by a DTensor that requires grad and is not an nn.Parameter, as by "
            "torch.func.functional_call; its gradient would be lost. Pass detached tensors to compute with other "
            "values, or train with the parameters of the module"
        )
