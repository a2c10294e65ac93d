"""Work that is deferred to the first forward, when the root module is known."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count, zip_longest
from operator import attrgetter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from shardkit.core import events
from shardkit.core.digests import numbers_of
from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.engine.order_check import OrderCheck
from shardkit.core.engine.schedule import State
from shardkit.core.mesh import DataParallelMesh, groups_of_copies
from shardkit.core.parameters.collect import STATE
from shardkit.core.parameters.param import FSDPParam
from shardkit.core.parameters.placements import is_ours
from shardkit.core.runtime.collective import agree
from shardkit.core.torch_compat import local_of, outside_transforms, stock_modules_around

live_roots: weakref.WeakSet[State] = weakref.WeakSet()
"""The states that have begun as roots."""

_LOG = logging.getLogger(__name__)

_Entry: TypeAlias = tuple[str, tuple[int, ...], str, str, bool, str, int]
"""A parameter as all ranks must have it: FQN, shape, dtype, how it is cut, requires_grad, its group.

Last a number for its values, if the ranks are to hold the same ones.
"""


@outside_transforms
def initialise_root(root: State, *, same_names: bool = True) -> None:
    """Makes `root` the root of all states below its module (collective: the ranks compare their parameters).

    Without `same_names` a parameter may have another name on each rank, and groups are not compared.
    """
    if len(root.modules) > 1:
        names = [type(module).__name__ for module in alive(root.modules)]
        raise RuntimeError(
            f"the group of modules {names} ran forward before any module that contains them all. Call fully_shard on "
            "the model that contains these modules, and run a forward pass through it first"
        )
    (module,) = alive(root.modules)
    for outer in stock_modules_around(module):  # it takes our shards for tensor-parallel parameters, without gradients
        inner = next(name for name, one in outer.named_modules() if one is module)
        raise RuntimeError(
            f"torch's own fully_shard has sharded the {type(outer).__name__} around '{inner}', which shardkit has "
            "sharded; one model has one engine. Call shardkit.core.install() before the first module is sharded, or "
            "shard every module with shardkit.core.fully_shard"
        )
    states = _states_below(root, module)
    _set_names(states, module)
    for state in states:
        own, of_root = state.schedule.room.prefetch, root.schedule.room.prefetch
        for setting in ("depth", "budget"):
            seen = getattr(own, setting)
            if seen not in (None, getattr(of_root, setting)):
                raise RuntimeError(
                    f"set_prefetch_{setting}({seen}) was called on '{state.fqn}', below the root "
                    f"{type(module).__name__}; it is a setting of the root; call it there"
                )
        if state is not root and state.schedule.manual_finalization:
            raise RuntimeError(
                f"set_manual_backward_finalization(True) was called on '{state.fqn}', below the root "
                f"{type(module).__name__}; it is a setting of the root; call it there"
            )
    with events.waiting(root.fqn, "set-up"):
        groups = list(dict.fromkeys(group for state in states for group in state.groups))
        _check_agreement(groups, root, same_names)
    _warn_of_smaller_meshes(groups)
    live_roots.add(root)
    checks_order, checks_replicas_every = _wanted_checks()
    if checks_order:
        root.schedule.order_check = OrderCheck()
    for index, state in enumerate(states):
        state.index, state.is_root = index, state is root
        state.schedule = root.schedule
        for group in state.groups:
            group.schedule = root.schedule
            group.counts_toward_depth = group.counts_toward_depth and state is not root
    if root.auto_reshard:
        for group in root.groups:
            group.change(reshard_after_forward=False)
    if checks_replicas_every is not None:
        forwards = count(1)

        def check_replicas(module: nn.Module, inputs: object) -> None:
            if next(forwards) % checks_replicas_every == 0:
                root.schedule.context.catch_up()
                _check_agreement(groups, root, same_names, module)

        module.register_forward_pre_hook(check_replicas, prepend=True)
    root.schedule.states = [weakref.ref(state) for state in states]
    root.schedule.room.admit(groups)
    number = sum(len(group.params) for group in groups)
    _LOG.info("%s is a root: %d parameters in %d groups of %d calls", root.fqn, number, len(groups), len(states))
    if events.hub.active:
        events.emit(events.RootReady(module))


def _wanted_checks() -> tuple[bool, int | None]:
    """The words of SHARDKIT_DEBUG: "order"; "replicas" for each forward, or "replicas=100" (None: the first)."""
    words = os.environ.get("SHARDKIT_DEBUG", "").split(",")
    for word in words:
        name, _, every = word.partition("=")
        if name == "replicas":
            if every and (not every.isdecimal() or int(every) < 1):
                raise ValueError(f"SHARDKIT_DEBUG has {word!r}; expected replicas, or replicas=100 for every 100th")
            return "order" in words, int(every or 1)
    return "order" in words, None


def _warn_of_smaller_meshes(groups: list[FSDPParamGroup]) -> None:
    """Warns if some parameters lie on fewer of the ranks than others, and nobody has said what divides their sums.

    Which number is right depends on the model: whether the ranks that hold other experts have batches of their own.
    """
    if not groups:
        return
    widest = max([group.mesh for group in groups], key=attrgetter("size"))
    for group in groups:
        if group.mesh.size == widest.size or group.settings.gradient_divide_factor is not None:  # sizes are cached
            continue
        few, many = (frozenset(mesh.mesh.mesh.flatten().tolist()) for mesh in (group.mesh, widest))
        if few < many and any(param.sharded_param.requires_grad for param in group.params):
            warnings.warn(
                f"the parameters of '{group.label}' lie on {len(few)} ranks, and others on {len(many)} with these "
                f"among them: their gradients are divided by {len(few)}. If they are experts that get tokens from "
                f"batches of all {len(many)} ranks, call set_gradient_divide_factor({len(many)}) on their module; "
                f"if {len(few)} is right, call it with that",
                stacklevel=2,
            )
            return


def alive(references: Iterable[weakref.ReferenceType[Any]]) -> list[Any]:
    return [one for reference in references if (one := reference()) is not None]


def _states_below(root: State, module: nn.Module) -> list[State]:
    states: dict[State, None] = {}
    for name, below in module.named_modules():
        state: State | None = below.__dict__.get(STATE)
        if state is None or state in states:
            continue
        if state.is_root is not None:
            raise RuntimeError(
                f"'{name}' ran forward, or was unsharded, as a root of its own before the {type(module).__name__} that "
                "contains it; the first forward must go through the outermost sharded module"
            )
        states[state] = None
    return list(states)


def _set_names(states: list[State], root: nn.Module) -> None:
    names = {id(module): name for name, module in reversed(list(root.named_modules()))}
    for state in states:
        own = [names.get(id(module), type(module).__name__) or type(root).__name__ for module in alive(state.modules)]
        state.fqn = ", ".join(own)
        for group in state.groups:
            for param in group.params:
                for slot in param.slots:
                    holder = slot.module()
                    path = None if holder is None else names.get(id(holder))
                    if path is not None:
                        param.fqn = f"{path}.{slot.name}" if path else slot.name
                        break
            group.label = state.fqn if group is state.groups[0] else f"{state.fqn}: {group.params[0].fqn}"


def buffers_of_ranks(
    module: nn.Module, mesh: DataParallelMesh | None = None, prefix: str = ""
) -> Iterator[tuple[str, torch.Tensor, DataParallelMesh]]:
    """Buffers of sharded modules and of modules in them, which all ranks should hold alike: FQN, buffer, mesh.

    Running statistics, as of batch normalisation, are each rank's own.
    """
    state: State | None = module.__dict__.get(STATE)
    if state is not None and state.groups:
        mesh = state.groups[0].mesh
    if mesh is not None and not hasattr(module, "track_running_stats"):
        for name, buffer in module._buffers.items():
            if buffer is not None and type(buffer) is torch.Tensor and not buffer.is_meta:
                yield prefix + name, buffer, mesh
    for name, child in module.named_children():
        yield from buffers_of_ranks(child, mesh, f"{prefix}{name}.")


def _check_agreement(
    groups: list[FSDPParamGroup], root: State, same_names: bool, closely: nn.Module | None = None
) -> None:
    """Raises on every rank if any two describe their parameters differently (collective over all process groups).

    If it is to look `closely` at the root's module, all elements are compared, and buffers too. Ranks that agree
    exchange 16 bytes for each process group.
    """
    described: dict[dist.ProcessGroup, list[_Entry]] = defaultdict(list)
    device = torch.device("cpu")
    shard_groups: set[dist.ProcessGroup] = set()
    values = _values_of_copies(groups, whole=closely is not None)
    for group in groups:
        device = group.device
        first = group.params[0].fqn
        process_groups = [one for one in group.mesh.process_groups if one.size() > 1]
        if group.mesh.shard_size > 1:
            shard_groups.add(process_groups[0])
        place = "in the root's group" if group in root.groups else f"in the group that begins with '{first}'"
        entries = [
            (
                param.fqn if same_names else "",
                tuple(param.shape),
                str(param.shard.tensor.dtype),
                f"on {param.placement}" if is_ours(param.placement) else f"sharded on dim {param.layout.dim}",
                param.sharded_param.requires_grad,
                place if same_names else "",
                0,
            )
            for param in group.params
        ]
        for process_group in process_groups:
            described[process_group] += entries
        for param, entry in zip(group.params, entries, strict=True) if values else ():
            number, copies = values.get(param, (0, ()))
            for process_group in copies:
                described[process_group].append((*entry[:-1], number))
    for fqn, buffer, mesh in () if closely is None else buffers_of_ranks(closely):
        (number,) = numbers_of([buffer], whole=True)
        for process_group in mesh.process_groups:
            kind = str(buffer.dtype), "a buffer", False, ""
            described[process_group].append((fqn if same_names else "", tuple(buffer.shape), *kind, number))
    # Shard groups last: ranks learn there of replicas that differ for others.
    described = {one: described[one] for one in sorted(described, key=shard_groups.__contains__)}
    try:
        agreed = True
        for process_group, mine in described.items():
            # After a difference, a rank disagrees on its mesh's other axes too, so that all ranks learn of it.
            agreed = agree(repr(mine if agreed else None).encode(), process_group, device) and agreed
        if agreed:
            return
        message: str | None = None
        for process_group, mine in described.items():
            found = _difference(mine, process_group, device)
            message = _first_of(message or found, process_group)
    except RuntimeError as error:  # the backend's, if a rank does not arrive
        raise RuntimeError(
            f"{root.fqn}: set-up failed (comparing models with the other ranks): {error}; check that every rank runs "
            "this forward: under `shardkit watch` the job names the rank that is missing and what it does instead"
        ) from error
    raise RuntimeError(message)


def _values_of_copies(
    groups: list[FSDPParamGroup], *, whole: bool
) -> dict[FSDPParam, tuple[int, list[dist.ProcessGroup]]]:
    """For parameters that other ranks hold copies of: a number for this rank's part, and the groups of these ranks."""
    copied: dict[FSDPParam, list[dist.ProcessGroup]] = {}
    parts: list[torch.Tensor] = []
    params = [param for group in groups for param in group.params]
    for param in [one for one in params if one.mesh.replicate_axes or one.form.sums_elsewhere]:
        copies, local = groups_of_copies(param.sharded_param), local_of(param.sharded_param)
        if copies and dist.get_backend(copies[0]) != "fake" and param.shard.subclass is None and not local.is_meta:
            copied[param] = copies
            parts.append(local)
    if not copied:
        return {}
    numbers = numbers_of(parts, whole=whole)
    return {param: (number, copies) for (param, copies), number in zip(copied.items(), numbers, strict=True)}


