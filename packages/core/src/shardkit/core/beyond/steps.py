"""Optimizer steps that run while the next forward computes.

Note [Steps under forward]
`step()` checks everything that a plain step checks, calls the user's hooks, and hands one job for each parameter group
to a thread, in the order in which the last forward has used the groups. A job is the step of the same optimizer class
on the plain tensors of this rank's parts (optimizer_steps/plain_steps.py), with the hyperparameters that hold now and
the gradients that are there now. The next gather of the group waits for its job, and so does everybody else who reads
what a job writes (waiting.py). As an update depends on nothing outside its element, the order makes no difference to
the bits. All ranks wait at the same places, so nothing changes in what they send.

A job that nothing would hide runs at once: on a device other than the CPU, where a step is short and its kernels are in
order with all others anyway; of parameters that are not sharded; of a group that is unsharded now. So does a step with
a closure, which has yet to compute the gradients.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from shardkit.core.beyond.files import FileTier
from shardkit.core.beyond.waiting import WaitingState, give_back, make_wait
from shardkit.core.engine.group import FSDPParamGroup
from shardkit.core.optimizer_steps.plain_steps import NUMBERS, PlainSteps, Twin, lent, plain_steps_of, use_steps
from shardkit.core.optimizer_steps.supported import ELEMENTWISE, steps_by_element
from shardkit.core.optimizers import optimizer_step_on_shards
from shardkit.core.parameters.param import fqn_of, sharded_counterpart
from shardkit.core.torch_compat import bare_step, no_dynamo

__all__ = ["OverlappedSteps", "overlap_step"]


def overlap_step(optimizer: torch.optim.Optimizer, *, states: FileTier | None = None) -> OverlappedSteps:
    """Makes `optimizer.step()` return at once; each group is stepped by the time that the next forward gathers it.

    For shards on the CPU, as with `CPUOffloadPolicy`. Parameters and state are those of a step without it, to the last
    bit. Whatever reads a parameter, a gradient or the state of the optimizer waits for the steps under way: state
    dicts, checkpoints, `full_tensor()`, another step, the end of the program. An error of a step reaches the first of
    these. A local tensor taken before `step()`, as by `to_local()`, does not wait: call `wait()` first.
    A second call changes nothing. Not collective.

    Args:
        optimizer: one of torch's element-wise optimizers; with `fused=True`, a group is one fused call.
        states: where its state lies; in memory by default.

    Raises:
        TypeError: for an optimizer other than torch's element-wise ones, also for their subclasses.
    """
    steps = plain_steps_of(optimizer)
    if isinstance(steps, OverlappedSteps):
        return steps
    if not steps_by_element(optimizer):
        names = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
        raise TypeError(
            f"{type(optimizer).__name__} is not known to update each element by itself; overlap_step takes {names} of "
            "torch.optim. Call step() without it"
        )
    use_steps(optimizer, steps := OverlappedSteps(states))
    optimizer_step_on_shards(optimizer)
    _overlapped.add(steps)
    _wait_at_the_end()
    return steps


class OverlappedSteps(PlainSteps):
    """The steps of one optimizer."""

    def __init__(self, tier: FileTier | None) -> None:
        super().__init__()
        self._tier = tier
        self._jobs: dict[Job, None] = {}  # under way, in the order in which they run
        self._hidden: list[list[torch.Tensor]] | None = None

    def wait(self) -> None:
        """Waits for the steps under way.

        Raises:
            RuntimeError: if one of them has failed, once; the message has the FQN of its first parameter.
        """
        failed: tuple[str, BaseException] | None = None
        while self._jobs:
            job = next(iter(self._jobs))
            error = job.future.exception()
            self._end_job(job)
            if error is not None and failed is None:
                failed = job.label, error
        if failed is not None:
            label, error = failed
            raise RuntimeError(
                f"the optimizer's step of '{label}' failed: {error}. Some parameters are updated and others are not; "
                "restore the last checkpoint"
            ) from error

    def _wait_for(self, job: Job) -> None:
        """Waits for one of the steps under way. If it has failed, waits for all, and raises as `wait` does."""
        if job.future.exception() is not None:
            self.wait()
        self._end_job(job)

    def _end_job(self, job: Job) -> None:
        """After a job: readers no longer wait, and its state is the optimizer's."""
        if job not in self._jobs:
            return
        del self._jobs[job]
        if job.group is not None:
            job.group.written_by.remove(job.wait)
        give_back(job.waiting)
        for parameter, state in job.states_after():
            dict.__setitem__(job.state_of_optimizer, parameter, state)

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
        self.wait()
        if len(args) > 1 or kwargs.get("closure") is not None:
            return super()._begin(optimizer, args, kwargs)
        self._start(optimizer)
        self._hidden = [group["params"] for group in optimizer.param_groups]
        lent.add(optimizer)
        for group in optimizer.param_groups:
            group["params"] = []
        return None

    def give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer its parameters back."""
        if self._hidden is None:
            super().give_back(optimizer)
            return
        hidden, self._hidden = self._hidden, None
        lent.discard(optimizer)
        for group, params in zip(optimizer.param_groups, hidden, strict=True):
            group["params"] = params

    def forget_joined(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load state dict pre-hook: no job writes to the state that is loaded."""
        self.wait()

    # -- a step --------------------------------------------------------------------------------------------------------

    def _start(self, optimizer: torch.optim.Optimizer) -> None:
        """Starts the jobs, those that run at once last: if one of them fails, nothing is left to be started."""
        if not isinstance(optimizer.state, WaitingState):  # a load replaces it
            optimizer.state = WaitingState(self.wait, optimizer.state)
        jobs = self._make_jobs(optimizer)
        threads = torch.get_num_threads()
        at_once = [job for job in jobs if job.runs_at_once]
        jobs = [*(job for job in jobs if not job.runs_at_once), *at_once]
        if self._tier is not None:
            _refuse_devices(jobs)
            for job, following in zip(jobs, (*jobs[1:], *jobs[:1]), strict=True):
                job.tier, job.following = self._tier, following.group
        for job in jobs:
            job.wait = partial(self._wait_for, job)
            self._jobs[job] = None
            if job.group is not None:
                job.group.versions.clear()  # the next forward gathers anew: no DTensor counts what a job writes
                job.group.written_by.append(job.wait)
            job.waiting = job.written()
            make_wait(job.waiting, job.wait)
            # A tier belongs to the thread; kernels of a device belong to the stream of this one.
            now = job in at_once and self._tier is None
            job.future = _run_now(job, threads) if now else _worker().submit(job.run, threads)
        for job in at_once:
            job.wait()

    def _make_jobs(self, optimizer: torch.optim.Optimizer) -> list[Job]:
        """A job for each parameter group of ours that has gradients, in the order of use."""
        jobs: dict[FSDPParamGroup | None, Job] = {}
        twins: dict[int, Twin] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                param = sharded_counterpart(parameter)
                owner = None if param is None else FSDPParamGroup.of(param)
                if isinstance(parameter, DTensor):
                    twin = twins[id(parameter)] = self.twin_of(optimizer, parameter)
                    gradient = twin.gradient()
                    if gradient is None:
                        continue
                    twin.plain.grad = gradient
                    job = jobs.setdefault(owner, Job(optimizer, owner))
                    job.state[twin.plain] = twin.lend_state(optimizer, optimizer.state[parameter])
                    job.twins.append(twin)
                    job.params[number].append(twin.plain)
                elif parameter.grad is not None:
                    job = jobs.setdefault(owner, Job(optimizer, owner))
                    job.state[parameter] = optimizer.state[parameter]
                    job.plain.append(parameter)
                    job.params[number].append(parameter)
        self._twins = twins
        in_order = [jobs[group] for group in dict.fromkeys(_in_order_of_use(jobs)) if group in jobs]
        return list(dict.fromkeys((*in_order, *jobs.values())))


