"""How FSDP1 would wrap a model that the user builds, possibly on the meta device. Nothing is sharded for this.

`--model MODULE:FUNCTION` names the function that builds it; the function may also return FSDP's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardkit.commands.users_code import import_named
from shardkit.commands.users_code import users_code as users_code_raising
from shardkit.core.checkpoint.errors import CheckpointError
from shardkit.legacy_fsdp_compat.api import MixedPrecision, ShardingStrategy, own
from shardkit.legacy_fsdp_compat.auto_wrap import CHOOSE, auto_wrap
from shardkit.legacy_fsdp_compat.fully_sharded_data_parallel import FullyShardedDataParallel
from shardkit.legacy_fsdp_compat.ignored import Ignored, resolve_ignored
from shardkit.legacy_fsdp_compat.migrate.wrapping import Wrapping, with_members
from shardkit.legacy_fsdp_compat.units import WRAPPED, clean_name

users_code = partial(users_code_raising, error=CheckpointError)

_KNOWN = [name for name in inspect.signature(FullyShardedDataParallel).parameters if name != "module"]
_OF_ALL = ("auto_wrap_policy", "ignored_modules", "ignored_states", "use_orig_params")


def shapes_of_model(factory: str | nn.Module) -> dict[str, tuple[int, ...] | str]:
    """Shapes of the parameters and buffers of a model, or of the result of `model_of`, in order; for a tied one, its
    first name.

    Raises:
        CheckpointError: if the model is already wrapped, parameters have no shape yet, or its state_dict raises.
    """
    model = model_of(factory)[0] if isinstance(factory, str) else factory
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    _check_built(model, named)
    clean = {clean_name(name): tensor for name, tensor in named.items()}
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...] | str] = {}
    with users_code("state_dict of the model", "expected the names of its parameters and buffers"):
        names = list(model.state_dict())
    for name in names:
        if name in clean:
            known = first.setdefault(id(clean[name]), name)
            shapes[name] = tuple(clean[name].shape) if known == name else known
    return shapes


def _check_built(model: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    wrapped = [name for name, module in model.named_modules() if WRAPPED in module._modules]
    if wrapped:
        raise CheckpointError(
            f"'{wrapped[0]}' of the model is an FSDP module: build the model without FSDP, and return FSDP's arguments "
            "beside it"
        )
    lazy = [name for name, tensor in named.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise CheckpointError(
            f"{lazy} of the model have no shapes before its first forward: build it with modules whose sizes are given"
        )


@dataclass(frozen=True)
class _Arguments:
    """The arguments of FSDP that decide how a model is wrapped."""

    auto_wrap_policy: Any
    mixed_precision: MixedPrecision | None
    use_orig_params: bool
    ignored: Ignored

    @classmethod
    def of(cls, model: nn.Module, given: Mapping[str, Any]) -> _Arguments:
        """The arguments of `FullyShardedDataParallel(model, **given)`. Raises CheckpointError for names that FSDP does
        not have, or values that it would not accept.
        """
        _check_names(given, _KNOWN, "the model")
        flag, policy = given.get("use_orig_params", False), given.get("auto_wrap_policy")
        if not isinstance(flag, bool):
            raise CheckpointError(f"use_orig_params of the model is {flag!r}, expected True or False")
        if not (policy is None or callable(policy) or any(hasattr(policy, name) for name in CHOOSE)):
            raise CheckpointError(
                f"auto_wrap_policy of the model is {policy!r:.80}, expected a policy, such as a ModuleWrapPolicy"
            )
        with users_code("ignored_modules or ignored_states", "expected lists of modules, or of parameters"):
            ignored = resolve_ignored(model, given.get("ignored_modules"), given.get("ignored_states"), lambda _: False)
        return cls(policy, _mixed_precision(given, "the model"), flag, ignored)


def _check_names(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise CheckpointError(
            f"{unknown} of {where} are not arguments of FullyShardedDataParallel that can be given here; expected some "
            f"of {', '.join(known)}"
        )
    strategy = getattr(given.get("sharding_strategy"), "name", None)
    if strategy == ShardingStrategy.NO_SHARD.name:
        raise CheckpointError(
            f"sharding_strategy of {where} is NO_SHARD, whose state dicts are whole in FSDP1: convert to 'full'"
        )


def _mixed_precision(given: Mapping[str, Any], where: str) -> MixedPrecision | None:
    mixed = given.get("mixed_precision")
    if mixed is None:
        return None
    with users_code(f"mixed_precision of {where}", "expected a MixedPrecision"):
        found = own(MixedPrecision, mixed, "mixed_precision")
    if not isinstance(found.param_dtype, torch.dtype | None):
        raise CheckpointError(f"param_dtype of {where} is {found.param_dtype!r}, expected a torch.dtype or None")
    return found


def parameters_of_model(model: nn.Module, arguments: Mapping[str, Any]) -> set[str]:
    """Names of the parameters that FSDP would shard with these arguments, including tied ones: all but the ignored.
    Raises CheckpointError for arguments that FSDP would not accept.
    """
    return _not_ignored(model, _Arguments.of(model, arguments).ignored)


def _not_ignored(model: nn.Module, ignored: Ignored) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name) for name, one in named if one not in ignored.parameters}


def wrapping_of_model(model: nn.Module, arguments: Mapping[str, Any]) -> Wrapping:
    """How FSDP would wrap a model, which may be on the meta device, with these arguments.

    Args:
        model: not wrapped yet.
        arguments: those of `FullyShardedDataParallel`; `auto_wrap_policy`, `mixed_precision`, `use_orig_params`,
            `ignored_modules` and `ignored_states` count.

    Raises:
        CheckpointError: for arguments that FSDP would not accept, or a wrapping that it does not support.
    """
    checked = _Arguments.of(model, arguments)
    shapes = shapes_of_model(model)
    names = {module: clean_name(f"{name}.").rstrip(".") for name, module in model.named_modules()}
    wrapped = _wrapped(model, checked)
    units = {name: (_param_dtype(wrapped[module], name),) for module, name in names.items() if module in wrapped}
    buffers = frozenset(shapes.keys() - _not_ignored(model, checked.ignored))
    _check_repeated(model, [name for name in units if name])
    wrapping = with_members(Wrapping(shapes, units, buffers, checked.use_orig_params))
    _check_units(model, wrapping)
    return wrapping


def _check_repeated(model: nn.Module, units: list[str]) -> None:
    """If a module has two places, FSDP1 wraps it in the first one, and its forward fails; if a module around it has
    two, its flat parameter has two names.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for unit in units:
        places = [clean_name(f"{name}.").rstrip(".") for name, module in modules.items() if module is modules.get(unit)]
        if len(places) > 1:
            raise CheckpointError(
                f"one module that is wrapped has several places in the model, {places}; such LOCAL files are not "
                "converted: wrap a module around all of them"
            )