def _difference(mine: list[_Entry], group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The first difference between the first rank and the first one that differs from it, as text (collective).

    None if all ranks of `group` have the same parameters. All ranks get the same text.
    """
    box = [mine]
    dist.broadcast_object_list(box, group=group, group_src=0, device=device)
    (first,) = box
    pairs = enumerate(zip_longest(mine, first))
    place, entry = next(((place, own) for place, (own, other) in pairs if own != other), (None, None))
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (place, entry), group=group)
    if not (places := [place for place, _ in found if place is not None]):
        return None
    earliest, ranks = min(places), dist.get_process_group_ranks(group)
    (other, seen), *others = [(rank, one) for rank, (place, one) in zip(ranks, found, strict=True) if place == earliest]
    expected = first[earliest] if earliest < len(first) else None
    more = f" ({1 + len(others)} of {len(ranks)} ranks differ from rank {ranks[0]})" if others else ""
    if expected is not None and seen is not None and expected[:-1] == seen[:-1]:
        return (
            f"the replicas of '{expected[0]}' (number {earliest} in order of use) hold different values: rank "
            f"{ranks[0]} others than rank {other}{more}. Build and load the model alike on all ranks, or call "
            "shardkit.core.broadcast_replicas(model), which takes the first replica's"
        )
    return (
        f"the ranks disagree about the model's parameters, number {earliest} in order of use: rank {ranks[0]} "
        f"has {_describe(expected)}, rank {other} has {_describe(seen)}{more}. Every rank must build "
        "the same model and call fully_shard on the same modules"
    )


def _first_of(message: str | None, group: dist.ProcessGroup) -> str | None:
    """The message of the first rank of `group` that has one (collective)."""
    messages: list[str | None] = [None] * group.size()
    dist.all_gather_object(messages, message, group=group)
    return next((one for one in messages if one is not None), None)


def _describe(entry: _Entry | None) -> str:
    if entry is None:
        return "no further parameter"
    fqn, shape, dtype, cut, requires_grad, place, _ = entry
    return f"'{fqn}' of shape {shape}, {dtype}, {cut}, requires_grad={requires_grad}{place and ', '}{place}"
