"""`.data =` on a parameter of fully_shard raises an error with its name; stock FSDP2 drops the write silently."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardkit.core import fully_shard
from tests.support import on_ranks, rank_mesh
from tests.support.sharding import shard_children


def _model(mesh: DeviceMesh | None = None, reshard_after_forward: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    return shard_children(model, mesh=mesh, reshard_after_forward=reshard_after_forward)


def _step(model: nn.Module) -> torch.Tensor:
    output = model(torch.ones(2, 4))
    output.sum().backward()
    return output.detach()


_LOST = r"^the data of parameter '0\.weight' was replaced \(`parameter\.data = \.\.\.`\)\. .*DTensor.*Write in place"
_LOST_UNSHARDED = r"^the data of parameter '0\.weight' was replaced .* while it was unsharded.*Write to the sharded"
_LOST_GRADIENT = r"^the data of the gradient of parameter '0\.weight' was replaced .*Write in place, or assign"


@on_ranks(2)
def test_data_of_sharded_parameters(rank: int, world_size: int) -> None:
    for value, reshard_after_forward, used_before in (
        (lambda p: p.detach() * 2, True, False),
        (lambda p: torch.ones(p.shape), False, True),
        (lambda p: torch.ones(2, 2), True, True),
    ):
        model = _model(reshard_after_forward=reshard_after_forward)
        if used_before:
            _step(model)
        model.reshard()
        weight = model[0].weight
        before = weight.data
        weight.data = value(weight)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=_LOST):
                _step(model)
            model.reset_iter_state()
        weight.data = before
        _step(model)


@on_ranks(2)
def test_writes_that_reach_the_parameter(rank: int, world_size: int) -> None:
    """Weights that are swapped and put back, moves, casts and loads do not count as lost writes."""
    model = _model()
    expected = _step(model)
    backups = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 2
    for parameter, backup in zip(model.parameters(), backups, strict=True):
        parameter.data = backup
    torch.testing.assert_close(_step(model), expected, rtol=0, atol=0)
    model.double()
    model.float()
    model.to("cpu")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.load_state_dict(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.0)
            parameter.copy_(parameter.data.clone())
    torch.testing.assert_close(_step(model), expected, rtol=0, atol=0)
    other = nn.Parameter(model[0].weight.detach() * 2)
    model[0].weight = other
    assert not torch.equal(_step(model), expected)


@on_ranks(2)
def test_data_of_unsharded_parameters(rank: int, world_size: int) -> None:
    """Also where the unsharded parameter is the shard itself."""
    for mesh in (None, rank_mesh((2, 1), ("replicate", "shard"))):
        model = _model(mesh)
        expected = _step(model)
        for reshard in (True, False):
            model[0].unshard()
            unsharded = model[0].weight
            assert not isinstance(unsharded, DTensor)
            unsharded.data = torch.zeros_like(unsharded)
            if reshard:
                model[0].reshard()
            with pytest.raises(RuntimeError, match=_LOST_UNSHARDED):
                _step(model)
            model.reset_iter_state()
            torch.testing.assert_close(_step(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("blocks", [False, True])
@on_ranks(2)
def test_writes_in_place_to_unsharded_parameters(rank: int, world_size: int, blocks: bool) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 4))
    if blocks:
        fully_shard(model[0])
    fully_shard(model)
    x = torch.arange(8)
    model(x).sum().backward()  # renormalises the rows that it looks up, in place
    written = "' was replaced .* or written to in place while it was unsharded"
    with pytest.raises(RuntimeError, match=r"'0\.weight" + written):
        model(x)
    model.reset_iter_state()
    model[0].max_norm = None
    model(x)
    nn.init.zeros_(model[1].weight)
    with pytest.raises(RuntimeError, match=r"'1\.weight" + written):
        model(x)
    model.reset_iter_state()
    model(x).sum().backward()
    nn.init.zeros_(model[1].weight)
    model(x).sum().backward()


@on_ranks(2)
def test_data_of_gradients(rank: int, world_size: int) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[0].weight
    for _ in range(2):  # also with an optimizer that is known by then
        _step(model)
        before = weight.to_local().clone()
        weight.grad.data = weight.grad * 0
        with pytest.raises(RuntimeError, match=_LOST_GRADIENT):
            optimizer.step()
        assert torch.equal(weight.to_local(), before)
        optimizer.zero_grad()
        _step(model)
        weight.grad.data.mul_(0)
        optimizer.step()
        assert torch.equal(weight.to_local(), before)
        weight.grad = weight.grad + 1
        optimizer.step()
        assert torch.equal(weight.to_local(), before - 0.1)
        optimizer.zero_grad()
