"""A program on ranks under ``fully_shard``, and its outcome."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardkit.core import FSDPModule, MixedPrecisionPolicy, clip_grad_norm_, events, fully_shard
from shardkit.core.engine.step import state_of
from shardkit.core.runtime.shared.meeting import neighbours_of
from tests.core.random_programs.blocks import DTYPES, WholeModel, add_hooks, build, toggle
from tests.core.random_programs.program import Act, Program
from tests.core.random_programs.single import SingleProcess, Unusable
from tests.core.random_programs.training import LARGEST_NORM, LEARNING_RATE, Backward, Loop
from tests.support import RankFailure, RankTimeout, run_ranks

_BATCH = 25  # a launch takes as long as several programs
_PATIENCE = timedelta(seconds=20)
_LATE = 0.0005  # seconds that every gather starts later than on its peers, on the rank that is to be late


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    ``kind``: "equal"; "refused" (every rank raised an error that names a module or parameter); "unusable" (no test);
    else a counterexample: "wrong" numbers or state, "unnamed" (an error that names nothing), "differs" (between ranks),
    "crash", "hang".
    """

    kind: str
    message: str = ""

    @property
    def good(self) -> bool:
        """Whether the program was right, or an error."""
        return self.kind in ("equal", "refused", "unusable")

    @property
    def signature(self) -> str:
        """The kind and the message without names and numbers; equal signatures count as one finding."""
        message = self.message.partition("\n")[0]
        message = re.sub(r"'[^']*'|\"[^\"]*\"", "'...'", message)
        message = re.sub(r"\b(?:(?:alpha|beta|gamma|delta)\b\.?)*(?:\w+_(?:w|up|down))\b", "PARAMETER", message)
        return f"{self.kind}: {re.sub(r'[-+]?[0-9][0-9.e+-]*', '#', message)[:160]}"


def run_programs(programs: Sequence[Program]) -> Iterator[tuple[Program, Outcome]]:
    """Run programs in batches of one number of ranks, and yield each with its outcome."""
    by_world = sorted(programs, key=lambda program: program.policy.world)
    for world, some in itertools.groupby(by_world, key=lambda program: program.policy.world):
        while batch := list(itertools.islice(some, _BATCH)):
            yield from zip(batch, _run_batch(world, batch, 120.0), strict=True)


def _run_batch(world: int, programs: list[Program], timeout: float) -> list[Outcome]:
    try:
        seen = run_ranks(world, run_all, programs, timeout=timeout)
    except RankFailure as failure:
        if len(programs) > 1:
            return [_run_batch(world, [program], _PATIENCE.seconds * 2)[0] for program in programs]
        return [Outcome("hang" if isinstance(failure, RankTimeout) else "crash", str(failure))]
    return [_verdict(outcomes) for outcomes in zip(*seen, strict=True)]


def _verdict(outcomes: tuple[Outcome, ...]) -> Outcome:
    kinds = {outcome.kind for outcome in outcomes}
    if bad := [outcome for outcome in outcomes if outcome.kind in ("wrong", "unnamed")]:
        return bad[0]
    if len(kinds) > 1:
        text = "\n".join(f"rank {rank}: {one.kind}: {one.message}" for rank, one in enumerate(outcomes))
        return Outcome("differs", f"the ranks end differently\n{text}")
    return outcomes[0]