class Job:
    """The step of a group's parameters, on a copy of the optimizer as it is when `step()` is called.

    Attributes:
        group: None for parameters that are not sharded.
        params: the tensors to step on, by the number of the optimizer's parameter group.
        twins, plain: these tensors with the parameters that they stand for, and those that stand for themselves.
        state: their state.
        tier: where its state lies, None for memory.
        following: the group that is stepped next.
        waiting: the DTensors whose readers wait.
        wait: the function that they call.
    """

    tier: FileTier | None = None
    following: FSDPParamGroup | None = None

    wait: Callable[[], None]
    future: Future[None]

    def __init__(self, optimizer: torch.optim.Optimizer, group: FSDPParamGroup | None) -> None:
        self.group = group
        self.params: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.twins: list[Twin] = []
        self.plain: list[torch.Tensor] = []
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self.state_of_optimizer = optimizer.state
        self.waiting: list[DTensor] = []
        self._optimizer = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(optimizer.__dict__)  # also the scale that a GradScaler has put there
        self._options = [{key: _copied(value) for key, value in one.items()} for one in optimizer.param_groups]

    @property
    def label(self) -> str:
        """Names it in messages."""
        return fqn_of(self.twins[0].parameter) if self.twins else "parameters that are not sharded"

    @property
    def runs_at_once(self) -> bool:
        """Whether a thread would hide nothing, or write to parameters that can be read as they are."""
        if self.group is None or self.group.is_unsharded:
            return True
        return any(twin.local.device.type != "cpu" for twin in self.twins)

    def written(self) -> list[DTensor]:
        """The DTensors whose values it reads or writes."""
        found: list[DTensor] = []
        for twin in self.twins:
            found += [twin.parameter, cast(DTensor, twin.parameter.grad)]
            found += [value for value in twin.state.values() if isinstance(value, DTensor)]
        return found

    def run(self, threads: int) -> None:
        """Steps."""
        if torch.get_num_threads() != threads:  # the part of a tensor that a thread takes may decide its last bits
            torch.set_num_threads(threads)
        for number, options in enumerate(self._options):
            options["params"] = self.params[number]
        self._optimizer.param_groups, self._optimizer.state = self._options, self.state
        if self.tier is None or self.group is None:
            bare_step(self._optimizer)(self._optimizer)
            return
        self.tier.enter(self.group)
        if self.following is not None:
            self.tier.read_ahead(self.following)
        bare_step(self._optimizer)(self._optimizer)
        self._put_in(self.tier)

    def _put_in(self, tier: FileTier) -> None:
        """Moves state of the parameters' shapes to its files; other state is small, such as a count of steps."""
        places = [
            (state, key, value)
            for twin in self.twins
            for state in (self.state[twin.plain],)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and key not in NUMBERS and value.shape == twin.local.shape
        ]
        moved = tier.put(self.group, [value for _, _, value in places], self.label)
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


def _refuse_devices(jobs: Iterable[Job]) -> None:
    for twin in (twin for job in jobs for twin in job.twins):
        if twin.local.device.type != "cpu":
            raise RuntimeError(
                f"parameter '{fqn_of(twin.parameter)}' is on {twin.local.device}, and the optimizer's state is to lie "
                "in files; shard it with CPUOffloadPolicy()"
            )


def _copied(value: Any) -> Any:
    """An option as it is now: schedulers write to a learning rate that is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _in_order_of_use(groups: Iterable[FSDPParamGroup | None]) -> Iterator[FSDPParamGroup]:
    """The groups that the last forwards of their models have used, soonest first."""
    schedules = dict.fromkeys(group.schedule for group in groups if group is not None)
    for schedule in schedules:
        for index in schedule.timetable.states:
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
