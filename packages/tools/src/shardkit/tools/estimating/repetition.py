"""Models of many equal blocks: runs a few blocks, and extends the recording to all of them.

Note [Repeated blocks]
Between the blocks at the ends of a list, each block repeats the previous one: the same operators, with storages and
communications at the same distance. The part of a recording for one block can therefore stand for any number of further
ones. This is verified. `repetition_of` runs the whole model forward once and checks that its blocks run the same
operators. `lengthened` checks that two blocks in the middle of a recording did the same in forward, backward and the
optimizer, with storages and communications at the same distances. If not, the whole model is recorded.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import nn

from shardkit.tools.estimating.job import EstimateError, TrainingJob, blocks_of, call
from shardkit.tools.estimating.observer import Observer
from shardkit.tools.estimating.simulation import Recording, Sizes, simulate
from shardkit.tools.estimating.trace import CATEGORIES, Changed, Entered, Held, Step, Trace, Transfer, block_of
from shardkit.tools.machine import Machine
from shardkit.tools.torch_compat import FakeTensors

# Models with fewer blocks are run whole.
_LEAST_BLOCKS = 12
# Names that blocks use for their index.
_COUNTED = ("idx", "index", "layer_id", "layer_number")
# Number of blocks to run if one is gathered ahead: the first and last ones differ from those between.
_LEAST_RUN = 7


@dataclass(frozen=True)
class Repetition:
    """A list of equal blocks in a model: its FQN, their number, and the model, whose tensors have no data."""

    fqn: str
    count: int
    model: nn.Module = field(repr=False, compare=False)


def record(job: TrainingJob, axes: Mapping[str, int], rank: int, machine: Machine) -> Recording:
    """The result of `simulate`, on GPUs from a recording of fewer blocks if that is equivalent.

    Raises:
        EstimateError: as `simulate`.
    """
    found = repetition_of(job) if machine.transport == "nccl" else None
    if found is not None:
        # Runs more blocks if more groups are in flight at a time, by the depth or about as many as fit the budget.
        replicated = len([name for name in axes if name != "tp"]) > 1
        short = _LEAST_RUN + 4 * max(0, job.policies.prefetch_depth - 1) + 4 * replicated
        block, dtype = next(found.model.get_submodule(found.fqn).children()), job.policies.param_dtype
        nbytes = sum(one.numel() * (dtype or one.dtype).itemsize for one in block.parameters()) // axes.get("tp", 1)
        while short < (job.policies.prefetch_budget or 0) // max(1, nbytes) + 3:
            short *= 2
        while 2 * short <= found.count and (shorter := _shortened(job, found, short)) is not None:
            try:
                recording = simulate(shorter, axes, rank, machine, found.fqn)
            except EstimateError:
                break  # if the whole model fails too, it reports the error
            whole = lengthened(recording, found.fqn, found.count - short)
            if whole is not None:
                return whole
            short *= 2
    return simulate(job, axes, rank, machine)


# -- finding repeated blocks -------------------------------------------------------------------------------------------

_KNOWN: WeakKeyDictionary[Any, Repetition | None] = WeakKeyDictionary()


def repetition_of(job: TrainingJob) -> Repetition | None:
    """The list of equal blocks that make up most of a job's model; None if there is none.

    Also None for iterations that may treat blocks differently (user-defined steps, accumulation), and if owners are
    chosen over the whole model.
    """
    policies = job.policies
    if job.takes_mesh or job.step is not None or policies.accumulate > 1 or policies.placements is not None:
        return None
    try:
        if job.model not in _KNOWN:
            _KNOWN[job.model] = _found(job)
        return _KNOWN[job.model]
    except (Exception, SystemExit):  # noqa: BLE001 - `simulate` runs the user's code again, and tells what is wrong
        return None


def _found(job: TrainingJob) -> Repetition | None:
    fake = FakeTensors()
    with fake:
        model = job.model()
        lists = Counter(fqn.rpartition(".")[0] for fqn, _ in blocks_of(model, None))
        if not lists:
            return None
        fqn, count = lists.most_common(1)[0]
        blocks = list(model.get_submodule(fqn).children())
        if count < _LEAST_BLOCKS or len(blocks) != count or not _look_equal(model, blocks):
            return None
        with Observer(1, fake, fqn) as observer:
            observer.adopt(model)
            observer.start()
            observer.where.set_phase = "between"
            batch = job.inputs()
            call(model, batch)
        parts = _Parts(observer.trace, fqn, count)
        seen = [parts.described(part) for part in parts.all if 0 < part.block < count - 1]
        alike = len(seen) == count - 2 and all(one == seen[0] for one in seen)
        return Repetition(fqn, count, model) if alike else None


def _look_equal(model: nn.Module, blocks: list[nn.Module]) -> bool:
    """Whether blocks have the same classes, parameters and settings, and share no parameter with other modules."""
    uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    if any(uses[id(one)] > 1 for block in blocks for one in block.parameters()):
        return False
    return all(_settings(block, place) == _settings(blocks[0], 0) for place, block in enumerate(blocks))


def _settings(block: nn.Module, place: int) -> list[Any]:
    """The visible settings of a block; indices of blocks are made relative to its own."""
    seen: list[Any] = []
    for fqn, module in block.named_modules():
        plain = {
            name: value - place if type(value) is int and any(one in name for one in _COUNTED) else value
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str | torch.dtype | None)
        }
        seen += [fqn, type(module), plain]
    return seen + [(fqn, one.shape, one.dtype, one.requires_grad) for fqn, one in block.named_parameters()]


def _shortened(job: TrainingJob, found: Repetition, count: int) -> TrainingJob | None:
    """The job with only the first `count` blocks; None if it wraps some blocks differently."""

    def model() -> nn.Module:
        """A copy: making all blocks takes longer than running a few. A model that cannot be copied fails later."""
        held = [*found.model.named_parameters(), *found.model.named_buffers()]
        blocks = found.model.get_submodule(found.fqn)
        spare = {name: block for place, (name, block) in enumerate(blocks.named_children()) if place >= count}
        removed = tuple(f"{found.fqn}.{name}." for name in spare)
        memo: dict[int, Any] = {id(block): None for block in spare.values()}
        memo |= {id(one): _without_data(one) for fqn, one in held if not fqn.startswith(removed)}
        copied: nn.Module = copy.deepcopy(found.model, memo)
        for name in spare:
            del copied.get_submodule(found.fqn)._modules[name]
        return copied

    wrap = job.policies.wrap
    if wrap is not None:
        inside: dict[str, set[str]] = {str(place): set() for place in range(found.count)}
        for name in wrap:
            if name.startswith(f"{found.fqn}."):
                place, _, rest = name.removeprefix(f"{found.fqn}.").partition(".")
                inside.setdefault(place, set()).add(rest)
        if any(rests != inside["0"] for rests in inside.values()):
            return None
        removed = {f"{found.fqn}.{place}" for place in range(count, found.count)}
        wrap = tuple(name for name in wrap if not any(f"{name}.".startswith(f"{one}.") for one in removed))
    return replace(job, model=model, policies=replace(job.policies, wrap=wrap))


def _without_data(one: torch.Tensor) -> torch.Tensor:
    """A tensor like one of the model's, in the world that is being simulated."""
    made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cpu")
    if not isinstance(one, nn.Parameter):
        return made
    parameter = nn.Parameter(made, one.requires_grad)
    own = {name: value for name, value in vars(one).items() if name not in vars(parameter)}
    parameter.__dict__.update(own)  # attributes set by the user's code
    return parameter


