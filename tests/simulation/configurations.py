"""The configurations of the race checker: every feature that changes communication, in a few training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardkit.core as ours
from shardkit.core.beyond import offload_activations, overlap_step
from tests.simulation.device import Stream
from tests.simulation.model import BlockSpec
from tests.simulation.races import Checker
from tests.simulation.scenarios import recompute, three_buffers, two_ahead
from tests.simulation.threads import CheckedThread, stepping_on
from tests.simulation.training import (
    ONLY_THE_LAST,
    Run,
    Scenario,
    accumulating,
    all_reduce_once,
    micro_batches,
    on_each,
    pipelined,
    started,
    take_steps,
    unshard_ahead,
    whole_step,
)
from tests.support.comms import CountingAllGather, RankOrderReduceScatter
from tests.support.wire_weights import BFloat16OnTheWire

# One parameter that is even over the ranks, one that is padded, one smaller than a rank's share of it.
ODD = BlockSpec(shapes=((16, 8), (11, 3), (5,)))


def check(configuration: Scenario, checker: Checker | None = None) -> Checker:
    """Trains a few steps, watched; the optimizer runs on the default stream, or on the host for offloaded shards."""
    checker = checker or Checker()
    with started(configuration, "ours", checker) as run, stepping_on(CheckedThread(checker)):
        run.optimizer = configuration.optimizer([param for param in run.model.parameters() if param.requires_grad])
        for _ in take_steps(run):
            if "stepped" not in run.kept:
                optimize(run)
    return checker


def optimize(run: Run) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()


# -- ways to step ------------------------------------------------------------------------------------------------------


_gradients_add_up = micro_batches(requires_gradient_sync=(True, True))
# Reductions of the first backward, and steps after them, are under way when the second forward begins.
_not_the_last = micro_batches(is_last_backward=(False, True))
# The second backward adds to the sums of the first; what it added is free memory in the third.
_not_the_last_two = micro_batches(is_last_backward=ONLY_THE_LAST)
# Reductions of the first backward may be under way when the second one leaves gradients that wait.
_waits_beside_a_reduction = micro_batches(requires_gradient_sync=(True, False, True), is_last_backward=ONLY_THE_LAST)


def _unshard_between(run: Run) -> None:
    """Steps after reductions of the first backward are under way when the user gathers the blocks again."""
    for last in (False, True):
        run.model.set_is_last_backward(last)
        unshard_ahead(run.model)
        whole_step(run)


def _drops_partial_sums(run: Run) -> None:
    """Reductions of the second backward, which add to sums of the first, are under way when the sums are dropped."""
    for number in range(3):
        run.model.set_is_last_backward(number == 2)
        run.model.set_requires_all_reduce(number == 2)
        whole_step(run)
        if number == 1:
            run.model.zero_grad()


@contextmanager
def _beside(run: Run) -> Iterator[Any]:
    """The block runs on a side stream, after the main one's work, and the main stream waits for it."""
    module = torch.get_device_module("sim")
    main, side = module.current_stream(), run.kept.setdefault("side", Stream())
    side.wait_stream(main)
    with module.stream(side):
        yield
    torch.zeros(64, device="sim")  # the main stream goes on with something else meanwhile
    main.wait_stream(side)


def _on_a_side_stream(run: Run) -> None:
    with _beside(run):
        whole_step(run)


def _backwards_on_two_streams(run: Run) -> None:
    """The main stream waits for reductions of gradients that the other stream has made, which goes on meanwhile."""
    run.model.set_is_last_backward(False)
    _on_a_side_stream(run)
    run.model.set_is_last_backward(True)
    whole_step(run)
    module, side = torch.get_device_module("sim"), run.kept["side"]
    with module.stream(side):
        torch.zeros(64, device="sim")
    module.current_stream().wait_stream(side)  # as the end of a capture demands


def _unshard_here_compute_there(run: Run) -> None:
    unshard_ahead(run.model)
    _on_a_side_stream(run)


