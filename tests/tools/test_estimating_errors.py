"""Jobs that cannot be estimated, and their errors."""

from functools import partial
from typing import Any

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


WRONG = partial(torch.ones, 3, 5)
BF16, BLOCKS = Policies(param_dtype=torch.bfloat16), Policies(wrap=("Block",))


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        (broken, four, {}, r"building the model raised FileNotFoundError in line \d+ of .*: weights\.bin"),
        (routed, four, {"mesh": 2}, r"(?s)called in forward of ''.*shape depends on data"),
        (linear, WRONG, {"mesh": 2}, "an iteration raised "),
        (sharded, four, {"mesh": 2, "policies": BF16}, "the model comes sharded"),
        *((linear, four, {"mesh": mesh}, "cannot be simulated") for mesh in (0, 16_385, {"dp": 0}, {})),
        (linear, four, {"mesh": {"pp": 2, "dp_shard": 4}}, "the axis 'pp' of the mesh is not known; expected dp_repl"),
        (linear, four, {"mesh": {"dp_shard": 4, "ep": 2}}, "the axis 'ep' of the mesh is not known"),
        (linear, four, {"mesh": {"replica": 2, "shard": 4}}, "the axis 'replica' of the mesh is not known"),
        (linear, four, {"mesh": {"dp": 2, "dp_shard": 4}}, "'dp' and 'dp_shard' mean the same"),
        (linear, four, {"mesh": {"dp_shard": 4, "tp": 2}}, "the axis 'tp' needs a plan"),
        (linear, four, {"mesh": 2, "rank": 2}, "no rank 2 among 2 ranks"),
        (linear, four, {"mesh": 2, "policies": BLOCKS}, "no module has the FQN or class name 'Block'"),
    ],
)
def test_what_cannot_be_estimated_is_told(model: Any, inputs: Any, options: dict[str, Any], message: str):
    with pytest.raises(EstimateError, match=message):
        estimate(model, inputs, **options)


def test_a_value_that_is_read_is_made_up_and_noted():
    found = estimate(linear, four, mesh=2, step=reads_loss)
    assert any("was read in between" in note for note in found.notes)


def test_a_factory_that_shards_the_model_names_axes_freely():
    assert estimate(sharded, four, mesh={"replicas": 2, "shards": 2}).axes == {"replicas": 2, "shards": 2}
    assert estimate(sharded, four, mesh=2).parameters == 40


def test_an_estimate_that_failed_leaves_the_process_clean():
    with pytest.raises(EstimateError):
        estimate(linear, WRONG, mesh=2)
    assert not torch.distributed.is_initialized()
    assert type(torch.ones(1)) is torch.Tensor
    assert estimate(linear, four, mesh=2).peak.bytes > 0
