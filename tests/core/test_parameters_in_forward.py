"""Uses of parameters, whose memory comes and goes, in forward: each works, or is an error that names the module."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.core import clip_grad_norm_, fully_shard
from tests.support import rank_mesh, run_ranks


class Keeping(nn.Linear):
    """Keeps a view of its weight, and keeps the weight itself if told so."""

    whole = False

    def forward(self, x: Tensor) -> Tensor:
        self.turned = self.weight.t()
        self.plain = {"flat": self.weight.detach().flatten()}
        self.kept = [self.weight] if self.whole else []
        return x @ self.turned + self.plain["flat"][0]


def _keeping_model(world_size: int) -> nn.Sequential:
    model = nn.Sequential(Keeping(8, 8), Keeping(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=rank_mesh((world_size,)))
    return model


def _kept_views(rank: int, world_size: int) -> None:
    model = _keeping_model(world_size)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        for view in (model[0].turned, model[1].turned, model[0].plain["flat"]):
            for read in (torch.relu, torch.Tensor.sum, lambda one: torch.cat([one, one]), lambda one: 2 * one, repr):
                with pytest.raises(RuntimeError, match=r"a view of a parameter that '[01]' keeps .*Keep a clone"):
                    read(view)
        model[0].unshard()
        assert torch.equal(model[0].turned.t(), model[0].weight)
        assert model[0].plain["flat"].sum().isfinite()
        model[0].reshard()
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 8))
        with pytest.raises(RuntimeError, match="that '0' keeps"):
            model[0].turned.mean()
        model.train()


def test_view_that_is_kept_and_read_later() -> None:
    run_ranks(2, _kept_views)


def _kept_parameter(rank: int, world_size: int) -> None:
    model = _keeping_model(world_size)
    model[1].whole = True
    with pytest.raises(RuntimeError, match=r"'1' keeps parameter '1\.weight' beyond forward.*Keep a clone"):
        model(torch.ones(2, 8))


def test_parameter_that_is_kept_in_a_list() -> None:
    run_ranks(2, _kept_parameter)


def _kept_by_one_rank(rank: int, world_size: int) -> None:
    model = _keeping_model(world_size)
    model[1].whole = True
    model(torch.ones(2, 8)).sum().backward()
    assert model[0].turned.sum().isfinite()


def test_views_stay_where_nothing_is_freed() -> None:
    run_ranks(1, _kept_by_one_rank)


def _clipped_while_unsharded(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for module in (model[0], model):
        fully_shard(module, mesh=rank_mesh((world_size,)))
    model(torch.ones(2, 8)).square().sum().backward()
    model(torch.ones(2, 8))  # no backward follows, so the root's parameters are still unsharded
    assert not isinstance(model[1].weight, DTensor)
    clip_grad_norm_(model.parameters(), 0.5)
    model.reshard()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    assert abs(float(torch.nn.utils.get_total_norm(gradients)) - 0.5) < 1e-4


def test_clipping_while_parameters_are_unsharded() -> None:
    run_ranks(2, _clipped_while_unsharded)


def _weight_of_another_call(rank: int, world_size: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) @ self.second.weight

    model = Model()
    for module in (model.second, model):
        fully_shard(module, mesh=rank_mesh((world_size,)))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as raised:
        model(torch.randn(2, 8))
    assert "'FSDPModel' computes with a sharded parameter" in "".join(raised.value.__notes__)


def test_parameter_of_another_call() -> None:
    run_ranks(2, _weight_of_another_call)


def _weight_as_array(rank: int, world_size: int) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.weight.detach().numpy()
            return super().forward(x)

    model = nn.Sequential(Model(8, 8), nn.Linear(8, 8))
    for module in (*model, model):
        fully_shard(module, mesh=rank_mesh((world_size,)))
    model.set_prefetch_depth(0)
    with pytest.raises(RuntimeError, match=r"the memory of parameter '0\.weight' cannot be freed.*numpy"):
        model(torch.randn(2, 8))


def test_array_over_a_parameter() -> None:
    run_ranks(2, _weight_as_array, isolated=True)
