"""CPU offload: what crosses the bus, and in how many copies. Steps beside forward."""

import copy
import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn

from shardkit.core import CPUOffloadPolicy, overlap_step
from shardkit.core.beyond import steps
from shardkit.core.torch_compat import local_of, new_dtensor
from tests.simulation.configurations import CONFIGURATIONS, ODD, optimize
from tests.simulation.device import Access, Observer
from tests.simulation.model import BlockSpec
from tests.simulation.scenarios import rates
from tests.simulation.threads import TimedThread, stepping_on
from tests.simulation.timeline import Timeline
from tests.simulation.training import SHARDS, Scenario, fill, started, take_steps

Transfer: TypeAlias = tuple[list[tuple[int, int]], bytes]
"""Where a copy to the device read pinned memory, with the number of bytes, and what has arrived."""


class _Transfers(Observer):
    def __init__(self) -> None:
        self.seen: list[Transfer] = []
        self.returned: list[int] = []  # bytes of copies to the host

    def ran(self, name: str, stream: int, accesses: Sequence[Access]) -> None:
        if name == "device_to_host":
            self.returned += [access.end - access.begin for access in accesses if access.write]
        if name == "host_to_device":
            read = [_place(access) for access in accesses if not access.write]
            (written,) = (_place(access) for access in accesses if access.write)
            self.seen.append((read, ctypes.string_at(*written)))


def _place(access: Access) -> tuple[int, int]:
    return access.allocation.at + access.begin, access.end - access.begin


def transfers(name: str) -> tuple[list[Transfer], list[Transfer]]:
    """The copies to the device in the last step, and what a copy of each block's shards is."""
    scenario, observer = CONFIGURATIONS[name], _Transfers()
    with started(replace(scenario, build=fill), "ours", observer) as run:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for step in take_steps(run):
            if step < scenario.steps - 1:
                optimize(run)
                observer.seen.clear()
        shards = [[parameter.to_local() for parameter in block.parameters()] for block in run.model.blocks]
        assert all(shard.dtype == torch.float32 and shard.is_pinned() for block in shards for shard in block)
        assert all(shard.untyped_storage().nbytes() == shard.nbytes for block in shards for shard in block)
        copied = copy.deepcopy(run.model.state_dict())
        assert all(torch.equal(copied[fqn].to_local(), one.to_local()) for fqn, one in run.model.named_parameters())
        places = [(block[0].data_ptr(), sum(shard.nbytes for shard in block)) for block in shards]
        for block, (first, second, _) in zip(run.model.blocks, shards, strict=True):
            gradients = [parameter.grad.to_local() for parameter in block.parameters()]
            assert all(gradient.is_pinned() for gradient in gradients)
            assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1
            with torch.no_grad():
                version = second._version
                first.mul_(1)
                assert second._version == version
        return observer.seen, [([place], ctypes.string_at(*place)) for place in places]


@pytest.mark.parametrize("name", ["CPU offload", "CPU offload, bf16"])
def test_shards_cross_to_the_device_as_they_are(name: str, on_device: Callable[..., Any]) -> None:
    """One copy for each block. Casts run on the device: a host that casts would spend its time and memory on it."""
    seen, shards = on_device(transfers, name)
    assert all(any(arrived) for _, arrived in shards)
    assert sorted(seen) == sorted(2 * shards[:-1] + shards[-1:])  # the last stays unsharded until backward


def casts(between: str) -> tuple[list[tuple[int, bytes]], list[bytes], list[bytes]]:
    """Bytes read by each copy to the device after an overlapped step, and the shards of each block as they were then.

    In the first block nothing happens `between` the step and the next forward, or a write that no version counts, a
    load of other shards, or another gather; or a load while the step is queued, and a write after it has run. Or the
    forward is that of another micro-batch, or the write comes after it.
    """
    scenario = Scenario("casts", blocks=(ODD,) * 3, steps=3, offload={}, mixed=True, build=fill)
    observer = _Transfers()
    with started(scenario, "ours", observer) as run:
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        overlap_step(run.optimizer)
        for step in take_steps(run):
            if step == scenario.steps - 1:
                break
            first, now = run.model.blocks[0], between if step else "nothing"
            kept = {name: one.detach().clone() for name, one in first.state_dict().items()}
            if now == "load while it is queued":
                steps._worker().submit((gate := threading.Event()).wait)
            if now != "micro-batch":
                run.optimizer.step()
                run.optimizer.zero_grad()
            if now.startswith("load"):
                first.load_state_dict({name: 2 * one for name, one in kept.items()}, assign=True)
            if now == "load while it is queued":
                gate.set()
                steps._worker().submit(int).result()
            if now in ("write", "load while it is queued"):
                _scale(2, first)
            elif now == "write after forward":
                run.model.blocks[-1].register_forward_hook(partial(_scale, 2, first))
            elif now == "gather":
                first.unshard()
                first.reshard()
            observer.seen.clear()
        if between == "write after forward":
            _scale(0.5, first)
        blocks = [[parameter.to_local() for parameter in block.parameters()] for block in run.model.blocks]
        seen = [(sum(nbytes for _, nbytes in read), arrived) for read, arrived in observer.seen]
        cast = [b"".join(_bytes(shard.bfloat16()) for shard in block) for block in blocks]
        return seen, cast, [b"".join(_bytes(shard) for shard in block) for block in blocks]


