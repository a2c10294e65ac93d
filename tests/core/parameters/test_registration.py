"""Parameters in their modules' slots: dicts, ties and flags that change while training, against a single process."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.core import fully_shard
from shardkit.core.engine.step import state_of
from tests.support import on_ranks
from tests.support.meshes import rank_mesh
from tests.support.twins import Twins, batch


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _shard(model: Any, **options: Any) -> None:
    for layer in (model.first, model.second):
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _loss(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank, 3, 4)).square().mean()


@on_ranks(1, 2)
def test_a_module_with_a_new_dict_of_parameters(rank: int, world_size: int) -> None:
    """As unpickling or a library that swaps a module's contents does."""
    twins = Twins.of(rank, world_size, _Two, _shard)
    twins.step(_loss)
    for model in (twins.sharded, twins.whole):
        model.first._parameters = dict(model.first._parameters)
    for _ in range(2):
        twins.step(_loss)


@pytest.mark.parametrize(("world_size", "reshard_after_forward"), [(1, True), (2, True), (2, False)])
@on_ranks()
def test_a_parameter_that_is_frozen_while_it_is_unsharded(
    rank: int, world_size: int, reshard_after_forward: bool
) -> None:
    """A hook freezes the parameter that it sees, the unsharded one; later steps find the sharded one frozen."""
    twins = Twins.of(rank, world_size, _Two, lambda model: _shard(model, reshard_after_forward=reshard_after_forward))
    twins.step(_loss)
    for model in (twins.sharded, twins.whole):

        def freeze(module: nn.Module, *_: Any) -> None:
            module.weight.requires_grad_(False)

        handle = model.first.register_forward_pre_hook(freeze)
        model(batch(rank, 3, 4))
        handle.remove()
    twins.sharded.reshard()
    assert not twins.sharded.first.weight.requires_grad
    twins.step(_loss)
    assert twins.sharded.first.weight.grad is None and twins.sharded.first.bias.grad is None


class _Momentum(nn.Module):
    """Its forward writes to the parameters of a teacher, whose gather is under way by then, the same in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.student(x)
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.copy_(new.detach()).mul_(0.5)
        return y * self.teacher(x)


@on_ranks(1, 2)
def test_a_forward_that_writes_to_parameters_that_it_reads_later(rank: int, world_size: int) -> None:
    def shard(model: Any) -> None:
        for layer in (model.student, model.teacher):
            fully_shard(layer)
        fully_shard(model)

    twins = Twins.of(rank, world_size, _Momentum, shard)
    for model in (twins.sharded, twins.whole):
        model.teacher.requires_grad_(False)
    for _ in range(4):
        twins.step(_loss)


class _Calls(_Two):
    """Computes with other values of its second layer."""

    def forward(self, x: Tensor) -> Tensor:
        others = {name: 2 * parameter.detach() for name, parameter in self.second.named_parameters()}
        return torch.func.functional_call(self.second, others, (self.first(x),))


@on_ranks(1, 2)
def test_a_parameter_that_is_replaced_in_forward_is_refused(rank: int, world_size: int) -> None:
    """Stock ignores the other values."""
    _shard(model := _Calls())
    with pytest.raises(RuntimeError, match=r"'second\.weight' was replaced on its module since the forward of"):
        model(batch(rank, 3, 4))
    model.reset_iter_state()
    for layer in (model.first, model.second):
        layer(batch(rank, 3, 4)).sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@on_ranks(1, 2)
def test_a_tie_to_a_group_that_was_trained(rank: int, world_size: int) -> None:
    """The second module comes when the first one has been trained; they share their only parameter."""
    twins = Twins.of(rank, world_size, _Tied, lambda model: fully_shard(model.first))
    for model in (twins.sharded, twins.whole):
        model.first(batch(rank, 3, 4)).square().mean().backward()
        model.first.zero_grad()
    fully_shard(twins.sharded.second)
    for _ in range(2):
        twins.step(_loss)


def _shard_blocks(model: Any) -> None:
    for block in model:
        fully_shard(block)
    fully_shard(model)


def _shard_blocks_of(model: Any) -> Any:
    _shard_blocks(model)
    return model


@on_ranks(1, 2)
def test_steps_in_the_middle_of_backward(rank: int, world_size: int) -> None:
    """Each parameter's optimizer steps as soon as its gradient is there, in the middle of backward."""
    during: list[bool] = []
    for accumulates in (False, True):
        twins = Twins.of(rank, world_size, lambda: nn.Sequential(*(_Two() for _ in range(4))), _shard_blocks)
        for parameter in twins.sharded.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer, model: Any = twins.sharded) -> None:
                during.append(state_of(model).schedule.backward is not None)
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            if accumulates:  # gradients of this backward are reduced with those of the next one
                twins.sharded.set_requires_gradient_sync(False)
                twins.backward(_loss)
                twins.sharded.set_requires_gradient_sync(True)
            twins.backward(_loss)
            torch.optim.SGD(twins.whole.parameters(), lr=0.1).step()
            twins.whole.zero_grad()
            twins.check_parameters()
    assert any(during) or world_size == 1


