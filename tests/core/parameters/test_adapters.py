"""The interface for parameters that are DTensors already: how core finds an adapter, and which questions it asks."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from shardkit.core import fully_shard
from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters import adapters
from shardkit.core.parameters.adapters import Holder
from shardkit.core.torch_compat import local_of, new_dtensor
from tests.core.parameters.installed_adapters import install_adapter, installed_adapters, no_installed_adapters
from tests.support import on_ranks, rank_mesh, run_ranks


class Doubling:
    """A form with a mark on everything that it is asked for: doubles gradients."""

    sums_elsewhere = False

    def __init__(self, parameter: DTensor, mesh: DataParallelMesh, dim: int | None) -> None:
        self.shape, self.mesh, self.placements = parameter.shape, mesh.mesh, mesh.placements(dim)
        self.asked: list[str] = []

    def plain(self, parameter: torch.Tensor) -> torch.Tensor:
        return local_of(parameter)

    def sharded(self, shard: torch.Tensor) -> DTensor:
        self.asked.append("sharded")
        return new_dtensor(shard, self.mesh, self.placements, self.shape)

    def local(self, shard: torch.Tensor) -> torch.Tensor:
        self.asked.append("local")
        return shard

    def shard(self, local: torch.Tensor) -> torch.Tensor:
        self.asked.append("shard")
        return local

    def unsharded(self, whole: torch.Tensor) -> torch.Tensor:
        self.asked.append("unsharded")
        return whole

    def gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        self.asked.append("gradient")
        return gradient * 2


class Adapter:
    def __init__(self) -> None:
        self.forms: list[Doubling] = []

    def form(
        self, parameter: DTensor, fqn: str, mesh: DataParallelMesh, dim: int | None, holders: Sequence[Holder]
    ) -> Doubling:
        assert [module._parameters[name] is parameter for module, name in holders] == [True], "the module's own"
        self.forms.append(Doubling(parameter, mesh, dim))
        return self.forms[-1]


adapter = Adapter()


def replicated(model: nn.Module) -> nn.Module:
    for name, parameter in list(model.named_parameters(recurse=False)):
        placed = distribute_tensor(parameter.detach(), rank_mesh((2,)), [Replicate()])
        model.register_parameter(name, nn.Parameter(placed))
    return model


def through_an_adapter(rank: int, world_size: int, directory: Path) -> None:
    torch.manual_seed(3)
    expected = nn.Linear(5, 3)
    torch.manual_seed(3)
    model = replicated(nn.Linear(5, 3))
    with installed_adapters(directory):
        fully_shard(model, mesh=rank_mesh((2,)))
        assert adapters._dtensor_adapter() is adapter
    x = torch.ones(2, 5)
    for _ in range(2):
        model(x).sum().backward()
        expected(x).sum().backward()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), 2 * theirs.grad), "the gradient goes through the form"
    assert [form.asked[:3] for form in adapter.forms] == [["sharded", "local", "shard"]] * 2
    assert all(form.asked.count("unsharded") == 1 for form in adapter.forms), "asked once, not at every gather"


def test_an_adapter_is_found_and_asked(tmp_path: Path):
    install_adapter(tmp_path, "one", "tests.core.parameters.test_adapters:adapter")
    run_ranks(2, through_an_adapter, tmp_path)


@on_ranks(1)
def test_without_an_adapter_plain_parameters_work(rank: int, world_size: int) -> None:
    with no_installed_adapters():
        fully_shard(nn.Linear(2, 2))


def test_two_adapters_are_refused(tmp_path: Path):
    install_adapter(tmp_path, "one", "tests.core.parameters.test_adapters:adapter")
    install_adapter(tmp_path, "two", "tests.core.parameters.test_adapters:adapter")
    refused = pytest.raises(RuntimeError, match=r"several adapters.*one = .*two = .*all but one")
    with refused, installed_adapters(tmp_path):
        raise AssertionError("not reached")