def _scale(factor: float, module: Any, *_: Any) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(factor)


def _bytes(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@pytest.mark.parametrize(
    "between",
    ["nothing", "write", "load", "load while it is queued", "gather", "micro-batch", "write after forward"],
)
def test_a_step_casts_for_the_gathers_behind_it(between: str, on_device: Callable[..., Any]) -> None:
    """A group crosses in bf16, in forward and in backward, unless its shards may have been written to since."""
    seen, cast, shards = on_device(casts, between)
    # How many blocks' shards cross as they are.
    whole = {"nothing": 0, "write after forward": 0, "micro-batch": len(shards)}.get(between, 1)
    copies = [*shards[:whole], *cast[whole:]]
    expected = [*copies[:-1], *copies]  # the last stays unsharded until backward
    assert sorted(arrived for _, arrived in seen) == sorted(expected)
    assert all(nbytes == len(arrived) for nbytes, arrived in seen)


def _in_two_dtypes(model: Any) -> None:
    fill(model)
    for block in model.blocks:
        block.weights[1] = nn.Parameter(block.weights[1].detach().bfloat16())


def _freeze_first(model: Any) -> None:
    fill(model)
    for block in model.blocks:
        block.weights[0].requires_grad_(False)


def copies(build: Callable[[Any], None], change: str) -> tuple[list[int], list[int]]:
    """Bytes of each copy to the device, and back, in the last step of one block, whose middle shard is another one."""
    observer = _Transfers()
    scenario = Scenario("copies", blocks=(ODD,), steps=2, offload={}, build=build)
    with started(scenario, "ours", observer) as run:
        for step in take_steps(run):
            if not step:
                _CHANGES[change](run.model)
                observer.seen.clear()
                observer.returned.clear()
                run.model.zero_grad()
        assert all(parameter.to_local().is_pinned() for parameter in run.model.parameters()) or change == "data"
        return [len(arrived) for _, arrived in observer.seen], observer.returned


def _load(model: Any, fqns: Sequence[str], prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state, given = model.state_dict(), {}
    for fqn in fqns:
        value, given[fqn] = state[fqn], prepare((2 * state[fqn].to_local()).detach())
        state[fqn] = nn.Parameter(new_dtensor(given[fqn], value.device_mesh, value.placements, value.shape))
    model.load_state_dict({fqn: state[fqn] for fqn in fqns}, strict=False, assign=True)
    for fqn, local in given.items():
        kept = model.get_parameter(fqn).to_local().data_ptr() == local.data_ptr()
        assert kept is local.is_pinned()


def _set_data(model: Any) -> None:
    local = local_of(model.get_parameter(_MIDDLE))
    local.data = 2 * local


_MIDDLE = "blocks.0.weights.1"
_CHANGES: dict[str, Callable[[Any], Any]] = {
    "": lambda model: None,
    "loaded": lambda model: _load(model, [_MIDDLE], lambda local: local),
    "loaded pinned": lambda model: _load(model, [_MIDDLE], torch.Tensor.pin_memory),
    "all loaded": lambda model: _load(model, list(model.state_dict()), lambda local: local),
    "data": _set_data,
    "cast": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize(
    ("build", "change", "there", "back"),
    [
        (fill, "", [92], [92]),
        (_in_two_dtypes, "", [68, 12], [68, 12]),
        (_freeze_first, "", [92], [28]),
        (fill, "loaded", [64, 24, 4], [92]),
        (fill, "loaded pinned", [64, 24, 4], [92]),
        (fill, "all loaded", [92], [92]),
        (fill, "data", [64, 24, 4], [92]),
        (fill, "cast", [46], [46]),
    ],
)
def test_one_copy_for_each_dtype(
    build: Any, change: str, there: list[int], back: list[int], on_device: Callable[..., Any]
) -> None:
    """A shard that was replaced crosses on its own, from its own memory, and so do those beside it."""
    assert on_device(copies, build, change) == (there, back)


def homes(options: dict[str, Any]) -> tuple[list[str], list[str], int, list[bytes]]:
    """Where shards and their gradients lie after two steps, by parameter of the first block; copies to the device.

    Then the gradients' values; hooks change those of the second block.
    """

    def home(tensor: Any) -> str:
        local = tensor.to_local()
        return "pinned" if local.device.type == "cpu" and local.is_pinned() else local.device.type

    observer = _Transfers()
    scenario = Scenario("homes", (ODD,) * 2, steps=2, build=fill, our_options=options)
    with started(scenario, "ours", observer) as run:
        for hooked in run.model.blocks[1].parameters():
            hooked.register_hook(lambda gradient: 2 * gradient)
            hooked.register_post_accumulate_grad_hook(lambda one: one.grad.to_local().add_(1))
        for _ in take_steps(run):
            copied, observer.seen = len(observer.seen), []
        shards = [*run.model.parameters()]
        values = [_bytes(one.grad.to_local().cpu().contiguous()) for one in shards]
        first = shards[: len(shards) // 2]
        return [home(one) for one in first], [home(one.grad) for one in first], copied, values


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"weights.0": CPUOffloadPolicy()}, ["pinned", "sim", "sim"]),
        ({"weights.0": CPUOffloadPolicy(pin_memory=False)}, ["cpu", "sim", "sim"]),
        (CPUOffloadPolicy(budget=80), ["pinned", "sim", "sim"]),
        ({"weights.0": CPUOffloadPolicy(), "*": CPUOffloadPolicy(pin_memory=False)}, ["pinned", "cpu", "cpu"]),
    ],
    ids=["by name", "not pinned", "by budget", "not all pinned"],
)
def test_each_parameter_has_its_home(policy: Any, expected: list[str], on_device: Callable[..., Any]) -> None:
    """A shard of (16, 8) has the most bytes. Gradients have the bits of those on the device."""
    places, of_gradients, copied, gradients = on_device(homes, {"offload_policy": policy})
    assert places == of_gradients == expected
    assert copied
    assert any(map(any, gradients))
    assert gradients == on_device(homes, {})[-1]