@on_ranks(2)
def test_steps_in_backward_after_zero_grad(rank: int, world_size: int) -> None:
    """Between forward and backward the user drops what waited: it is not stepped on, and nothing is refused."""
    model: Any = _shard_blocks_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8)).sum().backward()
    model.set_requires_gradient_sync(True)
    loss = model(torch.ones(2, 8)).sum()
    model.zero_grad()
    loss.backward()
    changed = [not torch.equal(a, b.full_tensor()) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed[:2] == [False, False] and changed[5]


@pytest.mark.parametrize(("world_size", "replicas"), [(1, False), (2, False), (2, True)])
@on_ranks()
def test_an_optimizer_of_several_groups_does_not_step_on_gradients_that_wait(
    rank: int, world_size: int, replicas: bool
) -> None:
    """The group that backward reduces first lets an optimizer of all groups step."""
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    mesh = rank_mesh((world_size, 1), ("replicas", "shards")) if replicas else None
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[3].bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    switch = model.set_requires_all_reduce if replicas else model.set_requires_gradient_sync
    switch(False)
    model(torch.ones(2, 64)).sum().backward()
    switch(True)
    with pytest.raises(RuntimeError, match=r"an optimizer steps, but a gradient of parameter '0.weight' waits for"):
        model(torch.ones(2, 64)).sum().backward()
    after = [parameter.full_tensor() for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def _language(separate: bool) -> Any:
    model = _Language()
    if separate:
        fully_shard(model.embedding)
    return fully_shard(model)


_TOKENS = torch.arange(4)


def _new(model: Any, factor: float = 1) -> nn.Parameter:
    return nn.Parameter(model.state_dict()["head.weight"].detach() * factor)


@pytest.mark.parametrize(("world_size", "separate"), [(1, True), (2, False), (2, True)])
@on_ranks()
def test_a_tie_that_is_cut_after_sharding_is_refused(rank: int, world_size: int, separate: bool) -> None:
    """A tied parameter keeps one value, so the other would be lost: in stock it is lost without a word."""
    refused = functools.partial(pytest.raises, ValueError, match="' is tied, and 'weight' of .* its other 1 use does")
    for slot in ("embedding", "head"):
        for trained in (False, True):
            model = _language(separate)
            if trained:
                model(_TOKENS).sum().backward()
            getattr(model, slot).weight = _new(model)
            with refused():
                model(_TOKENS)
    for then in (
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.load_state_dict({}, strict=False, assign=True),
    ):
        model = _language(separate)
        model.head.weight = _new(model)
        with refused():
            then(model)
            model(_TOKENS)
    model = _language(separate)
    model.embedding.weight, model.head.weight = _new(model), _new(model, 2)
    with refused():
        model(_TOKENS)
    model = _language(separate)
    model.load_state_dict({"embedding.weight": _new(model, 3).detach()}, strict=False, assign=True)
    with refused():
        model(_TOKENS)
    model.head.weight = model.embedding.weight
    model(_TOKENS)


def _assign_to_both(model: Any) -> float:
    model.embedding.weight = model.head.weight = _new(model, 3)
    return 3


def _load_both(model: Any) -> float:
    model.load_state_dict({fqn: value.detach() * 3 for fqn, value in model.state_dict().items()}, assign=True)
    return 3


def _call_with_others(model: Any) -> float:
    """Restores the parameters at its end."""
    others = {fqn: parameter.detach() * 2 for fqn, parameter in model.named_parameters()}
    expected = model(_TOKENS).detach() * 4
    model.reshard()
    with torch.no_grad():
        assert torch.allclose(torch.func.functional_call(model, others, (_TOKENS,)), expected)
    model(_TOKENS)
    model.reshard()
    return 1


@pytest.mark.parametrize(("world_size", "separate"), [(1, False), (2, False), (2, True)])
@on_ranks()
def test_a_tie_that_gets_other_values(rank: int, world_size: int, separate: bool) -> None:
    """The model can be trained, moved and cast after each of them."""
    for change in (_assign_to_both, _load_both, _call_with_others):
        model = _language(separate)
        before = model(_TOKENS).detach()
        model.reshard()
        factor = change(model)
        assert model.head.weight is model.embedding.weight
        for dtype in (torch.float32, torch.float64):
            model.to(dtype)
            output = model(_TOKENS)
            assert torch.allclose(output.float(), before * factor**2, atol=1e-5), change
            output.sum().backward()
            assert model.head.weight is model.embedding.weight
            assert model.head.weight.grad is not None
            model.zero_grad()


def _both(model: Any) -> None:
    fully_shard(model.embedding)
    fully_shard(model.head)


def _root(model: Any) -> None:
    fully_shard(model)


@pytest.mark.parametrize(("world_size", "shard"), [(1, _both), (2, _root), (2, _both)])
@on_ranks()
def test_a_state_dict_with_different_values_for_a_tie_is_refused(
    rank: int, world_size: int, shard: Callable[[Any], Any]
) -> None:
    """They may be tied by the model afterwards; else the next forward refuses them."""
    for tied_after in (False, True):
        shard(model := _Language())
        state = {"embedding.weight": _new(model, 2).detach(), "head.weight": _new(model, 3).detach()}
        model.load_state_dict(state, strict=False, assign=True)
        if tied_after:
            model.head.weight = model.embedding.weight
            model(_TOKENS).sum().backward()
            assert torch.equal(model.state_dict()["head.weight"].to_local(), state["embedding.weight"].to_local())
            continue
        with pytest.raises(ValueError, match=r"' is tied, and 'weight' of a .* \(or a state dict gave it values\)"):
            model(_TOKENS)
