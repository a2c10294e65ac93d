"""Parameters in their modules' slots: dicts, ties and flags that change while training, against a single process."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.core import fully_shard
from tests.support import on_ranks
from tests.support.models import Composed
from tests.support.sharding import shard_children
from tests.support.twins import Twins, batch, square_loss

_loss = square_loss(3, 4)


@pytest.mark.parametrize(("world_size", "reshard_after_forward"), [(1, True), (2, False)])
@on_ranks()
def test_a_parameter_that_is_frozen_while_it_is_unsharded(
    rank: int, world_size: int, reshard_after_forward: bool
) -> None:
    """A hook freezes the parameter that it sees, the unsharded one; later steps find the sharded one frozen."""
    shard = functools.partial(shard_children, reshard_after_forward=reshard_after_forward)
    run = lambda module, x: module.second(module.first(x).tanh())  # noqa: E731
    build = lambda: Composed(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4))  # noqa: E731
    twins = Twins.of(rank, world_size, build, shard)
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


def _momentum() -> Any:
    """Its forward writes to the parameters of a teacher, whose gather is under way by then, the same in each run."""

    def run(model: Any, x: Tensor) -> Tensor:
        y = model.student(x)
        with torch.no_grad():
            for old, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                old.copy_(new.detach()).mul_(0.5)
        return y * model.teacher(x)

    return Composed(run, student=nn.Linear(4, 4), teacher=nn.Linear(4, 4).requires_grad_(False))


@on_ranks(1, 2)
def test_a_forward_that_writes_to_parameters_that_it_reads_later(rank: int, world_size: int) -> None:
    twins = Twins.of(rank, world_size, _momentum, shard_children)
    for _ in range(4):
        twins.step(_loss)


@on_ranks(1, 2)
def test_a_parameter_that_is_replaced_in_forward_is_refused(rank: int, world_size: int) -> None:
    """Stock ignores the other values."""

    def run(module: Any, x: Tensor) -> Tensor:
        others = {name: 2 * parameter.detach() for name, parameter in module.second.named_parameters()}
        return torch.func.functional_call(module.second, others, (module.first(x),))

    model = shard_children(Composed(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match=r"'second\.weight' was replaced on its module since the forward of"):
        model(batch(rank, 3, 4))
    model.reset_iter_state()
    for layer in (model.first, model.second):
        layer(batch(rank, 3, 4)).sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in layer.parameters())


def _language(separate: bool) -> Any:
    """A head that is tied to an embedding, whose group is the head's or one of its own."""
    run = lambda module, tokens: module.head(module.embedding(tokens))  # noqa: E731
    model: Any = Composed(run, embedding=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False))
    model.head.weight = model.embedding.weight
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