# -- lengthening a recording -------------------------------------------------------------------------------------------

_Name: TypeAlias = tuple[int, int | None, int]
"""Of a storage or a communication: the run of blocks that it began in, the block, a number there.

Memory that is held before the first step has a run for each category, below zero.
"""


@dataclass
class _Part:
    """A block's part of one run of forward, backward or optimizer; `block` is -1 outside of blocks."""

    run: int
    block: int
    rising: bool
    steps: list[Step] = field(default_factory=list)


def _parted(steps: list[Step]) -> list[_Part]:
    """Splits a trace into runs: blocks follow one another up or down; a run ends where that turns or leaves them."""
    found = [_Part(0, -1, True)]
    for step in steps:
        if isinstance(step, Entered):
            last = found[-1]
            rising = step.block > last.block
            inside = step.block >= 0 and last.block >= 0
            turned = not inside or abs(step.block - last.block) != 1 or rising != last.rising
            found.append(_Part(last.run + turned, step.block, rising or not inside))
        found[-1].steps.append(step)
    return found


class _Parts:
    """A trace in parts, one for each visit to a block, and names for the things in it."""

    def __init__(self, trace: Trace, repeated: str, count: int) -> None:
        self.count, self.before = count, trace.held
        self.prefix = f"{repeated}."
        self.names: dict[Held | int, _Name] = {}
        self._moved: dict[tuple[str, int], str] = {}
        numbers: Counter[tuple[int, int]] = Counter()

        def name(one: Held | int, run: int, block: int) -> None:
            if one not in self.names:
                self.names[one] = (run, block if block >= 0 else None, numbers[run, block])
                numbers[run, block] += 1

        self.held: dict[tuple[int, int], list[int]] = defaultdict(list)
        for held, nbytes in trace.held:
            run, block = -1 - CATEGORIES.index(held.category), -1 if held.block is None else held.block
            name(held, run, block)
            self.held[run, block].append(nbytes)
        self.all = _parted(trace.steps)
        for part in self.all:
            for step in part.steps:
                if isinstance(step, Changed | Transfer):
                    name(step.about, part.run, part.block)

    def moved(self, step: Any, by: int, about: Any) -> Step:
        """A step with another storage or communication; if it is in a block, `by` blocks further on."""
        changes = {"about": about} if hasattr(step, "about") else {}
        if by:
            changes["fqn"] = self._moved_fqn(step.fqn, by)
        moved: Step = msgspec.structs.replace(step, **changes) if changes else step
        return moved

    def _moved_fqn(self, fqn: str, by: int) -> str:
        moved = self._moved.get((fqn, by))
        if moved is None:  # millions of steps share these strings
            place = block_of(fqn, self.prefix)
            rest = fqn[len(f"{self.prefix}{place}") :]
            moved = self._moved[fqn, by] = fqn if place < 0 else f"{self.prefix}{place + by}{rest}"
        return moved

    def described(self, part: _Part) -> list[Any]:
        """A description of a part relative to its block, equal for blocks that did the same.

        Storages and communications are named with the distance of the block that they belong to.
        """
        seen: list[Any] = []
        for step in part.steps:
            if isinstance(step, Entered):
                continue
            run, own, number = self.names.get(getattr(step, "about", 0), (None, None, None))
            category = step.about.category if isinstance(step, Changed) else None
            about = run, None if own is None else own - part.block, number, category
            seen.append(self.moved(step, -part.block, about))
        return seen


