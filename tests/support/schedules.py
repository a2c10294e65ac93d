"""Schedules of one training step: from plain forward, backward, step to accumulation and pipeline-style micro-batches.

A schedule is a function of a :class:`Run` and the step's number. It adds its observations to the trace.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.models import ModelSpec
from tests.support.trace import Trace

LEARNING_RATE = 0.05


@dataclass
class Run:
    """One training run in progress; ``api`` is the module that offers fully_shard and its companions."""

    rank: int
    api: Any
    spec: ModelSpec
    model: nn.Module
    optimizer: torch.optim.Optimizer
    trace: Trace
    gathered_step: int | None = None
    reshard_before_update: bool = False

    def inputs(self, step: int, micro: int = 0) -> tuple[Tensor, ...]:
        """Draw this rank's micro-batch."""
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + micro)
        return self.spec.inputs(generator)

    def loss(self, step: int, micro: int = 0, dtype: torch.dtype | None = None) -> Tensor:
        """Forward one micro-batch; ``dtype`` casts floating-point inputs."""
        inputs = self.inputs(step, micro)
        output = self.model(*(x.to(dtype) if dtype and x.is_floating_point() else x for x in inputs))
        loss = self.spec.loss(output)
        self.trace.add_tree(f"step {step}.{micro}: output", output)
        self.trace.add(f"step {step}.{micro}: loss", loss)
        return loss

    def sharded_modules(self) -> Iterator[Any]:
        """Walk the modules that fully_shard was applied to, outermost first."""
        return (module for module in self.model.modules() if isinstance(module, self.api.FSDPModule))

    def record_gradients(self, step: int, where: str) -> None:
        """Record gradients after a backward; whole ones as well in the step that gathers."""
        self.trace.add_gradients(f"step {step} {where}", self.model, full=step == self.gathered_step)

    def micro_batch(self, step: int, micro: int) -> None:
        """Forward and backward of one of several micro-batches."""
        self.loss(step, micro).backward()
        self.record_gradients(step, f"after micro-batch {micro}")

    def finish(self, step: int, loss: Tensor) -> None:
        """The only backward of a step, and its update."""
        loss.backward()
        self.record_gradients(step, "after backward")
        self.update()

    def update(self) -> None:
        """Step the optimizer and drop the gradients."""
        if self.reshard_before_update:
            for module in self.sharded_modules():
                module.reshard()
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(run: Run, step: int) -> None:
    run.finish(step, run.loss(step))


def accumulate(setter: str, *values: bool) -> Callable[[Run, int], None]:
    """Three micro-batches, before each of which the model's `setter` is given a value."""

    def schedule(run: Run, step: int) -> None:
        for micro, value in enumerate(values):
            getattr(run.model, setter)(value)
            run.micro_batch(step, micro)
        run.update()

    return schedule


def accumulate_one_block_without_sync(run: Run, step: int) -> None:
    """Only the first sharded block holds its reduction back (``recurse=False``)."""
    block = run.spec.blocks(run.model)[0]
    for micro in range(2):
        block.set_requires_gradient_sync(micro == 1, recurse=False)
        run.micro_batch(step, micro)
    run.update()


def several_forwards_one_backward(run: Run, step: int) -> None:
    run.finish(step, run.loss(step, 0) + 2 * run.loss(step, 1))


def several_forwards_then_backwards(run: Run, step: int) -> None:
    losses = [run.loss(step, micro) for micro in range(3)]
    for micro in (2, 0, 1):
        losses[micro].backward()
        run.record_gradients(step, f"after the backward of {micro}")
    run.update()


def one_forward_one_backward(run: Run, step: int) -> None:
    """A 1F1B pipeline stage: parameters stay unsharded and gradients unreduced until the last backward."""
    losses = [run.loss(step, 0)]
    for micro in (1, 2, 3, None):
        if micro is not None:
            losses.append(run.loss(step, micro))
        last = micro is None
        run.model.set_is_last_backward(last)
        run.model.set_reshard_after_backward(last)
        run.model.set_requires_gradient_sync(last)
        losses.pop(0).backward()
    run.record_gradients(step, "after the last backward")
    run.update()


def retained_graph(run: Run, step: int) -> None:
    """Two backwards through one graph."""
    loss = run.loss(step)
    loss.backward(retain_graph=True)
    run.record_gradients(step, "after the first backward")
    (2 * loss).backward()
    run.record_gradients(step, "after the second backward")
    run.update()