def _unshard_before_the_step(run: Run) -> None:
    """Shards are on their way when the optimizer writes to them."""
    whole_step(run)
    unshard_ahead(run.model)
    optimize(run)
    run.kept["stepped"] = True
    for block in run.model.blocks:
        block.reshard()


def _unshard_by_hand(run: Run) -> None:
    for handle in unshard_ahead(run.model):
        handle.wait()
    whole_step(run)
    for block in run.model.blocks:
        block.reshard()


def _step_while_gathering(run: Run) -> None:
    whole_step(run)
    unshard_ahead(run.model)
    optimize(run)
    whole_step(run)


def _evaluate_between(run: Run) -> None:
    whole_step(run)
    optimize(run)
    with torch.no_grad():
        run.model(torch.zeros(4, device="sim"))


def _write_between(run: Run) -> None:
    """Backward gathers what was written after forward."""
    loss = run.model(torch.zeros(4, device="sim")).sum()
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(0.5)
    loss.backward()


def _sums_of_different_blocks(run: Run) -> None:
    """HSDP: sums that wait for their all-reduce are of other parameters in each micro-batch."""
    for number in range(3):
        run.model.set_requires_all_reduce(number == 2)
        run.model.order = [index for index in range(5) if (index + number) % 3]
        whole_step(run)


def _chunk_by_chunk(run: Run) -> None:
    """The last block, which shares a call with the one before, runs on its own: a backward for each of three chunks."""
    run.model.order = [0, 1, 2, 3]
    hidden = run.model(torch.zeros(4, device="sim"))
    leaf = hidden.detach().requires_grad_()
    for _ in range(3):
        run.model.blocks[4](leaf).sum().backward()
    hidden.backward(leaf.grad)


def _two_forwards(run: Run) -> None:
    losses = [run.model(torch.zeros(4, device="sim")).sum() for _ in range(2)]
    for loss in reversed(losses):
        loss.backward()


def _half_a_backward(run: Run) -> None:
    """Backward ends in the middle: what has come back for the block before is dropped unread."""
    middle: list[torch.Tensor] = []
    handle = run.model.blocks[3].register_forward_hook(lambda block, args, output: middle.append(output))
    loss = run.model(torch.zeros(4, device="sim")).sum()
    handle.remove()
    torch.autograd.grad(loss, middle)
    middle.clear()
    del loss
    torch.zeros(4, device="sim")


def _read_on_a_side_stream(run: Run) -> None:
    whole_step(run)
    optimize(run)
    with _beside(run):
        for parameter in run.model.parameters():
            parameter.to_local().clone()


def _interrupted(run: Run) -> None:
    whole_step(run)
    optimize(run)
    order, run.model.order = run.model.order, [0, 1, 99]
    try:
        run.model(torch.zeros(4, device="sim"))
    except IndexError:
        run.model.reset_iter_state()
    run.model.order = order
    whole_step(run)


def _optimizer_on_a_stream(run: Run) -> None:
    """Forward waits for the optimizer through `set_post_optim_event`, and not by itself."""
    module = torch.get_device_module("sim")
    main, side = module.current_stream(), run.kept.setdefault("side", Stream())
    event = run.kept.get("stepped")
    if event is not None:
        run.model.set_post_optim_event(event)
    loss = run.model(torch.zeros(4, device="sim")).sum()
    if event is not None:
        main.wait_event(event)
    run.optimizer.zero_grad()
    loss.backward()
    side.wait_stream(main)
    with module.stream(side):
        run.optimizer.step()
    run.kept["stepped"] = side.record_event()


# -- ways to optimize, to build and to prepare -------------------------------------------------------------------------


def _overlapped(params: list[nn.Parameter], **options: Any) -> Any:
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)
    overlap_step(optimizer, **options)
    return optimizer


_activations = partial(offload_activations, min_bytes=0)
_all_activations = partial(offload_activations, min_bytes=0, keep=0)


def _tie(model: Any) -> None:
    model.blocks[3].weights[0] = model.blocks[0].weights[0]


def _freeze(model: Any) -> None:
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.blocks[3].weights[1].requires_grad_(False)


