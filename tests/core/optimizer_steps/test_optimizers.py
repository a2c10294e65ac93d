"""Steps of optimizers are noticed whatever has happened to the parameters since they were sharded."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from shardkit.core import MixedPrecisionPolicy, Owned, fully_shard, materialize, optimizer_step_on_shards
from tests.support import networked_mesh, on_ranks


@on_ranks(2)
def test_steps_after_materialize(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    materialize(model)
    model.set_reshard_after_backward(False)
    model.weight.to_local().detach().fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.0, fused=True)
    outputs = []
    for _ in range(3):
        out = model(torch.ones(1, 4))
        outputs.append(out[0, 0].item())
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert outputs == [4.0, 3.0, 2.0]


@on_ranks(2)
def test_writes_while_a_gather_is_under_way(rank: int, world_size: int) -> None:
    """A gather that nobody has waited for is out of date after a write, on all ranks."""
    for write, mesh in (("step", None), ("copy", networked_mesh((world_size,)))):
        model = fully_shard(nn.Linear(4, 2, bias=False), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.ones(1, 4)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            model.unshard(async_op=True)
            if rank == 0:
                time.sleep(0.1)  # a peer that has read by now has read old values
            if write == "step":
                optimizer.step()
            else:
                with torch.no_grad():
                    model.weight.copy_(model.weight + 1.0)
            seen = model(x).detach()
            model.reshard()
            assert torch.equal(seen, x @ model.weight.full_tensor().T), write


@on_ranks(1, 2)
def test_freezing_while_unsharded(rank: int, world_size: int) -> None:
    """Freezing a sharded parameter, as an optimizer holds it, holds for a module that is unsharded at that moment."""
    for keep in ("evaluation", "unshard", "backward"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], reshard_after_forward=keep != "evaluation")
        fully_shard(model)
        weight, bias = model[0].parameters()
        x = torch.ones(1, 4)
        if keep == "evaluation":
            with torch.no_grad():
                model(x)
        elif keep == "unshard":
            model[0].unshard()
        else:
            model.set_reshard_after_backward(False)
            model(x).sum().backward()
        for frozen in (True, True, False):
            weight.requires_grad_(not frozen)
            model.zero_grad()
            weight.grad = bias.grad = None
            model(x).sum().backward()
            assert (weight.grad is None) == frozen, keep
            assert bias.grad is not None
        loss = model(x).sum()
        bias.requires_grad_(False)
        weight.grad = bias.grad = None
        loss.backward()
        assert weight.grad is not None
        assert bias.grad is None  # as in one process


def _trained(compiled: bool, kind: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model, shard_placement_fn=(lambda _: Owned()) if kind == "owned" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if kind == "on shards":
        optimizer_step_on_shards(optimizer)
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["dtensors", "on shards", "owned"])
@on_ranks(2, timeout=120)
def test_a_compiled_step(rank: int, world_size: int, kind: str) -> None:
    for seen, expected in zip(_trained(True, kind), _trained(False, kind), strict=True):
        torch.testing.assert_close(seen, expected)


@on_ranks(1, 2)
def test_an_optimizer_that_has_to_know_of_sharding(rank: int, world_size: int) -> None:
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["fsdp_in_use"] = False  # as Prodigy does
    model(torch.ones(2, 4)).sum().backward()
    if world_size == 1:
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"fsdp_in_use=False, and parameter 'weight' is sharded"):
        optimizer.step()
    optimizer.param_groups[0]["fsdp_in_use"] = True
    optimizer.step()


@on_ranks(2)
def test_adafactor_takes_norms_of_whole_parameters(rank: int, world_size: int) -> None:
    alone = nn.Linear(4, 6)
    for vectors in (None, Owned(), Replicate()):
        model = copy.deepcopy(alone)
        fully_shard(model, shard_placement_fn=lambda one, place=vectors: Owned() if one.ndim == 2 else place)
        optimizer = torch.optim.Adafactor(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        if vectors is None:
            with pytest.raises(RuntimeError, match=r"Adafactor scales each step by norms .*'bias' is sharded"):
                optimizer.step()
            continue
        expected = copy.deepcopy(alone)
        reference = torch.optim.Adafactor(expected.parameters())
        expected(torch.ones(2, 4)).sum().backward()
        for one in (optimizer, reference):
            one.step()
        for seen, whole in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(seen.full_tensor(), whole.detach())