def _wrapped(model: nn.Module, checked: _Arguments) -> dict[nn.Module, Mapping[str, Any]]:
    """The modules that the policy wraps, with the arguments for each."""
    passed = {"mixed_precision": checked.mixed_precision}
    wrapped: dict[nn.Module, Mapping[str, Any]] = {model: passed}

    def note(module: nn.Module, **given: Any) -> nn.Module:
        wrapped[module] = given
        return module

    if checked.auto_wrap_policy is not None:
        ignored = checked.ignored
        with users_code("auto_wrap_policy of the model", "expected a policy that FullyShardedDataParallel takes"):
            auto_wrap(
                model, checked.auto_wrap_policy, ignored.modules, ignored.parameters, passed, note, lambda _: False
            )
    return wrapped


def _param_dtype(arguments: Mapping[str, Any], unit: str) -> str | None:
    where = f"the FSDP module '{unit}'"
    _check_names(arguments, [name for name in _KNOWN if name not in _OF_ALL], where)
    mixed = _mixed_precision(arguments, where)
    dtype = None if mixed is None else mixed.param_dtype
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _check_units(model: nn.Module, wrapping: Wrapping) -> None:
    """Checks that each FSDP1 flat parameter with use_orig_params=False is trainable as a whole, or not at all."""
    if wrapping.use_orig_params:
        return
    trains = {clean_name(name): one.requires_grad for name, one in model.named_parameters(remove_duplicate=False)}
    for unit, members in wrapping.members.items():
        frozen = [name for name in members if not trains[name]]
        if 0 < len(frozen) < len(members):
            raise CheckpointError(
                f"of the FSDP module '{unit}' {frozen} are frozen and the others train, which FSDP1 has only with "
                "use_orig_params=True; set that"
            )


_EXPECTED = "expected a torch.nn.Module, or a pair of one and a dict with the arguments of FullyShardedDataParallel"


def model_of(factory: str) -> tuple[nn.Module, dict[str, Any] | None]:
    """The model that `module:function` builds, and the arguments of FSDP that it returns beside it, possibly none; None
    if it returns only the model. It is called on the meta device, so nothing is allocated. Raises CheckpointError if it
    cannot be imported, raises, or does not return a module.
    """
    option = f"--model {factory}"
    build = _function(factory, option)
    hint = (
        "it is called without arguments on the meta device, where tensors have no values: it should build the model "
        "and load, move and wrap nothing"
    )
    with users_code(option, hint), torch.device("meta"):
        built = build()
    paired = isinstance(built, tuple) and len(built) == 2
    model, arguments = built if paired else (built, {})
    if not isinstance(model, nn.Module) or not isinstance(arguments, dict):
        seen = (
            f"a tuple of {', '.join(type(one).__name__ for one in built)}"
            if isinstance(built, tuple)
            else _described(built)
        )
        raise CheckpointError(f"{option} returned {seen}, {_EXPECTED}")
    return model, arguments if paired else None


def _function(factory: str, option: str) -> Callable[[], Any]:
    build = import_named(factory, option, "a function that builds a model", CheckpointError)
    if not callable(build) or isinstance(build, nn.Module):
        raise CheckpointError(f"{option} is {_described(build)}, expected a function that returns a torch.nn.Module")
    function: Callable[[], Any] = build
    return function


def _described(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"something of type {type(value).__name__}"
