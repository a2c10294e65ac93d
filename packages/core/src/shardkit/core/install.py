"""Replaces torch's own FSDP functions by shardkit's, so that trainers use them without being edited.

Replacements are found by identity: every module in `sys.modules` that holds one of stock's functions under any name
gets ours. Policies and `FSDPModule` stay torch's: ours are recognised as them. References outside of module attributes
(a default argument, a partial) reach stock's engine, which raises while shardkit is installed.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardkit.autoinstall import _RECORDS, NAMES_GROUP, NEEDS_FSDP1
from shardkit.core import events
from shardkit.core.engine.step import state_of
from shardkit.core.fully_shard import fully_shard
from shardkit.core.module import register_fsdp_forward_method, share_comm_ctx
from shardkit.core.torch_compat import STOCK_FUNCTIONS, guard_stock_states, modules_of_stock, stock_part
from shardkit.core.version import __version__

_OURS: Mapping[str, Callable[..., Any]] = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_REQUIRED = ("fully_shard", "register_fsdp_forward_method")
_KEEP_NAMES = ("shardkit.", "torch.distributed.checkpoint.")
_PACKAGE = "torch.distributed.fsdp"
# The places where torch defines and re-exports its functions. A torch without one of these modules differs.
_HOMES = (_PACKAGE, f"{_PACKAGE}._fully_shard", f"{_PACKAGE}._fully_shard._fully_shard")


@dataclass
class _Installation:
    replacements: list[tuple[Any, Any]] = field(default_factory=list)  # (theirs, ours)
    fsdp1: bool = False
    undo: list[Callable[[], None]] = field(default_factory=list)


_current = _Installation()


def install(*, fsdp1: bool = False, announce: bool = True) -> tuple[str, ...]:
    """Makes torch's own names of FSDP refer to shardkit, in this process, until `uninstall`.

    It replaces `fully_shard`, `register_fsdp_forward_method` and `share_comm_ctx` in `torch.distributed.fsdp`, in the
    modules below it and in every module that has imported them; another call, in those that have done so since then.

    Args:
        fsdp1: also replaces `FullyShardedDataParallel` and the names around it (`ShardingStrategy`, `StateDictType`,
            configurations, wrap policies, `ShardedGradScaler`) by those of shardkit-legacy-fsdp-compat.
        announce: rank 0 writes one line to stderr at the first forward of a sharded model, with the number of
            parameters.

    Returns:
        The dotted names that this call replaced, sorted; empty if all had already been replaced.

    Raises:
        RuntimeError: if torch lacks a name, other software has replaced it, torch's own engine has sharded a module
            already, or shardkit-legacy-fsdp-compat is needed and not installed. Nothing is replaced then.

    Not collective; call it on all ranks, before the model is sharded.
    """
    if _current.undo and (_current.fsdp1 or not fsdp1):
        return _bind(_current.replacements)
    _check_homes()
    _check_models(fsdp1)
    added = [] if _current.undo else list(_replacements_of_fsdp2())
    added += _replacements_of_fsdp1() if fsdp1 else ()
    if not _current.undo:
        _current.undo += [guard_stock_states(_refuse_stock), announce_first_step(quiet=not announce)]
    _current.fsdp1 = fsdp1
    _current.replacements += added
    return _bind(_current.replacements)


def uninstall() -> tuple[str, ...]:
    """Restores torch's own names, including in modules that imported them since; returns the dotted names.

    Sharded models stay with the engine that sharded them. After `install(fsdp1=True)`, modules that imported names from
    shardkit.legacy_fsdp_compat get torch's as well; import them there again.
    """
    for undo in reversed(_current.undo):
        undo()
    given_back = [(ours, theirs) for theirs, ours in _current.replacements]
    _current.replacements, _current.fsdp1, _current.undo = [], False, []
    return _bind(given_back)


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_homes() -> None:
    known = [one for pair in _current.replacements for one in pair]
    for home, name in itertools.product(_HOMES, _REQUIRED):
        bound = getattr(sys.modules.get(home), name, None)
        if bound is None and home in sys.modules:
            raise RuntimeError(
                f"torch {torch.__version__} has no {home}.{name}, which shardkit.core.install() replaces; use a "
                "version of torch that shardkit supports"
            )
        if bound is not None and bound is not STOCK_FUNCTIONS.get(name) and bound not in known:
            raise RuntimeError(
                f"{home}.{name} is not torch's own but {bound!r} of {getattr(bound, '__module__', '?')}; call "
                "shardkit.core.install() before other software replaces it, or leave that software out"
            )


def _check_models(fsdp1: bool) -> None:
    """Torch's functions would not know ours, nor ours its modules: some would do nothing, without a word."""
    names = sorted({type(module).__name__ for module in modules_of_stock(fsdp1)})
    if names:
        raise RuntimeError(
            f"torch's own FSDP has sharded modules already: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; "
            "call shardkit.core.install() before the first module is sharded"
        )