def evaluation_between(run: Run, step: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.trace.add_tree(f"step {step}: evaluated", run.model(*run.inputs(step, 5)))
    run.model.train()
    plain(run, step)
    with torch.inference_mode():
        inferred = pytree.tree_map_only(Tensor, Tensor.tolist, run.model(*run.inputs(step, 6)))
        run.trace.add_tree(f"step {step}: inferred", inferred)
    # Stock's root stays whole after a forward without a backward, and parameters are compared sharded.
    for module in run.sharded_modules():
        module.reshard()


def forward_that_is_dropped(run: Run, step: int) -> None:
    """A forward with grad whose loss is never used."""
    run.loss(step, 7)
    plain(run, step)


def explicit_unshard(run: Run, step: int) -> None:
    """Gather ahead by hand, once waited for and once not, look at a whole parameter, reshard by hand."""
    first, *others = run.sharded_modules()
    handle = first.unshard(async_op=True)
    for module in others:
        module.unshard(async_op=True)
    handle.wait()
    for name, parameter in run.model.named_parameters(recurse=False):
        run.trace.add(f"step {step}: unsharded {name}", parameter)
    run.loss(step).backward()
    for module in run.sharded_modules():
        module.reshard()
        module.unshard()
        for name, parameter in module.named_parameters(recurse=False):
            run.trace.add(f"step {step}: unsharded {name} of {type(module).__name__}", parameter)
        module.reshard()
    run.record_gradients(step, "after backward")
    run.update()


def another_method(run: Run, step: int) -> None:
    """Train through ``score``, registered as a forward method, beside ``forward``."""
    if step == 0:
        run.api.register_fsdp_forward_method(run.model, "score")
    loss = run.model.score(*run.inputs(step)).square().mean()
    loss.backward()
    run.record_gradients(step, "after the other method")
    run.loss(step, 1).backward()
    run.record_gradients(step, "after forward")
    run.update()


def optimizer_in_backward(run: Run, step: int) -> None:
    """Parameters update themselves in their post-accumulate-grad hooks, and drop their gradients there."""

    def update(parameter: Tensor, fqn: str) -> None:
        run.trace.add(f"gradient that the hook of {fqn} saw", parameter.grad)
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
        parameter.grad = None

    if step == 0:
        for fqn, parameter in run.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(update, fqn=fqn))
    run.loss(step).backward()
    run.record_gradients(step, "after backward")


def clipped(run: Run, step: int) -> None:
    run.loss(step).backward()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=0.05)
    run.trace.add(f"step {step}: norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    run.record_gradients(step, "after clipping")
    run.update()


def grad_scaler(run: Run, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scaler.scale(run.loss(step)).backward()
    run.record_gradients(step, "scaled")
    scaler.unscale_(run.optimizer)
    run.record_gradients(step, "unscaled")
    scaler.step(run.optimizer)
    scaler.update()
    run.trace.add(f"step {step}: scale", scaler.get_scale())
    run.optimizer.zero_grad()


def gradients_kept(run: Run, step: int) -> None:
    """``zero_grad(set_to_none=False)``: gradients are accumulated into tensors that stay the same."""
    run.loss(step).backward()
    run.record_gradients(step, "after backward")
    before = {fqn: id(parameter.grad) for fqn, parameter in run.model.named_parameters() if parameter.grad is not None}
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    after = {fqn: id(parameter.grad) for fqn, parameter in run.model.named_parameters() if parameter.grad is not None}
    run.trace.add(f"step {step}: the gradients stay the same tensors", before == after)


def inputs_in_bfloat16(run: Run, step: int) -> None:
    """For a policy that leaves inputs alone: the caller casts them."""
    run.finish(step, run.loss(step, dtype=torch.bfloat16))


def inputs_that_need_gradients(run: Run, step: int) -> None:
    """The model is a part of a larger graph: its input needs a gradient too."""
    inputs = [x.requires_grad_(x.is_floating_point()) for x in run.inputs(step)]
    run.spec.loss(run.model(*inputs)).backward()
    run.trace.add_tree(f"step {step}: gradient of the inputs", [x.grad for x in inputs])
    run.record_gradients(step, "after backward")
    run.update()
