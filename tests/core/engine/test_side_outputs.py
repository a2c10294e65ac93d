"""Backward that enters a block by other ways than its outputs, against one process: schedule.py, [Ready in order].

In each program a block computes something beside its output after the output, so that backward reaches the block
through it first, while the gather of the block's parameters is under way.
"""

import dataclasses
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardkit.core import fully_shard, register_fsdp_forward_method
from tests.support import on_ranks, rank_mesh, run_ranks
from tests.support.meshes import networked_mesh
from tests.support.twins import Twins, batch

WIDTH = 96  # large enough for a chunk to travel by itself, in place
MESHES = {"shared": rank_mesh, "networked": networked_mesh}

GLOBALLY_KEPT: list[Tensor] = []


@dataclasses.dataclass
class Output:
    """An output that a block may return instead of a tensor."""

    hidden: Tensor
    aux: Tensor


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("aux", "hidden")

    def __init__(self, hidden: Tensor, aux: Tensor) -> None:
        self.hidden, self.aux = hidden, aux


class Block(nn.Module):
    """Linear layers, and a router whose loss goes where `keep` puts it; `keep` returns the block's output."""

    def __init__(self, keep: Callable[["Block", Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.router = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.keep = keep
        self.losses: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Any:
        hidden = x + self.second(torch.tanh(self.first(x)))
        aux = self.router(torch.tanh(self.router(x))).square().mean()
        return self.keep(self, hidden, aux)


class Model(nn.Module):
    """Blocks between two linear layers of the root; returns the output and the sum of the losses that blocks kept."""

    def __init__(self, keep: Callable[[Block, Tensor, Tensor], Any], take: Callable[[Block, Any], Any]) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(keep) for _ in range(5))
        self.take = take

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        GLOBALLY_KEPT.clear()
        x, total = self.inp(x), torch.zeros(())
        for block in self.blocks:
            x, aux = self.take(block, block(x))
            total = total + aux
        return self.out(x), total


def _keep_attribute(block: Block, hidden: Tensor, aux: Tensor) -> Tensor:
    block.aux = aux
    return hidden


def _keep_in_dict(block: Block, hidden: Tensor, aux: Tensor) -> Tensor:
    block.losses["router"] = [aux]
    return hidden


def _keep_in_global(block: Block, hidden: Tensor, aux: Tensor) -> Tensor:
    GLOBALLY_KEPT.append(aux)
    return hidden


def _closure(block: Block, hidden: Tensor, aux: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (hidden, aux)


def _object(block: Block, hidden: Tensor, aux: Tensor) -> types.SimpleNamespace:
    return types.SimpleNamespace(hidden=hidden, inner=types.SimpleNamespace(aux=aux))


WAYS: dict[str, tuple[Callable[[Block, Tensor, Tensor], Any], Callable[[Block, Any], Any]]] = {
    "attribute": (_keep_attribute, lambda block, hidden: (hidden, block.aux)),
    "dict of lists": (_keep_in_dict, lambda block, hidden: (hidden, block.losses["router"][0])),
    "global": (_keep_in_global, lambda block, hidden: (hidden, GLOBALLY_KEPT[-1])),
    "dataclass": (lambda _, hidden, aux: Output(hidden, aux), lambda _, output: (output.hidden, output.aux)),
    "object": (_object, lambda _, output: (output.hidden, output.inner.aux)),
    "slots": (lambda _, hidden, aux: Slotted(hidden, aux), lambda _, output: (output.hidden, output.aux)),
    "closure": (_closure, lambda _, output: output()),
}


def _twins(rank: int, world_size: int, kind: str, way: str, **options: Any) -> Twins:
    mesh = MESHES[kind]((world_size,))

    def shard(model: Model) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh)

    return Twins.of(rank, world_size, lambda: Model(*WAYS[way]), shard)


def _both(model: nn.Module, rank: int) -> Tensor:
    output, aux = model(batch(rank, 8, WIDTH))
    loss: Tensor = output.square().mean() + aux
    return loss


@pytest.mark.daily(kind=["networked"], way=["attribute", "dict of lists", "global", "closure"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MESHES)
@on_ranks(2)
def test_a_loss_kept_aside(rank: int, world_size: int, kind: str, way: str) -> None:
    for depth in (1, 0, 2):
        twins = _twins(rank, world_size, kind, way)
        twins.sharded.set_prefetch_depth(depth)
        for _ in range(3):
            twins.step(_both)


# Which of four forwards each backward is over, in order.
BACKWARDS = {
    "first in, first out": [(0,), (1,), (2,), (3,)],
    "last in, first out": [(3,), (2,), (1,), (0,)],
    "together": [(1,), (0, 3), (2,)],
    "all but one": [(0, 2, 3), (1,)],
}


def _micro_batches(rank: int, world_size: int, kind: str, way: str, plan: str, depth: int, inputs: bool) -> None:
    """All forwards come first. With `inputs`, backward is seen to leave each root, as in later stages of pipelines."""
    twins = _twins(rank, world_size, kind, way)
    twins.sharded.set_prefetch_depth(depth)

    def losses(model: nn.Module, rank: int) -> list[Tensor]:
        outputs = [model(batch(rank + 7 * number, 8, WIDTH).requires_grad_(inputs)) for number in range(4)]
        return [output.square().mean() + aux for output, aux in outputs]

    for _ in range(2):
        mine = losses(twins.sharded, rank)
        theirs = [losses(twins.whole, other) for other in range(world_size)]
        for together in BACKWARDS[plan]:
            twins.sharded.set_is_last_backward(together == BACKWARDS[plan][-1])
            sum(mine[number] for number in together).backward()
            for one in theirs:
                (sum(one[number] for number in together) / world_size).backward()
        twins.check_gradients()
        twins.update()
        twins.check_parameters()


@pytest.mark.daily(kind=["networked"], depth=[1])
@pytest.mark.parametrize("inputs", [False, True], ids=["tokens", "hidden states"])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("plan", BACKWARDS)
@pytest.mark.parametrize("kind", MESHES)
def test_backwards_of_micro_batches(kind: str, plan: str, depth: int, inputs: bool) -> None:
    for way in ("attribute", "global"):
        run_ranks(2, _micro_batches, kind, way, plan, depth, inputs)


# -- outputs that their user changes in place --------------------------------------------------------------------------


class Viewed(nn.Module):
    """Blocks whose output is a view, changed in place by the caller: the view's node, and hooks on it, are replaced."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Views() for _ in range(4))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            self.change(x)
        return x


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))).clone().view(2, -1, WIDTH)[:, ::2].transpose(0, 1)


def _add_one(x: Tensor) -> None:
    x += 1


def _scale_a_part(x: Tensor) -> None:
    x[..., :3].mul_(2)


def _fill_a_part(x: Tensor) -> None:
    x[0] = 0


CHANGES = {"add": _add_one, "scale a part": _scale_a_part, "fill a part": _fill_a_part}


def _replace(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return (output * 3)[:]


@pytest.mark.daily(kind=["networked"])
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "with a hook that replaces outputs"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MESHES)
@on_ranks(2)
def test_outputs_changed_in_place(rank: int, world_size: int, kind: str, change: str, hooked: bool) -> None:
    mesh = MESHES[kind]((world_size,))

    def shard(model: Viewed) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if hooked:
            for block in model.blocks:
                block.register_forward_hook(_replace)

    twins = Twins.of(rank, world_size, lambda: Viewed(CHANGES[change]), shard)
    if hooked:
        for block in twins.whole.blocks:
            block.register_forward_hook(_replace)
    for _ in range(3):
        twins.step(lambda model, rank: model(batch(rank, 64, WIDTH)).square().sum())


# -- cases that cannot be supported raise ------------------------------------------------------------------------------


def _unnoticed(rank: int, world_size: int, accumulated: bool) -> str:
    """A loss in a global variable, and nothing else: no hook is called, and no gradient would be reduced."""
    model = Model(*WAYS["global"])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if accumulated:
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(batch(rank, 8, WIDTH))[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(rank, 8, WIDTH))
    GLOBALLY_KEPT[-1].backward()
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_that_nobody_reduced_are_no_step(accumulated: bool) -> None:
    for message in run_ranks(2, _unnoticed, accumulated):
        assert "the gradient of parameter 'inp.weight' was not reduced" in message
        assert "set it as an attribute of the module" in message


class Inside(nn.Module):
    """A block that puts a hook on its input, or changes it in place."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if self.act == "hook":
            x.register_hook(lambda gradient: gradient * 3)
        elif self.act == "change":
            x += 1
        elif self.act == "change a view":
            x[0].mul_(2)
        return x if self.act == "pass" else self.linear(x)  # type: ignore[no-any-return]


class Around(nn.Module):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.inp, self.block = nn.Linear(WIDTH, WIDTH), Inside(act)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return x * 2 + self.block(x)


def _around(act: str) -> Callable[[int, int], Twins]:
    def twins(rank: int, world_size: int) -> Twins:
        return Twins.of(
            rank, world_size, lambda: Around(act), lambda model: [fully_shard(model.block), fully_shard(model)]
        )

    return twins


@pytest.mark.parametrize("act", ["hook", "pass"])
@on_ranks(2)
def test_what_a_block_does_to_its_input(rank: int, world_size: int, act: str) -> None:
    twins = _around(act)(rank, world_size)
    if act == "pass":
        for parameter in (*twins.whole.block.parameters(), *twins.sharded.block.parameters()):
            parameter.requires_grad_(False)
    for _ in range(2):
        twins.step(lambda model, rank: model(batch(rank, 8, WIDTH)).square().sum())


def _changes_its_input(rank: int, world_size: int, act: str) -> str:
    model = _around(act)(rank, world_size).sharded
    with pytest.raises(RuntimeError) as error:
        model(batch(rank, 8, WIDTH))
    return "\n".join([str(error.value), *error.value.__notes__])


@pytest.mark.parametrize("act", ["change", "change a view"])
def test_an_input_changed_in_place_names_the_block(act: str) -> None:
    for message in run_ranks(2, _changes_its_input, act):
        assert "'block' changes one of its inputs in place" in message
        assert message.count("clone the input first") == 1


def _penalty(model: nn.Module, rank: int) -> Tensor:
    """A loss with the norm of the gradient of the inputs: a backward through a backward."""
    x = batch(rank, 8, WIDTH).requires_grad_()
    output = model(x)[0]
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return output.square().mean() + gradient.square().mean()


@pytest.mark.parametrize("kind", MESHES)
@on_ranks(2)
def test_a_gradient_penalty(rank: int, world_size: int, kind: str) -> None:
    twins = _twins(rank, world_size, kind, "attribute")
    for _ in range(2):
        twins.step(_penalty, lr=0.01)


class _Force(nn.Module):
    """Adds the gradient of a sharded module's output to its input: an inner backward that builds a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(inner).sin().sum(), inner, create_graph=True)
        return x + force


class _Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.force = nn.Linear(WIDTH, WIDTH), _Force()
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.force, self.inp(x), use_reentrant=True)
        for one in self.after:
            x = torch.tanh(one(x))
        return x.square().mean()


@on_ranks(2)
def test_a_recomputation_whose_inner_backward_builds_a_graph(rank: int, world_size: int) -> None:
    """In one backward over two forwards; stock ends with an error of torch, or a crash."""

    def shard(model: Any) -> None:
        for one in (model.force.energy, *model.after, model):
            fully_shard(one)

    twins = Twins.of(rank, world_size, _Molecule, shard)
    for _ in range(2):
        twins.step(lambda model, of: model(batch(of, 3, WIDTH)) + model(batch(of + 10, 3, WIDTH)))


def _two_threads(rank: int, world_size: int) -> str:
    model, inside, go_on = Around("none"), threading.Event(), threading.Event()
    fully_shard(model.block)
    fully_shard(model)

    def stop(*unused: Any) -> None:
        inside.set()
        go_on.wait(60)

    model.block.linear.register_forward_pre_hook(stop)
    thread = threading.Thread(target=lambda: model(batch(rank, 8, WIDTH)))
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(RuntimeError) as error:
            model(batch(rank, 8, WIDTH))
    finally:
        go_on.set()
        thread.join()
    model(batch(rank, 8, WIDTH)).sum().backward()
    return str(error.value)


def test_a_second_forward_in_another_thread_is_refused() -> None:
    for message in run_ranks(2, _two_threads):
        assert "forward of 'FSDPAround' begins, but the forward of 'FSDPAround' has not ended" in message


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return self.linear(x) if times == 1 else self(self.linear(x), times - 1)

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x, 1), 1)


@on_ranks(2)
def test_a_root_that_calls_itself(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _Twice, fully_shard)
    with pytest.raises(RuntimeError, match=r"forward of 'FSDP_Twice' begins, .* has not ended .*calls itself"):
        twins.sharded(batch(rank, 2, 8))
    twins.sharded.reset_iter_state()
    register_fsdp_forward_method(twins.sharded, "twice")
    for _ in range(2):
        twins.step(lambda model, rank: model.twice(batch(rank, 2, 8)).square().sum())


class _Prompted(nn.Module):
    """Frozen, and its output is unused: only a global list leads to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.prompts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        GLOBALLY_KEPT.append(self.second((self.first(x) * self.prompts[0]).tanh()).square().sum())
        return x.detach()


@on_ranks(2)
def test_a_frozen_root_stays_for_a_graph_that_no_output_shows(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, lambda: _Prompted().requires_grad_(False), fully_shard)
    gradients = []
    for model in (twins.sharded, twins.whole):
        model.prompts = [torch.ones(4, requires_grad=True)]
        model(torch.ones(2, 4))
        GLOBALLY_KEPT.pop().backward()
        gradients.append(model.prompts[0].grad)
    torch.testing.assert_close(*gradients)
