"""Steps that end with `finalize_backward`, and unsharded memory that stays where it is."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
from torch import Tensor, nn

import shardkit.core as shardkit
from shardkit.core.module import groups_of
from tests.support import on_ranks, rank_mesh
from tests.support.models import Block
from tests.support.sharding import shard_each
from tests.support.twins import assert_equal, local_gradients


def _model(api: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Block(8, 12), Block(8, 12), nn.Linear(8, 4))
    return shard_each(*model[:2], model, api=api, mesh=rank_mesh((dist.get_world_size(),)))


def _backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(10 * dist.get_rank() + seed)
    model(torch.randn(2, 8)).square().sum().backward()


def _automatic(api: Any) -> list[Tensor]:
    model = _model(api)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        _backward(model, micro)
    return local_gradients(model)


def _manual(api: Any, async_op: bool) -> list[Tensor]:
    """The gradients after the second of two steps."""
    model = _model(api)
    for _ in range(2):
        model.zero_grad()
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        for micro in range(3):
            _backward(model, micro)
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
            handle.wait()
        model.set_manual_backward_finalization(False)
    return local_gradients(model)


@pytest.mark.parametrize(("world_size", "async_op"), [(1, False), (2, True)])
@on_ranks()
def test_finalized_gradients(rank: int, world_size: int, async_op: bool) -> None:
    seen = _manual(shardkit, async_op)
    assert_equal(seen, _automatic(stock))
    if hasattr(stock.FSDPModule, "finalize_backward"):
        assert_equal(seen, _manual(stock, async_op))


@on_ranks(2)
def test_partial_sums_do_not_get_lost(rank: int, world_size: int) -> None:
    """Backwards without an all-reduce, which is turned on again only before the end of the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    shard_each(model[0], model, mesh=rank_mesh((2, 1), ("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(2):
        _backward(model, micro)
    expected = local_gradients(model)
    model.zero_grad()
    model.set_manual_backward_finalization(True)
    model.set_requires_all_reduce(False)
    for micro in range(2):
        _backward(model, micro)
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    torch.testing.assert_close(local_gradients(model), expected)
    optimizer.step()


@on_ranks(2)
def test_refusals(rank: int, world_size: int) -> None:
    early = _model(shardkit)
    early[0].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match=r"was called on '0', below the root"):
        early(torch.randn(2, 8))
    model = _model(shardkit)
    model.finalize_backward()  # before the first forward there is nothing to do
    model.finalize_backward(async_op=True).wait()
    _backward(model, 0)
    with pytest.raises(RuntimeError, match=r"call set_manual_backward_finalization\(True\) before the forward"):
        model.finalize_backward()
    for method in (model[0].finalize_backward, lambda: model[0].set_manual_backward_finalization(True)):
        with pytest.raises(RuntimeError, match=r"must be called on the root, '0' is below it"):
            method()
    model.set_manual_backward_finalization(True)
    _backward(model, 0)
    with pytest.raises(RuntimeError, match="between a backward and its finalize_backward"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    for what in (model.finalize_backward, lambda: model(torch.randn(2, 8))):
        with pytest.raises(RuntimeError, match=r"have not been waited for; call wait\(\) on its handle first"):
            what()
    with pytest.raises(RuntimeError, match=r"call wait\(\) on the handle of finalize_backward"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match=r"reset_iter_state\(\) has dropped the gradients"):
        handle.wait()
    model.zero_grad()
    _backward(model, 0)
    model.finalize_backward()
    seen = local_gradients(model)
    model.set_manual_backward_finalization(False)
    model.zero_grad()
    _backward(model, 0)
    assert_equal(local_gradients(model), seen)


@on_ranks(2)
def test_roots_that_share_a_context(rank: int, world_size: int) -> None:
    first, second = _model(shardkit), _model(shardkit)
    shardkit.share_comm_ctx([first, second])
    first.set_manual_backward_finalization(True)
    _backward(first, 0)
    handle = first.finalize_backward(async_op=True)
    with pytest.raises(RuntimeError, match="of one that shares its communication context"):
        second(torch.randn(2, 8))
    with pytest.raises(RuntimeError, match="reset_iter_state was called, but the gradients"):
        second.reset_iter_state()
    handle.wait()
    _backward(second, 0)
    assert_equal(local_gradients(first), local_gradients(second))


# -- memory that stays -------------------------------------------------------------------------------------------------


def _addresses(model: nn.Module) -> dict[str, int]:
    for module in (model, model[0], model[1]):
        module.unshard()
    found = {fqn: parameter.data_ptr() for fqn, parameter in model.named_parameters()}
    for module in (model, model[0], model[1]):
        module.reshard()
    return found


@on_ranks(2)
def test_kept_storage_has_one_address(rank: int, world_size: int) -> None:
    model, plain = _model(shardkit), _model(shardkit)
    model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    expected = _addresses(model)
    kept = [param for group in groups_of(model, recurse=True) for param in group.params]
    for step in range(3):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            _backward(one, step)
            optimizer.step()
            optimizer.zero_grad()
        assert all(flat.untyped_storage().size() for param in kept for flat in param.flats)
        assert _addresses(model) == expected
    assert_equal(model.state_dict(), plain.state_dict())
    model[0].set_keep_unsharded_storage(False)
    sizes = [
        [flat.untyped_storage().size() for p in g.params for flat in p.flats] for g in groups_of(model, recurse=True)
    ]
    assert [any(of_group) for of_group in sizes] == [True, False, True]
    model.set_keep_unsharded_storage(False)
    assert not any(flat.untyped_storage().size() for param in kept for flat in param.flats)


@on_ranks(2)
def test_reset_keeps_or_drops_delivered_gradients_as_stock_does(rank: int, world_size: int) -> None:
    kept = []
    for api in (stock, shardkit):
        model = _model(api)
        _backward(model, 0)
        model.reset_iter_state()
        kept.append([parameter.grad is not None for parameter in model.parameters()])
    assert kept[0] == kept[1]