def _refuse_stock() -> None:
    raise RuntimeError(
        "this call reaches torch's own fully_shard, although shardkit is installed in its place: the caller took a "
        "reference to it before shardkit.core.install(), which only replaces attributes of modules. Call install() "
        "before that import, or call torch.distributed.fsdp.fully_shard"
    )


# -- what replaces what ------------------------------------------------------------------------------------------------


def _replacements_of_fsdp2() -> Iterator[tuple[Any, Any]]:
    for name, stock in STOCK_FUNCTIONS.items():
        yield stock, _in_place_of(stock, _OURS[name])
    get_state = stock_part("_fsdp_state", "_get_module_fsdp_state")
    yield get_state, _in_place_of(get_state, lambda module: state_of(module) or get_state(module))


def _in_place_of(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A separate function, so that `uninstall` can distinguish it from users' imports of ours.

    It pickles under the name of stock's: a child process that unpickles it must also install shardkit.
    """

    @functools.wraps(ours)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    function.__module__, function.__name__, function.__qualname__ = stock.__module__, stock.__name__, stock.__qualname__
    return function


def _replacements_of_fsdp1() -> Iterator[tuple[Any, Any]]:
    entry = next((entry for entry in entry_points(group=NAMES_GROUP) if entry.name == "fsdp1"), None)
    if entry is None:
        raise RuntimeError(f"install(fsdp1=True) {NEEDS_FSDP1}")
    # It recognises FSDP1 by its class and handles ours as a model without FSDP1, so it must keep torch's class.
    importlib.import_module("torch.distributed.checkpoint.state_dict")
    names: Mapping[str, Mapping[str, Any]] = entry.load()()
    for home, replacements in names.items():
        module = importlib.import_module(home)
        for name, ours in replacements.items():
            if name not in vars(module):
                raise RuntimeError(
                    f"torch {torch.__version__} has no {home}.{name}, which install(fsdp1=True) replaces; "
                    "use a version of torch that shardkit supports"
                )
            yield vars(module)[name], ours


# -- modules -----------------------------------------------------------------------------------------------------------


def _bind(replacements: list[tuple[Any, Any]]) -> tuple[str, ...]:
    """Replaces the first of each pair by the second wherever a module holds it; returns the dotted names."""
    by_id = {id(old): new for old, new in replacements}  # `replacements` keeps the old ones alive
    replaced = []
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.startswith(_KEEP_NAMES):
            continue
        namespace = vars(module)
        for name, value in list(namespace.items()):
            if id(value) in by_id:
                namespace[name] = by_id[id(value)]
                replaced.append(f"{module.__name__}.{name}")
    return tuple(sorted(set(replaced)))


# -- the first forward: a line on stderr, and a file for `shardkit run` ------------------------------------------------


def announce_first_step(*, quiet: bool) -> Callable[[], None]:
    """At the first root, rank 0 writes a line, unless `quiet`, and each process a file for `shardkit run`."""

    def listener(event: events.Event) -> None:
        if isinstance(event, events.RootReady):
            subscription.close()
            directory = os.environ.get(_RECORDS)
            if directory and Path(directory).is_dir():
                Path(directory, str(os.getpid())).touch()
            if not quiet and dist.get_rank() == 0:
                sys.stderr.write(f"{_line(event.module)}\n")
                sys.stderr.flush()

    subscription = events.subscribe(listener)
    return subscription.close


def _line(root: nn.Module) -> str:
    states = dict.fromkeys(state for module in root.modules() if (state := state_of(module)) is not None)
    groups = dict.fromkeys(group for state in states for group in state.groups)
    numel = sum(param.shape.numel() for group in groups for param in group.params)
    return (
        f"shardkit {__version__} runs {type(root).__name__}: {numel:,} parameters in {len(groups)} groups, "
        f"{dist.get_world_size()} ranks"
    )