def lengthened(recording: Recording, repeated: str, more: int) -> Recording | None:
    """A recording with `more` copies of the middle block.

    None if the blocks in the middle differ, or do not use storages of their own.
    """
    if not recording.blocks or any(f"{repeated}." in place for place in recording.values_read):
        return None
    parts = _Parts(recording.trace, repeated, len(recording.blocks))
    middle = _middle(parts, recording.blocks)
    if middle is None:
        return None
    trace = _Longer(parts, middle, more).trace
    return replace(recording, trace=trace, sizes=recording.sizes.plus(recording.blocks[middle], more))


def _middle(parts: _Parts, blocks: list[Sizes]) -> int | None:
    """A block that equals the next one in every run, so that copies fit between the two."""
    runs: dict[int, dict[int, Any]] = defaultdict(dict)
    for (run, block), sizes in parts.held.items():
        runs[run][block] = sizes
    for part in parts.all:
        runs[part.run].setdefault(part.block, []).append((part.rising, parts.described(part)))
    for middle in sorted(range(parts.count - 1), key=lambda one: abs(2 * one - parts.count + 2)):
        alike = {run: {block for block, done in seen.items() if done == seen.get(middle)} for run, seen in runs.items()}
        both = all(middle + 1 in same or not (same - {-1}) for same in alike.values())
        if both and blocks[middle] == blocks[middle + 1] and _near(parts, middle, alike):
            return middle
    return None


def _near(parts: _Parts, middle: int, alike: dict[int, set[int]]) -> bool:
    """Whether each storage and communication can be identified unambiguously in a longer trace.

    Those used by the two blocks in the middle must belong to blocks like them. Those of other blocks must not reach
    across the middle, and steps outside of blocks must not refer to the middle: they would have to be repeated too.
    """
    for part in parts.all:
        for step in part.steps:
            run, own, _ = parts.names.get(getattr(step, "about", 0), (0, None, 0))
            if own is None:
                continue
            if part.block in (middle, middle + 1):
                clear = own in alike[run]
            elif part.block < 0:
                clear = own not in (middle, middle + 1)
            else:
                clear = (own > middle) == (part.block > middle) or own in alike[run]
            if not clear:
                return False
    return True


class _Longer:
    """A trace with more blocks: `more` copies of block `middle`, after it."""

    def __init__(self, parts: _Parts, middle: int, more: int) -> None:
        self._parts, self._middle, self._more = parts, middle, more
        self._made: dict[_Name, Held | int] = {}
        self.trace = Trace()
        for own, group in itertools.groupby(parts.before, lambda one: one[0].block):
            some, block = list(group), -1 if own is None else own
            for to in self._places(block):
                self.trace.held += [(self._about(held, block, to), nbytes) for held, nbytes in some]
        for part in parts.all:
            places = self._places(part.block)
            for to in places if part.rising else reversed(places):
                self.trace.steps += [self._moved(step, part.block, to) for step in part.steps]

    def _places(self, block: int) -> range:
        """The positions of a recorded block in the longer trace, including its copies."""
        begin = block + self._more * (block > self._middle)
        return range(begin, begin + 1 + self._more * (block == self._middle))

    def _about(self, one: Any, block: int, to: int) -> Any:
        """The storage or communication of a step of `block` that moved to `to`, if it was `one` before."""
        if one not in self._parts.names:
            return 0  # a communication from before the recording
        run, own, number = self._parts.names[one]
        if own is not None:
            own = to + own - block if block >= 0 else self._places(own)[0]
        new = Held(one.category, own, one.host) if isinstance(one, Held) else len(self._made) + 1
        return self._made.setdefault((run, own, number), new)

    def _moved(self, step: Step, block: int, to: int) -> Step:
        if isinstance(step, Entered):
            return Entered(to)
        by = to - block if block >= 0 else 0
        if block < 0 and block_of(step.fqn, self._parts.prefix) > self._middle:
            by = self._more  # outside of blocks, but refers to one of the last
        return self._parts.moved(step, by, self._about(getattr(step, "about", 0), block, to))
