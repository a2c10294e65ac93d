"""Jobs that cannot be estimated, and their errors."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.core import fully_shard
from shardkit.tools import EstimateError, Policies, estimate
from tests.support.models import Composed


def routed() -> nn.Module:
    return Composed(lambda m, x: m.expert(x[x.sum(-1) > 0]), expert=nn.Linear(4, 4))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def four() -> Tensor:
    return torch.ones(3, 4)


def broken() -> nn.Module:
    raise FileNotFoundError("weights.bin")


def sharded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(linear(), mesh=mesh)


def reads_loss(model, optimizer, batch) -> None:
    loss = model(batch).sum()
    loss.backward()
    assert loss.item() == 1
    optimizer.step()


def test_a_factory_that_fails_is_named_with_its_error():
    with pytest.raises(
        EstimateError, match=r"building the model raised FileNotFoundError in line \d+ of .*: weights\.bin"
    ):
        estimate(broken, four)


def test_shapes_that_depend_on_data_are_refused_with_the_place():
    with pytest.raises(EstimateError) as raised:
        estimate(routed, four, mesh=2)
    assert "called in forward of ''" in str(raised.value)
    assert "shape depends on data" in str(raised.value)


def test_a_value_that_is_read_is_made_up_and_noted():
    found = estimate(linear, four, mesh=2, step=reads_loss)
    assert any("was read in between" in note for note in found.notes)


def test_wrong_inputs_are_explained():
    with pytest.raises(EstimateError, match="an iteration raised "):
        estimate(linear, lambda: torch.ones(3, 5), mesh=2)


def test_policies_do_not_act_on_a_model_that_comes_sharded():
    assert estimate(sharded, four, mesh=2).parameters == 40
    with pytest.raises(EstimateError, match="the model comes sharded"):
        estimate(sharded, four, mesh=2, policies=Policies(param_dtype=torch.bfloat16))


@pytest.mark.parametrize("mesh", [0, 16_385, {"dp": 0}, {}])
def test_meshes_that_are_none(mesh):
    with pytest.raises(EstimateError, match="cannot be simulated"):
        estimate(linear, four, mesh=mesh)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"pp": 2, "dp_shard": 4},
            "the axis 'pp' of the mesh is not known; expected dp_replicate, dp_shard, dp, cp, tp",
        ),
        ({"dp_shard": 4, "ep": 2}, "the axis 'ep' of the mesh is not known"),
        ({"replica": 2, "shard": 4}, "the axis 'replica' of the mesh is not known"),
        ({"dp": 2, "dp_shard": 4}, "'dp' and 'dp_shard' mean the same"),
        ({"dp_shard": 4, "tp": 2}, "the axis 'tp' needs a plan"),
    ],
)
def test_axes_that_policies_do_not_know(mesh, message):
    with pytest.raises(EstimateError, match=message):
        estimate(linear, four, mesh=mesh)


def test_a_factory_that_shards_the_model_names_axes_freely():
    assert estimate(sharded, four, mesh={"replicas": 2, "shards": 2}).axes == {"replicas": 2, "shards": 2}


def test_ranks_that_are_none():
    with pytest.raises(EstimateError, match="no rank 2 among 2 ranks"):
        estimate(linear, four, mesh=2, rank=2)


def test_modules_that_are_none():
    with pytest.raises(EstimateError, match="no module has the FQN or class name 'Block'"):
        estimate(linear, four, mesh=2, policies=Policies(wrap=("Block",)))


def test_an_estimate_that_failed_leaves_the_process_clean():
    with pytest.raises(EstimateError):
        estimate(linear, lambda: torch.ones(3, 5), mesh=2)
    assert not torch.distributed.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor
    assert estimate(linear, four, mesh=2).peak.bytes > 0