def run_all(rank: int, world: int, programs: list[Program]) -> list[Outcome]:
    """The body that ranks run: every program, each judged on this rank alone."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            outcome = run_one(rank, program)
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, outcome.kind)
            if any(kind not in ("equal", "unusable") for kind in everyone):
                # Transfers may be left in these groups, which nobody will match. The groups stay: to destroy them would
                # let torch use their names again. The pool is renewed when there are many.
                dist.barrier()
                _mesh.cache_clear()
            outcomes.append(outcome)
    return outcomes


def run_one(rank: int, program: Program) -> Outcome:
    """One program on this rank."""
    try:
        expected = SingleProcess(program)
        expected.run()
    except Unusable as error:
        return Outcome("unusable", str(error))
    sharded = None
    try:
        sharded = Sharded(rank, program)
        with events.subscribe(_late) if program.policy.late == rank else contextlib.nullcontext():
            sharded.run(expected)
        return Outcome("equal")
    except AssertionError as error:
        return Outcome("wrong", str(error))
    except Exception as error:  # noqa: BLE001 (judged)
        text = f"{type(error).__name__}: {error}"
        meant = isinstance(error, RuntimeError | ValueError | TypeError)
        own_line = "created inside a custom Function" in text and not any(
            "/shardkit/" in frame.filename or frame.name == "_call_impl"
            for frame in traceback.extract_tb(error.__traceback__)
        )  # in place, on a view of an input, in no module: torch says so, under stock as well
        said = "\n".join([str(error), *getattr(error, "__notes__", [])])
        named = meant and sharded is not None and sharded.is_named_in(said)
        if named or own_line:
            return Outcome("refused", text)
        return Outcome("unnamed", text + "\n" + "".join(traceback.format_exception(error)[-6:]))
    finally:
        for root in sharded.roots if sharded is not None else ():  # leave nothing in flight
            with contextlib.suppress(Exception):
                root.reset_iter_state()


def _late(event: events.Event) -> None:
    if isinstance(event, events.GatherStarted):
        time.sleep(_LATE)


class Sharded:
    """A program's model under ``fully_shard`` on this rank."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank = rank
        self.program = program
        self.policy = program.policy
        self.model, self.trap = build(program)
        self.names = _names(self.model)
        self.mesh = _mesh(self.policy.world, self.policy.shared_memory, self.policy.hsdp)
        if self.policy.hooks_first:
            add_hooks(self.model)
        self._shard()
        if not self.policy.hooks_first:
            add_hooks(self.model)
        self.ended = self._ended_backwards()
        self.held = False  # parameters may be whole after a backward, as the program asked for it

    def _shard(self) -> None:
        options: dict[str, Any] = {"mesh": self.mesh}
        if self.policy.param_dtype or self.policy.reduce_dtype:
            dtypes = [DTYPES[name] if name else None for name in (self.policy.param_dtype, self.policy.reduce_dtype)]
            options["mp_policy"] = MixedPrecisionPolicy(*dtypes)
        if self.policy.dim_1:
            options["shard_placement_fn"] = lambda parameter: Shard(1) if parameter.ndim > 1 else None
        self.wrapped: list[Any] = []
        # A module before those around it, as fully_shard has to be called.
        for wrap in sorted(self.policy.wraps, key=lambda wrap: sorted(map(_depth, wrap.paths)), reverse=True):
            modules = [self.model.get_submodule(path) for path in wrap.paths]
            fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=wrap.reshard, **options)
            self.wrapped += [module for module in modules if isinstance(module, FSDPModule)]
        below = {id(inner) for outer in self.wrapped for inner in outer.modules() if inner is not outer}
        self.roots = [module for module in self.wrapped if id(module) not in below]
        for root in self.roots:  # errors name modules as seen from their root
            self.names += [type(root).__name__, *_names(root)]
        for root in self.roots:
            if self.policy.depth is not None:
                root.set_prefetch_depth(self.policy.depth)
            if self.policy.budget is not None:
                root.set_prefetch_budget(self.policy.budget)
            if not self.policy.reshard_after_backward:
                root.set_reshard_after_backward(False)
            if self.policy.buffers > 1:
                root.set_reduce_scatter_max_input_buffers(self.policy.buffers)
        if self.policy.lists is not None:
            self._set_prefetch_lists()

    def _set_prefetch_lists(self) -> None:
        order = [module for module in self.model.modules() if any(module is one for one in self.wrapped)]
        for index, module in enumerate(order):
            after, before = order[index + 1 : index + 2], order[max(0, index - 1) : index]
            if self.policy.lists == "all":
                after = before = order
            elif self.policy.lists == "reversed":
                after, before = before, after
            module.set_modules_to_forward_prefetch(after)
            module.set_modules_to_backward_prefetch(before)

    def is_named_in(self, message: str) -> bool:
        """Whether a message names a module or a parameter of the model."""
        return any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", message) for name in self.names)

    def run(self, expected: SingleProcess) -> None:
        """Run the program and compare.

        Raises:
            AssertionError: at the first thing that is not as in one process.
        """
        self.expected = iter(expected.backwards)
        self.optimizer = torch.optim.SGD((p for p in self.model.parameters()), lr=LEARNING_RATE)
        for kind, value in Loop(self.program, self.model, self.trap, self.rank).run():
            getattr(self, f"_{kind}")(value)
        for root in self.roots:
            if not self.policy.reset:  # else reshard() does nothing
                root.reset_iter_state()
        for module in self.wrapped:
            module.reshard()
        for name, parameter in self.model.named_parameters():
            self._check_tensor(f"parameter {name} at the end", parameter, expected.masters[name].detach(), 0.0)

    # Events of the loop.

    def _sync(self, on: bool) -> None:
        for root in self.roots:
            root.set_requires_gradient_sync(on)

    def _synchronize(self, _: None) -> None:
        for root in self.roots:
            root.synchronize_gradients()
        for module in self.wrapped:  # the last forward may have had no backward
            module.reshard()

    def _failed(self, _: None) -> None:
        for root in self.roots:
            if self.policy.reset:
                root.reset_iter_state()
        self._zero(True)

    def _update(self, clip: bool) -> None:
        self._whole_is_allowed_no_more()
        if clip:
            clip_grad_norm_(list(self.model.parameters()), LARGEST_NORM)
        self.optimizer.step()

    def _toggle(self, names: tuple[str, ...]) -> None:
        self._whole_is_allowed_no_more()
        toggle(self.model, names)

    def _zero(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)
        for root in self.roots:  # a root that no backward with sync has reached may have gradients that wait
            root.zero_grad(set_to_none)

    def _ask(self, act: Act) -> None:
        module = self.model.get_submodule(act.path)
        if act.kind == "state_dict":
            self.model.state_dict()
        elif act.kind == "moved":
            self.model._apply(torch.clone)
        elif act.kind == "reshard" and isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FSDPModule):  # else it is below another one of its list
            module.unshard(async_op=act.kind == "unshard_async")
            self.held = True

    def _backward(self, event: Backward) -> None:
        expected = next(self.expected)
        for index, (one, other) in enumerate(zip(event.values, expected.values[self.rank], strict=True)):
            what = "loss" if index == 0 else f"gradient of input {index - 1}"
            self._check_tensor(f"{event.label}: {what}", one, other, 0.0)
        ended, self.ended = self.ended, self._ended_backwards()
        if ended == self.ended:  # it ran no hook: an optimizer's step would be refused
            return
        missed = any(one == other for one, other in zip(ended, self.ended, strict=True))  # a root it did not reach
        if event.sync and expected.gradients is not None:
            self._check_gradients(event, expected.gradients, missed=missed)

    def _whole_is_allowed_no_more(self) -> None:
        if self.held or not self.policy.reshard_after_backward:
            for module in self.wrapped:
                module.reshard()
            self.held = False

    def _check_gradients(self, event: Backward, expected: dict[str, Tensor | None], *, missed: bool) -> None:
        scale = max((float(g.abs().max()) for g in expected.values() if g is not None), default=0.0)
        if self.held or not self.policy.reshard_after_backward or not event.last or missed:
            for module in self.wrapped:
                module.reshard()
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor), f"{event.label}: parameter {name} is not sharded after backward"
            self._check_tensor(f"{event.label}: gradient of {name}", parameter.grad, expected[name], scale)

    def _ended_backwards(self) -> list[int]:
        """How many backwards have ended for each root."""
        return [state_of(root).schedule.backwards for root in self.roots]  # type: ignore[union-attr]

    def _check_tensor(self, what: str, seen: Tensor | None, expected: Tensor | None, scale: float) -> None:
        if seen is None or expected is None:
            assert seen is expected, f"{what} is {'None' if seen is None else 'there'}, in one process it is not"
            return
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        if isinstance(seen, DTensor):
            expected = distribute_tensor(expected, seen.device_mesh, seen.placements, src_data_rank=None).to_local()
            seen = seen.to_local()
        limit = self._tolerance * max(largest, 1e-2 * scale, 1e-6)
        told = f"{what} of values up to {largest:.3g}: "
        torch.testing.assert_close(seen.detach(), expected, rtol=0, atol=limit, msg=lambda text: told + text)

    @functools.cached_property
    def _tolerance(self) -> float:
        low = {self.program.dtype, self.policy.param_dtype, self.policy.reduce_dtype} - {None}
        low |= {"float32" for module in self.model.modules() if module.block.float32}
        if "bfloat16" in low:
            return 0.1
        return 1e-3 if "float32" in low else 1e-8


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


def _names(model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [*names, WholeModel.__name__, f"FSDP{WholeModel.__name__}"]


_generations = itertools.count()


@functools.cache
def _mesh(world: int, shared_memory: bool, hsdp: bool) -> DeviceMesh:
    """A mesh of process groups of our own, which nothing else uses. Collective when it is new."""
    ranks = torch.arange(world).view(2, 2) if hsdp else torch.arange(world)
    # DTensor remembers meshes by ranks and names, also after their process groups are gone.
    names = tuple(f"{name}_{next(_generations)}" for name in ("replicate", "shard")[-ranks.ndim :])
    with mock.patch.dict(os.environ, SHARDKIT_SHARED_MEMORY=str(int(shared_memory))):
        rows = [ranks.movedim(axis, -1).reshape(-1, ranks.size(axis)).tolist() for axis in range(ranks.ndim)]
        groups = [dist.new_subgroups_by_enumeration(one, _PATIENCE)[0] for one in rows]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names)
        for group in groups:
            assert (neighbours_of(group) is not None) == shared_memory or world == 1, (world, shared_memory, hsdp)
    return mesh
