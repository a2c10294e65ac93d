"""Optimizer steps that run while the next forward computes, or while backward does.

Note [Steps under forward]
`step()` checks everything that a plain step checks, calls the user's hooks, and starts one job for each parameter
group, in the order in which the last forward has used the groups: on a thread where its shards are on the CPU, on a
stream where they are on a device. A job is the step of the same optimizer class on the plain tensors of this rank's
parts (optimizer_steps/plain_steps.py), with the hyperparameters that hold now and the gradients that are there now. The
next gather of the group waits for its job, and so does everybody else who reads what a job writes (waiting.py). As an
update depends on nothing outside its element, the order makes no difference to the bits. All ranks wait at the same
places, so nothing changes in what they send.

With `fused=True` a job is one call with a list of its tensors, and not with one flat tensor: kernels compute the last
elements of a tensor, which do not fill a vector register, with other instructions, so 1 to 12 of 600,000 elements would
differ from the plain step's in their last bit.

A job that nothing would hide runs at once: of parameters that are not sharded; of a group whose unsharded memory is
there, if forward reads it without a gather; on a device also where forward reads the shards themselves, and while a
CUDA graph is captured. So does a step with a closure, which has yet to compute the gradients.

Note [Steps in backward]
With `when="backward"` a group's job starts when its reduced gradients are delivered, and `step()` starts all others:
every job of the first step, and of the first one after a load. Until `step()` the gradients refuse to be read: whoever
clips or unscales them would be too late. So would another sum that is added to them.

Note [Casts by a job]
Shards on the host that gathers send in a narrower dtype, such as bf16, cross to the device in that dtype and in one
copy: the job casts those of its group after the step. Nobody has written to them since if the next gather is the first
to wait for the job. Then this gather takes the cast, and so does that of its backward. All others copy the shards.

Note [Jobs on streams]
A job's stream waits for the one that calls `step()`. It owns the state that it makes, and whatever else a job
allocates. The gather lane waits for the event at the end of a job, and no stream that computes does. The gradients of
the job may be freed then, before their owner has waited: the allocator is told that the job's stream reads them. The
host waits for the event on behalf of other readers, because each may be on a stream of its own.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from operator import is_not
from typing import Any, Literal, NamedTuple, NoReturn, cast

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.beyond.files import FileTier
from shardkit.core.beyond.waiting import WaitingState, give_back, make_wait
from shardkit.core.engine.group import FSDPParamGroup, Residence
from shardkit.core.optimizer_steps.block_steps import carry_overrides, steps_by_block
from shardkit.core.optimizer_steps.plain_steps import NUMBERS, PlainSteps, Twin, lent, plain_steps_of, use_steps
from shardkit.core.optimizer_steps.supported import ELEMENTWISE, steps_by_element
from shardkit.core.optimizers import optimizer_step_on_shards
from shardkit.core.parameters.param import FSDPParam, fqn_of, sharded_counterpart
from shardkit.core.runtime.lanes import StreamLane
from shardkit.core.tensors import tensors_in
from shardkit.core.torch_compat import bare_step, held_local, no_dynamo, replace_local

__all__ = ["OverlappedSteps", "overlap_step"]


def overlap_step(
    optimizer: torch.optim.Optimizer, *, when: Literal["auto", "backward"] = "auto", states: FileTier | None = None
) -> OverlappedSteps:
    """Makes `optimizer.step()` return at once; each group is stepped by the time that the next forward gathers it.

    Parameters and state are those of a step without it, to the last bit. Whatever reads a parameter, a gradient or the
    state of the optimizer waits for the steps under way: state dicts, checkpoints, `full_tensor()`, another step, the
    end of the program. An error of a step reaches the first of these. A local tensor taken before `step()`, as by
    `to_local()`, does not wait: call `wait()` first. A second call changes nothing. Not collective.

    Args:
        optimizer: one of torch's element-wise optimizers; with `fused=True`, a group is one fused call. Or one of
            bitsandbytes or torchao with 8-bit or 4-bit state, as for `optimizer_step_on_shards`.
        when: "auto" steps under the next forward. "backward" steps with a group's gradients as soon as they are
            reduced, so each may be reduced once before `step()`, and nothing may read them until then: no clipping, no
            `GradScaler`. `step()` is called as ever, with the options that held in backward.
        states: where its state lies, and the shards if it says so; in memory by default. For torch's optimizers.

    Raises:
        TypeError: for any other optimizer, also for subclasses, and for one that draws random numbers; for
            `states` other than a `FileTier`.
        ValueError: for another `when`, `states` for quantised ones, or in a second call other states than in the first.
        RuntimeError: for "backward", if another optimizer steps in backward on one of the parameters.
    """
    if when not in ("auto", "backward"):
        raise ValueError(f'when is {when!r}; pass "auto" or "backward"')
    if not isinstance(states, FileTier | None):
        raise TypeError(f'states is {states!r}; pass a FileTier, such as FileTier("/local/disk", resident="8GiB")')
    steps = plain_steps_of(optimizer)
    if isinstance(steps, OverlappedSteps):
        if states is not None and states is not steps.tier:
            where = "memory" if steps.tier is None else steps.tier.path
            raise ValueError(
                f"{type(optimizer).__name__} has its state in {where} since the first call of "
                "overlap_step; pass states there"
            )
        return steps
    by_block = steps_by_block(optimizer)
    if not by_block and not steps_by_element(optimizer):
        names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise TypeError(
            f"{type(optimizer).__name__} is not known to update each element by itself; overlap_step takes {names} of "
            "torch.optim, and of bitsandbytes and torchao those that step block by block. Call step() without it"
        )
    if getattr(optimizer, "bf16_stochastic_round", False):
        raise TypeError(
            f"{type(optimizer).__name__} rounds at random (bf16_stochastic_round=True), and forward draws random "
            "numbers meanwhile, so that no two runs would be the same; call step() without overlap_step"
        )
    if by_block and states is not None:
        raise ValueError(
            f"{type(optimizer).__name__} has quantised state, which files do not take; leave states out, or use an "
            "optimizer of torch.optim"
        )
    steps = OverlappedSteps(states)
    if when == "backward":
        steps.listen(optimizer)
    use_steps(optimizer, steps)
    optimizer_step_on_shards(optimizer)
    steps.place(optimizer)
    _overlapped.add(steps)
    _wait_at_the_end()
    return steps


class _Taken(NamedTuple):
    """Gradients that were delivered in backward, and the step with them; None where `step()` has yet to take it."""

    gradients: list[DTensor]
    refuse: Callable[[], None]
    job: Job | None


class OverlappedSteps(PlainSteps):
    """The steps of one optimizer."""

    def __init__(self, tier: FileTier | None) -> None:
        super().__init__()
        self.tier = tier
        self._jobs: dict[Job, None] = {}  # under way, in the order in which they run
        self._hidden: list[list[torch.Tensor]] | None = None
        self._streams: dict[torch.device, Any] = {}
        # With when="backward":
        self._listener: _Listener | None = None
        self._numbers: dict[int, int] = {}  # of the optimizer's parameter groups, by the ids of their parameters
        self._taken: list[_Taken] = []  # since the last step, with the ids of their parameters
        self._taken_ids: set[int] = set()
        self._refusals: list[Callable[[], None]] = []  # of the gradients before a load

    def wait(self) -> None:
        """Waits for the steps under way.

        Raises:
            RuntimeError: if one of them has failed, once; the message has the FQN of its first parameter.
        """
        self._settle([*self._jobs], for_all_streams=True)

    def _settle(self, jobs: Iterable[Job], *, for_all_streams: bool) -> None:
        failed: tuple[str, BaseException] | None = None
        for job in jobs:
            error = job.outlast(for_all_streams=for_all_streams)
            if self._end_job(job) and error is not None and failed is None:
                failed = job.label, error
        if failed is not None:
            label, error = failed
            raise RuntimeError(
                f"the optimizer's step of '{label}' failed: {error}. Some parameters are updated and others are not; "
                "restore the last checkpoint"
            ) from error

    def _wait_for(self, job: Job) -> None:
        """Waits for one of the steps under way. If it has failed, waits for all, and raises as `wait` does."""
        if job.outlast(for_all_streams=True) is not None:
            self.wait()
        self._end_job(job)

    def _before_gather(self, job: Job) -> None:
        if job.event is None or job.future.exception() is not None:
            self._wait_for(job)
            if job.group is not None and job.cast_holds:
                job.group.cast_shards = job.cast
        else:
            job.let_gather_wait()

    def _end_job(self, job: Job) -> bool:
        """After a job: readers no longer wait, and its state is the optimizer's. False if that was done."""
        if job not in self._jobs:
            return False
        del self._jobs[job]
        if job.group is not None and job.before_gather in job.group.before_gather:
            job.group.before_gather.remove(job.before_gather)
        give_back(job.waiting)
        for parameter, state in job.states_after():
            dict.__setitem__(job.state_of_optimizer, parameter, state)
        del job.wait, job.before_gather  # circles, in which state would outlive a load, with its files
        return True

    # -- hooks of the step ---------------------------------------------------------------------------------------------

    @property
    def is_lent(self) -> bool:
        """Whether the optimizer holds plain tensors now, or none."""
        return self._hidden is not None or super().is_lent

    @no_dynamo
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Step pre-hook: starts the jobs, and leaves the optimizer nothing to do."""
        if self.is_lent:
            return None
        by_closure = len(args) > 1 or kwargs.get("closure") is not None
        if by_closure and self._listener is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step was called with a closure, whose backward would step already; call "
                'overlap_step without when="backward"'
            )
        early = [one.job for one in self._taken]
        self._settle([job for job in self._jobs if job not in early], for_all_streams=False)
        if by_closure:
            return super()._begin(optimizer, args, kwargs)
        stepped = self._end_backward(optimizer)
        if self._listener is not None:
            self.listen(optimizer)
        self.place(optimizer)
        params = [(number, one) for number, group in enumerate(optimizer.param_groups) for one in group["params"]]
        self._twins = {id(one): self._twins[id(one)] for _, one in params if id(one) in self._twins}
        self._start(optimizer, [(number, one) for number, one in params if id(one) not in stepped])
        self._hidden = [group["params"] for group in optimizer.param_groups]
        lent[optimizer] = threading.get_ident()
        for group in optimizer.param_groups:
            group["params"] = []
        return None

    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer its parameters back."""
        if self._hidden is None:
            super().give_back(optimizer)
            return
        hidden, self._hidden = self._hidden, None
        lent.pop(optimizer, None)
        for group, params in zip(optimizer.param_groups, hidden, strict=True):
            group["params"] = params

    def forget_joined(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load state dict pre-hook: no job writes to the state that is loaded, and the next step checks it."""
        self.wait()
        super().forget_joined(optimizer, state_dict)
        stepped = [one for one in self._give_gradients_back()[0] if one.job is not None]
        self._refusals = [one.refuse for one in stepped]
        for one in stepped:  # no step with the state that is loaded may use them again
            make_wait(one.gradients, one.refuse)

    def place(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves shards to the tier if they are to lie there: before the first step, and after a load."""
        if self.tier is not None and self.tier.parameters:
            params = (sharded_counterpart(one) for group in optimizer.param_groups for one in group["params"])
            self.tier.place(dict.fromkeys(FSDPParamGroup.of(param) for param in params if param is not None))

    def place_state(self, state: Mapping[torch.Tensor, Sequence[DTensor]]) -> None:
        """Moves new state to the tier."""
        if self.tier is None:
            return
        groups: defaultdict[FSDPParamGroup, list[DTensor]] = defaultdict(list)
        for parameter, tensors in state.items():
            if (param := sharded_counterpart(parameter)) is not None:
                groups[FSDPParamGroup.of(param)] += tensors
        for group, tensors in groups.items():
            moved = self.tier.put(group, [held_local(one) for one in tensors], group.label)
            for tensor, local in zip(tensors, moved, strict=True):
                replace_local(tensor, local)

    # -- a step in backward --------------------------------------------------------------------------------------------

    def listen(self, optimizer: torch.optim.Optimizer) -> None:
        """Has the groups report gradients that they deliver to parameters of the optimizer. Raises RuntimeError."""
        params = [one for group in optimizer.param_groups for one in group["params"]]
        numbers = _numbers_of(optimizer)
        if self._shared(numbers):
            gc.collect()  # the optimizer before this one may be in a circle, as with its scheduler
            if shared := self._shared(numbers):
                fqn = next(fqn_of(one) for one in params if id(one) in shared)
                raise RuntimeError(
                    f"two optimizers have parameter '{fqn}' and overlap_step with when='backward', and its gradient is "
                    "for the first of them; delete that one, or call overlap_step without when for one of them, and "
                    "its step() last"
                )
        self._numbers = numbers
        self._listener = _Listener(weakref.ref(optimizer))
        for one in params:
            if (param := sharded_counterpart(one)) is not None:
                group = FSDPParamGroup.of(param)
                if self._listener not in group.when_delivered:
                    group.when_delivered.append(self._listener)

    def _shared(self, numbers: dict[int, int]) -> set[int]:
        """Of the ids, those of parameters on which another optimizer steps in backward."""
        others = (one for one in _overlapped if one is not self and one._listener and one._listener.optimizer())
        return set().union(*(numbers.keys() & one._numbers.keys() for one in others))

    def take_gradients(self, optimizer: torch.optim.Optimizer, delivered: Sequence[FSDPParam]) -> None:
        """Note [Steps in backward]: steps with gradients that are there now, and refuses them to others."""
        if not self._taken:  # since the last step parameters may have moved to other groups
            self._numbers = _numbers_of(optimizer)
        params = [one.sharded_param for one in delivered if id(one.sharded_param) in self._numbers]
        if not params:
            return
        refuse = partial(_refuse_gradients, fqn_of(params[0]))
        if not self._taken_ids.isdisjoint(map(id, params)):
            refuse()
        jobs: list[Job] = []
        if isinstance(optimizer.state, WaitingState):
            jobs = self._start(optimizer, [(self._numbers[id(one)], one) for one in params], in_backward=True)
        for job in jobs:
            self._taken.append(_Taken([cast(DTensor, twin.parameter.grad) for twin in job.twins], refuse, job))
            self._taken_ids.update(id(twin.parameter) for twin in job.twins)
        left = [cast(DTensor, one.grad) for one in params if id(one) not in self._taken_ids]
        self._taken.append(_Taken(left, refuse, None))
        for gradients in (left, *(one.gradients for one in self._taken if one.job in jobs)):
            make_wait(gradients, refuse)

    def _give_gradients_back(self) -> tuple[list[_Taken], set[int]]:
        """Ends the refusal; returns what was taken since the last step, and the ids of its parameters."""
        taken, stepped = self._taken, self._taken_ids
        self._taken, self._taken_ids = [], set()
        for one in taken:
            give_back(one.gradients)
        return taken, stepped

    def _end_backward(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The ids of parameters that backward has stepped on: readers of their gradients only wait from now on."""
        numbers = _numbers_of(optimizer)
        for gradients, refuse, job in self._taken:
            ids = () if job is None else [id(one.parameter) for one in job.twins]
            if job is not None and any(numbers.get(one) != self._numbers[one] for one in ids):
                raise RuntimeError(
                    "the optimizer's parameter groups were changed between backward and optimizer.step(), and "
                    f"overlap_step has stepped on '{job.label}' in backward; change them before backward, or after "
                    "step()"
                )
            now = gradients if job is None else [twin.parameter.grad for twin in job.twins]
            if any(map(is_not, now, gradients)):
                refuse()
        taken, stepped = self._give_gradients_back()
        for gradients, _, job in taken:
            if job in self._jobs:
                make_wait(gradients, job.wait)
                job.waiting += gradients
        for _, _, job in taken:
            if job is not None:
                job.check_options(optimizer)
        return stepped

    # -- a step --------------------------------------------------------------------------------------------------------

    def _start(
        self, optimizer: torch.optim.Optimizer, params: list[tuple[int, torch.Tensor]], *, in_backward: bool = False
    ) -> list[Job]:
        """Starts the jobs, those that run at once last: if one of them fails, nothing is left to be started."""
        jobs = self._make_jobs(optimizer, params)
        if not isinstance(optimizer.state, WaitingState):
            optimizer.state = WaitingState(self.wait, optimizer.state)
        threads = torch.get_num_threads()
        at_once = [job for job in jobs if job.runs_at_once]
        jobs = [job for job in jobs if not job.runs_at_once]
        if in_backward:
            at_once = []  # left to `step()`
        jobs += at_once
        if self.tier is not None:
            _refuse_devices(jobs)
        for job in jobs:
            job.tier, job.state_of_optimizer = self.tier, optimizer.state
            job.cast_dtype = None if job in at_once else job.narrower_dtype
            if job.cast_dtype is not None and job.group is not None:  # here, as a load may assign others before it runs
                job.shards = [param.shard.local_tensor for param in job.group.params]
            job.wait, job.before_gather = partial(self._wait_for, job), partial(self._before_gather, job)
            self._jobs[job] = None
            if job.group is not None:
                job.group.versions.clear()  # the next forward gathers anew: no DTensor counts what a job writes
                job.group.cast_shards = None
                job.group.before_gather.insert(0, job.before_gather)  # a tier makes room after the step
            job.waiting = job.written(gradients=not in_backward)
            make_wait(job.waiting, job.wait)
            if job.device.type != "cpu" and job not in at_once:
                self._queue(job)
            # A tier belongs to the thread; kernels of a device belong to the stream of this one.
            elif job in at_once and self.tier is None:
                job.future = _run_now(job, threads)
            else:
                job.future = _worker().submit(job.run, threads, in_backward and _event_of(job))
        for job in at_once:
            job.wait()
        return jobs

    def _queue(self, job: Job) -> None:
        """Runs a job on a stream: Note [Jobs on streams]."""
        module: Any = torch.get_device_module(job.device)
        if job.device not in self._streams:
            self._streams[job.device] = module.Stream(device=job.device)
        stream = self._streams[job.device]
        stream.wait_event(module.current_stream(job.device).record_event())
        with module.stream(stream):
            job.future = _run_now(job, torch.get_num_threads())
            job.event = stream.record_event()
        for twin in job.twins:
            cast(torch.Tensor, twin.plain.grad).record_stream(stream)

    def _make_jobs(self, optimizer: torch.optim.Optimizer, params: list[tuple[int, torch.Tensor]]) -> list[Job]:
        """A job for each parameter group of ours that has gradients, in the order of use; two if it is on two devices.

        `params` come with the numbers of the optimizer's parameter groups. Those of other jobs may be under way.
        """
        jobs: dict[tuple[FSDPParamGroup | None, torch.device], Job] = {}

        def job_of(*key: Any) -> Job:
            if key not in jobs:
                jobs[key] = Job(optimizer, *key)
            return jobs[key]

        for number, parameter in params:
            param = sharded_counterpart(parameter)
            owner = None if param is None else FSDPParamGroup.of(param)
            if isinstance(parameter, DTensor):
                twin = self._twins[id(parameter)] = self.twin_of(optimizer, parameter)
                gradient = twin.gradient()
                if gradient is None:
                    continue
                twin.plain.grad = gradient
                job = job_of(owner, twin.local.device)
                state = dict.setdefault(optimizer.state, parameter, {})
                if not isinstance(optimizer.state, WaitingState):  # before the first step, and after a load
                    twin.refuse_whole_state(state)
                job.state[twin.plain] = twin.lend_state(optimizer, state)
                job.twins.append(twin)
                job.params[number].append(twin.plain)
            elif parameter.grad is not None:
                job = job_of(owner, torch.device("cpu"))
                job.state[parameter] = dict.setdefault(optimizer.state, parameter, {})
                job.plain.append(parameter)
                job.params[number].append(parameter)
        if getattr(getattr(optimizer, "mng", None), "index2config", None):
            raise RuntimeError(
                "bitsandbytes' register_parameters has noted settings by the places of parameters in the optimizer, "
                "and overlap_step steps on some of them at a time; leave the call out: override_config alone is enough"
            )
        carry_overrides(optimizer, ((twin.parameter, twin.plain) for job in jobs.values() for twin in job.twins))
        groups = dict.fromkeys(_in_order_of_use(group for group, _ in jobs)) if len(jobs) > 1 else {}
        places: dict[FSDPParamGroup | None, int] = {group: place for place, group in enumerate(groups)}
        return sorted(jobs.values(), key=lambda job: places.get(job.group, len(places)))


def _numbers_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The numbers of the optimizer's parameter groups, by the ids of their parameters."""
    return {id(one): number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}


@dataclass(frozen=True)
class _Listener:
    """A group calls it with the parameters whose gradients it has delivered."""

    optimizer: weakref.ReferenceType[torch.optim.Optimizer]

    def __call__(self, params: Sequence[FSDPParam]) -> None:
        optimizer = self.optimizer()
        steps = None if optimizer is None else plain_steps_of(optimizer)
        if optimizer is not None and isinstance(steps, OverlappedSteps):
            steps.take_gradients(optimizer, params)


def _refuse_gradients(fqn: str) -> NoReturn:
    """Raises RuntimeError: Note [Steps in backward]."""
    raise RuntimeError(
        f"the gradient of parameter '{fqn}' is used or dropped before optimizer.step(), but overlap_step with "
        "when='backward' steps with it when it is first reduced: clipping, a GradScaler, further sums and new state "
        "come too late. Restore the last checkpoint and call overlap_step without when; to accumulate, reduce the last "
        "micro-batch only (set_requires_gradient_sync)"
    )


def _event_of(job: Job) -> Any:
    """In backward: an event behind the copies of a group's gradients from its device, None if there are none."""
    assert job.group is not None
    return job.group.schedule.context.reductions.current_event()


class Job:
    """The step of a group's parameters, on a copy of the optimizer as it is when `step()` is called.

    Attributes:
        group: None for parameters that are not sharded.
        device: of its shards.
        params: the tensors to step on, by the number of the optimizer's parameter group.
        twins, plain: these tensors with the parameters that they stand for, and those that stand for themselves.
        state: their state.
        state_of_optimizer: what takes it over at the end.
        tier: where its state lies, None for memory.
        waiting: the DTensors whose readers wait.
        wait: the function that they call; the next gather of the group calls `before_gather`.
        event: at its end, if it runs on a stream.
        cast, cast_dtype: Note [Casts by a job]; None if there is none. Of `shards`, in the order of the group.
    """

    tier: FileTier | None = None

    state_of_optimizer: dict[Any, dict[str, Any]]
    wait: Callable[[], None]
    before_gather: Callable[[], None]
    future: Future[None]
    event: Any = None
    cast: torch.Tensor | None = None
    cast_dtype: torch.dtype | None = None
    shards: list[torch.Tensor]

    def __init__(self, optimizer: torch.optim.Optimizer, group: FSDPParamGroup | None, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.params: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.twins: list[Twin] = []
        self.plain: list[torch.Tensor] = []
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self.waiting: list[DTensor] = []
        self._optimizer = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(optimizer.__dict__)  # also the scale that a GradScaler has put there
        self._options = [
            {key: _copied(value) for key, value in one.items() if key != "params"} for one in optimizer.param_groups
        ]

    @property
    def label(self) -> str:
        """Names it in messages."""
        return fqn_of(self.twins[0].parameter) if self.twins else "parameters that are not sharded"

    @property
    def runs_at_once(self) -> bool:
        """Whether nothing would be hidden, or it would write to parameters that are read without a gather."""
        group = self.group
        if group is None or group.is_unsharded:
            return True
        read_in_place = any(param.shard.aliased or param.shard.subclass is not None for param in group.params)
        if self.device.type == "cpu":
            return read_in_place and group.residence is Residence.CACHED
        lane = group.schedule.context.gathers
        return read_in_place or not isinstance(lane, StreamLane) or lane.is_captured()

    @property
    def narrower_dtype(self) -> torch.dtype | None:
        """The dtype of gathers, if it is one for all parameters of the group and narrower than that of their shards."""
        group = self.group
        if group is None or group.device.type == "cpu" or self.tier is not None or len(self.twins) < len(group.params):
            return None
        shards = [param.shard for param in group.params if param.offload is not None]
        if len(shards) < len(group.params) or any(one.aliased or one.subclass is not None for one in shards):
            return None
        dtypes = {param.dtypes.compute for param in group.params}
        narrowest = min(twin.local.dtype.itemsize for twin in self.twins)
        return next((one for one in dtypes if len(dtypes) == 1 and one.itemsize < narrowest), None)

    @property
    def cast_holds(self) -> bool:
        """Whether the group still sends these shards, in this dtype: a load may have assigned others."""
        if self.group is None or self.cast is None or self.cast_dtype is not self.narrower_dtype:
            return False
        return not any(map(is_not, self.shards, (param.shard.local_tensor for param in self.group.params)))

    def written(self, *, gradients: bool) -> list[DTensor]:
        """The DTensors whose values it reads or writes, with or without its gradients."""
        found: list[DTensor] = []
        for twin in self.twins:
            found += [twin.parameter, *([cast(DTensor, twin.parameter.grad)] if gradients else [])]
            found += [value for value in twin.state.values() if isinstance(value, DTensor)]
        return found

    def check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """At the end of a step that ran in backward: raises RuntimeError if the options are others by now."""
        for number, options in enumerate(self._options):
            now = optimizer.param_groups[number]
            for key in sorted(options.keys() & now.keys() - {"params"}) if self.params.get(number) else ():
                if not any(True for _ in tensors_in((options[key], now[key]))) and options[key] != now[key]:
                    raise RuntimeError(
                        f"{key} was changed from {options[key]} to {now[key]} between backward and optimizer.step(), "
                        f"and overlap_step has stepped on '{self.label}' in backward; change it before backward, or "
                        "after step()"
                    )

    def run(self, threads: int, after: Any = None) -> None:
        """Steps, when the event `after` has come."""
        if after:
            after.synchronize()
        if torch.get_num_threads() != threads:  # the part of a tensor that a thread takes may decide its last bits
            torch.set_num_threads(threads)
        for number, options in enumerate(self._options):
            options["params"] = self.params[number]
        self._optimizer.param_groups, self._optimizer.state = self._options, self.state
        if self.tier is None or self.group is None:
            bare_step(self._optimizer)(self._optimizer)
            if self.cast_dtype is not None and self.group is not None:
                self.cast = _cast(self.shards, self.cast_dtype, pinned=all(one.pinned for one in self.group.params))
            return
        used = [one for params in self.params.values() for one in params]
        self.tier.begin_step(self.group, [*used, *tensors_in([*self.state.values()])])
        bare_step(self._optimizer)(self._optimizer)
        self._put_in(self.tier, self.group)

    def outlast(self, *, for_all_streams: bool) -> BaseException | None:
        """Waits for its end, and returns its error; on streams, for the current one or on the host for all of them."""
        error = self.future.exception()
        if self.event is not None and for_all_streams:
            self.event.synchronize()
        elif self.event is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self.event)
        return error

    def let_gather_wait(self) -> None:
        """Makes the gather lane wait, and no other stream: Note [Jobs on streams]."""
        assert self.group is not None
        self.group.schedule.context.gathers.wait_event(self.event)
        self.group.before_gather.remove(self.before_gather)
        for twin in self.twins:
            twin.plain.grad = None

    def _put_in(self, tier: FileTier, group: FSDPParamGroup) -> None:
        """Moves state of the parameters' shapes to its files; other state is small, such as a count of steps."""
        places = [
            (state, key, value)
            for twin in self.twins
            for state in (self.state[twin.plain],)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and key not in NUMBERS and value.shape == twin.local.shape
        ]
        moved = tier.put(group, [value for _, _, value in places], self.label)
        for (state, key, _), value in zip(places, moved, strict=True):
            state[key] = value

    def states_after(self) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters and their state as it is between the steps; releases the gradients."""
        for twin in self.twins:
            yield twin.parameter, twin.take_state(self.state[twin.plain])
            twin.plain.grad = None
            twin.state, twin.lent = {}, {}
        for parameter in self.plain:
            yield parameter, self.state[parameter]


def _cast(shards: list[torch.Tensor], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    sizes = [one.numel() for one in shards]
    cast = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=pinned)
    for part, shard in zip(cast.split(sizes), shards, strict=True):
        part.view(shard.shape).copy_(shard)
    return cast


def _refuse_devices(jobs: Iterable[Job]) -> None:
    for twin in (twin for job in jobs for twin in job.twins):
        if twin.local.device.type != "cpu":
            raise RuntimeError(
                f"parameter '{fqn_of(twin.parameter)}' is on {twin.local.device}, and the optimizer's state is to lie "
                "in files; shard it with CPUOffloadPolicy()"
            )


def _copied(value: Any) -> Any:
    """An option as it is now: schedulers write to a learning rate or betas that are tensors."""
    if isinstance(value, list | tuple):
        return type(value)(map(_copied, value))
    return value.clone() if isinstance(value, torch.Tensor) else value


def _in_order_of_use(groups: Iterable[FSDPParamGroup | None]) -> Iterator[FSDPParamGroup]:
    """The groups that the last forwards of their models have used, soonest first."""
    schedules = dict.fromkeys(group.schedule for group in groups if group is not None)
    for schedule in schedules:
        for index in schedule.order:
            if (state := schedule.states[index]()) is not None:
                yield from state.groups


def _run_now(job: Job, threads: int) -> Future[None]:
    future: Future[None] = Future()
    try:
        job.run(threads)
        future.set_result(None)
    except Exception as error:  # noqa: BLE001 - raised by whoever waits, as from a thread
        future.set_exception(error)
    return future


# -- the thread --------------------------------------------------------------------------------------------------------

_overlapped: weakref.WeakSet[OverlappedSteps] = weakref.WeakSet()


@cache
def _worker() -> ThreadPoolExecutor:
    """One thread: jobs run in the order in which they are used, each with all threads of torch."""
    return ThreadPoolExecutor(1, "shardkit-step")


_forget_worker = _worker.cache_clear


def _wait_for_all() -> None:
    for steps in list(_overlapped):
        steps.wait()


def _wait_before_a_fork() -> None:
    for steps in list(_overlapped):
        for job in list(steps._jobs):
            job.future.exception()  # no `wait`: what this hook raises is only printed, and the error is for a reader


@cache
def _wait_at_the_end() -> None:
    """Makes the end of the program, which runs all jobs, report their errors; and a fork wait, which has no thread."""
    atexit.register(_wait_for_all)
    os.register_at_fork(before=_wait_before_a_fork, after_in_child=_forget_worker)