BLOCKS, BLOCK = 24, BlockSpec(shapes=((64, 64), (64,)))
FORWARD = BLOCKS * BLOCK.forward


def time_of_a_step(
    engine: str, when: str | None, *, transfer: float = 0.0, on_host: float = 0.0, on_device: float = 0.0
) -> float:
    """Of the last of three steps, optimizer included, which runs as `when` says, or in `step()` if that is None.

    Shards are offloaded if a shard of a block takes a `transfer` between host and device. The optimizer takes as long
    as the other arguments say for all of them, and does not run if it takes no time.
    """
    elements = BLOCKS * BLOCK.numel / SHARDS
    timeline = Timeline(replace(rates(block=BLOCK, transfer=transfer), copy=on_device / (3 * 4 * elements)))
    scenario = Scenario("steps", blocks=(BLOCK,) * BLOCKS, steps=3, offload={} if transfer else None)
    thread = TimedThread(timeline, on_host / elements)
    with started(scenario, engine, timeline) as run, stepping_on(thread):
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, foreach=False)
        if when is not None:
            overlap_step(run.optimizer, when=when)  # type: ignore[arg-type]
        ends = [0.0]
        for _ in take_steps(run):
            if on_host or on_device:
                run.optimizer.step()
            run.optimizer.zero_grad()
            timeline.host += on_host if when is None else 0.0
            ends.append(timeline.clock())
        return ends[-1] - ends[-2]


@pytest.mark.parametrize("when", ["auto", "backward"])
@pytest.mark.parametrize(("transfer", "step"), [(6.0, 0.4 * FORWARD), (9.0, 0.9 * FORWARD)])
def test_a_step_on_the_host_is_hidden(when: str, transfer: float, step: float, on_device: Callable[..., Any]) -> None:
    without = on_device(partial(time_of_a_step, "ours", None))
    assert on_device(partial(time_of_a_step, "ours", when, transfer=transfer, on_host=step)) <= 1.05 * without


@pytest.mark.parametrize(
    ("when", "transfer", "step"),
    [
        (["auto", "backward"][(i + j) % 2], transfer, step * FORWARD)
        for i, transfer in enumerate((2.0, 15.0, 40.0))
        for j, step in enumerate((0.1, 1.0, 5.0))
    ],
)
def test_it_takes_no_longer_than_stocks(when: str, transfer: float, step: float, on_device: Callable[..., Any]) -> None:
    times = {"transfer": transfer, "on_host": step}
    stock = on_device(partial(time_of_a_step, "stock", None, **times))
    assert on_device(partial(time_of_a_step, "ours", when, **times)) <= stock


@pytest.mark.parametrize("when", ["auto", "backward"])
def test_a_step_on_the_device_is_hidden(when: str, on_device: Callable[..., Any]) -> None:
    """As far as kernels on two streams do not slow each other down, which the timeline does not know."""
    plain, overlapped = (
        on_device(partial(time_of_a_step, "ours", one, on_device=0.5 * FORWARD)) for one in (None, when)
    )
    assert overlapped <= plain - 0.9 * 0.5 * FORWARD