def _in_bf16(model: Any) -> None:
    model.to(torch.bfloat16)


def _subclass(model: Any) -> None:
    for block in model.blocks:
        block.weights[0] = nn.Parameter(BFloat16OnTheWire(block.weights[0].detach()))


def _recompute_inside(model: Any) -> None:
    for block in model.blocks:
        block.recomputes = True


def _in_backward(model: Any) -> None:
    """The optimizer steps as soon as a gradient is there."""

    def step(param: nn.Parameter) -> None:
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        with torch.no_grad():
            param.to_local().sub_(param.grad.to_local(), alpha=0.1)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)


def _hook(model: Any, beside: bool = False) -> None:
    side = Stream() if beside else None
    for block in model.blocks:
        block.set_all_reduce_hook(lambda output: output.mul_(1.0), stream=side)


def _reads_gradients(model: Any) -> None:
    """The host reads each gradient as soon as it is reduced."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: one.grad.to_local().add_(1))


# Buffers of communication lie in a pool of the process group.
registered = partial(on_each, "set_allocate_memory_from_process_group_for_comm", (True,))


def _custom(model: Any) -> None:
    for block in model.blocks:
        block.set_custom_all_gather(CountingAllGather())
        block.set_custom_reduce_scatter(RankOrderReduceScatter())


def _skip(step: int, count: int) -> list[int]:
    return [index for index in range(count) if (index + step) % 3] if step else list(range(count))


def _last_left_out(step: int, count: int) -> list[int]:
    """The last block is not gathered between two steps, and then it is the first to be."""
    every = list(range(count))
    return (every, every[:-1], every[::-1])[step % 3]


def configuration(name: str, **given: Any) -> Scenario:
    return Scenario(name, **{"blocks": (ODD,) * 5, "steps": 3, **given})


def _compressed(**given: Any) -> dict[str, Any]:
    return {"compression_policy": ours.CompressionPolicy(**given)}


_ALL: list[Scenario] = [
    configuration("plain"),
    configuration("packed", coalescing=False),
    configuration("bf16", mixed=True),
    configuration("bf16 parameters, fp32 reduction", mixed=True, build=_in_bf16),
    configuration("gradients add up, bf16 parameters", mixed=True, build=_in_bf16, step=_gradients_add_up),
    configuration("gradients add up, HSDP, not the last two", replicas=2, step=_not_the_last_two),
    configuration("CPU offload, gradients add up", offload={}, step=_gradients_add_up),
    configuration("tensor subclass", build=_subclass),
    configuration("HSDP", replicas=2),
    configuration("HSDP, bf16, packed", replicas=2, mixed=True, coalescing=False),
    configuration("HSDP, all-reduce of the last micro-batch", replicas=2, step=all_reduce_once),
    configuration("HSDP, partial sums are dropped", replicas=2, step=_drops_partial_sums),
    configuration("HSDP, sums of different blocks", replicas=2, step=_sums_of_different_blocks),
    configuration("accumulation", step=accumulating),
    configuration("a gradient waits beside a reduction", step=_waits_beside_a_reduction),
    configuration("reshard_after_forward=False", options={"reshard_after_forward": False}),
    configuration("reshard_after_forward=2", options={"reshard_after_forward": 2}),
    configuration("recomputation around", prepare=recompute),
    configuration("recomputation inside", build=_recompute_inside),
    configuration("ties", build=_tie),
    configuration("frozen parameters", build=_freeze),
    configuration("some with the root", in_root=(0, 4)),
    configuration("some modules skipped", order=_skip),
    configuration("0-dim parameters", blocks=(BlockSpec(shapes=((16, 8), ())),) * 5),
    configuration("prefetch budget", prepare=lambda model: model.set_prefetch_budget(16 * ODD.numel)),
    configuration("prefetch depth", prepare=lambda model: model.set_prefetch_depth(3)),
    configuration("explicit lists", prepare=two_ahead),
    configuration("3 input buffers", prepare=three_buffers),
    configuration("registered memory", prepare=registered),
    configuration("CPU offload", offload={}),
    configuration("CPU offload, bf16", offload={}, mixed=True),
    configuration("CPU offload, accumulation", offload={}, step=accumulating),
    configuration("CPU offload, not pinned", offload={"pin_memory": False}),
    configuration("CPU offload, gradient hooks", offload={}, prepare=_reads_gradients),
    configuration("CPU offload of the largest, bf16", offload={"budget": 80}, mixed=True),
    configuration("activations on the host", prepare=_activations),
    configuration("activations on the host, two forwards", prepare=_activations, step=_two_forwards),
    configuration("activations on the host, side stream", prepare=_activations, step=_on_a_side_stream),
    configuration("activations on the host, all of them", prepare=_all_activations),
    configuration("activations on the host, half a backward", prepare=_all_activations, step=_half_a_backward),
    configuration("optimizer in backward", prepare=_in_backward),
    *(
        configuration(f"overlapped steps{name}", optimizer=_overlapped, **given)
        for name, given in (
            ("", {}),
            (", HSDP", {"replicas": 2}),
            (", accumulation", {"step": accumulating}),
            (", the last block is left out", {"order": _last_left_out}),
            (", read on a side stream", {"step": _read_on_a_side_stream}),
            (", evaluation between", {"step": _evaluate_between}),
            (", CPU offload", {"offload": {}}),
            (", CPU offload, bf16, accumulation", {"offload": {}, "mixed": True, "step": accumulating}),
        )
    ),
    *(
        configuration(f"steps in backward{name}", optimizer=partial(_overlapped, when="backward"), **given)
        for name, given in (
            ("", {}),
            (", HSDP", {"replicas": 2}),
            (", accumulation", {"step": accumulating}),
            (", CPU offload", {"offload": {}}),
        )
    ),
    configuration("optimizer in backward, HSDP", prepare=_in_backward, replicas=2),
    configuration("optimizer in backward, HSDP, not the last", prepare=_in_backward, replicas=2, step=_not_the_last),
    configuration("optimizer in backward, unshard between", prepare=_in_backward, step=_unshard_between),
    configuration("optimizer in backward, chunk by chunk", prepare=_in_backward, together=(3, 4), step=_chunk_by_chunk),
    configuration("side stream", step=_on_a_side_stream),
    configuration("backwards on two streams", step=_backwards_on_two_streams),
    configuration("shards written between forward and backward", step=_write_between),
    configuration("unshard ahead, forward on another stream", step=_unshard_here_compute_there),
    configuration(
        "tensor subclass, packed, unshard ahead, forward on another stream",
        build=_subclass,
        step=_unshard_here_compute_there,
        coalescing=False,
    ),
    configuration("unshard by hand", step=_unshard_by_hand),
    configuration("unshard before the step", step=_unshard_before_the_step),
    configuration("CPU offload, unshard before the step", offload={}, step=_unshard_before_the_step),
    configuration("the optimizer steps while blocks are gathered", step=_step_while_gathering),
    configuration("pipeline stages", blocks=(ODD,) * 6, stages=2, step=pipelined),
    configuration("evaluation between", step=_evaluate_between),
    configuration("two forwards, two backwards", step=_two_forwards),
    configuration("interrupted forward", step=_interrupted),
    configuration("interrupted forward, tensor subclass", build=_subclass, step=_interrupted),
    configuration("all-reduce hook", prepare=_hook, replicas=2),
    configuration(
        "all-reduce hook on a stream, sums in bf16",
        prepare=partial(_hook, beside=True),
        options={"mp_policy": ours.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    ),
    configuration(
        "reduce-scatters on their own group", prepare=lambda model: model.set_separate_reduce_scatter_group(True)
    ),
    configuration("custom collectives", prepare=_custom),
    configuration("optimizer on another stream", step=_optimizer_on_a_stream),
    configuration("int8", options=_compressed(gather="int8", reduce="int8")),
    configuration("bf16 gradients", options=_compressed(reduce="bf16")),
]
CONFIGURATIONS = {one.name: one for one in _ALL}
