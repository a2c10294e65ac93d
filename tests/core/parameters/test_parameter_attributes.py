"""Parameters beyond their values: attributes that users set on them, and subclasses of nn.Parameter."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as stock
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import shardkit.core as shardkit
from tests.support import on_ranks, rank_mesh
from tests.support.models import Composed
from tests.support.twins import assert_equal

# As timm, Megatron and transformers have them.
TAGS = {"no_weight_decay": True, "sequence_parallel": False, "_is_hf_initialized": True}


def _tagged() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for parameter in (model[0].bias, model[1].weight):
        for name, value in TAGS.items():
            setattr(parameter, name, value)
    return model


def _tags(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        fqn: {name: getattr(parameter, name) for name in TAGS if hasattr(parameter, name)}
        for fqn, parameter in model.named_parameters()
    }


@on_ranks(1, 2)
def test_tags_stay(rank: int, world_size: int) -> None:
    expected = {"0.weight": {}, "0.bias": TAGS, "1.weight": TAGS, "1.bias": {}}
    with torch.device("meta"):
        model = _tagged()
    shardkit.fully_shard(model[0], mesh=rank_mesh((world_size,)))
    shardkit.fully_shard(model, mesh=rank_mesh((world_size,)))
    assert _tags(model) == expected
    shardkit.materialize(model)
    assert _tags(model) == expected
    model.to(torch.float64)
    assert _tags(model) == expected
    model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    for module in (model[0], model):
        module.unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert _tags(model) == expected


class Scaled(nn.Parameter):
    """Like bitsandbytes' Params4bit: a Python class with state in attributes, which the module uses."""

    def __new__(cls, data: Tensor, scale: Tensor) -> "Scaled":
        self = torch.Tensor._make_subclass(cls, data, True)
        self.scale = scale
        return self

    def effective(self) -> Tensor:
        return self * self.scale


def _scaled() -> nn.Module:
    weight = Scaled(torch.randn(6, 4), torch.arange(1.0, 7.0)[:, None])
    return Composed(lambda module, x: F.linear(x, module.weight.effective()), weight=weight)


class Positive(Tensor):
    """`__torch_function__` only: as a weight of F.linear its absolute values count."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return F.linear(args[0], args[1].abs(), *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


def _positive() -> nn.Linear:
    linear = nn.Linear(4, 6, bias=False)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Positive))
    return linear


MODULES = {"subclass of nn.Parameter": _scaled, "__torch_function__": _positive}


@pytest.mark.parametrize(("world_size", "kind"), [(1, "__torch_function__"), *((2, kind) for kind in MODULES)])
@on_ranks()
def test_classes_of_python_stay(rank: int, world_size: int, kind: str) -> None:
    """Stock computes with a plain parameter here, which has no `effective()`, and whose negative numbers count."""
    runs = []
    for shard in (False, True):
        torch.manual_seed(0)
        module = MODULES[kind]()
        cls, module = type(module.weight), nn.Sequential(module)
        if shard:
            shardkit.fully_shard(module, mesh=rank_mesh((world_size,)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = module(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if shard:
            module.unshard()
        assert type(module[0].weight) is cls
        assert isinstance(module[0].weight, nn.Parameter)
        runs.append((losses, module[0].weight.detach().as_subclass(Tensor)))
    (expected, weight), (seen, sharded_weight) = runs
    assert expected == seen
    assert torch.equal(weight, sharded_weight)


# -- copies of parameters ----------------------------------------------------------------------------------------------


def _saved(parameters: dict[str, nn.Parameter], weights_only: bool) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(parameters, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIES: dict[str, Callable[[dict[str, nn.Parameter]], dict[str, Tensor]]] = {
    "torch.save": partial(_saved, weights_only=False),
    "torch.save, weights only": partial(_saved, weights_only=True),
    "pickle": lambda parameters: pickle.loads(pickle.dumps(parameters)),
    "copy": lambda parameters: {fqn: copy.copy(parameter) for fqn, parameter in parameters.items()},
    "deepcopy": copy.deepcopy,
}


def _copies(api: Any, world_size: int, make: Callable[..., dict[str, Tensor]], unshard: bool) -> list[Any]:
    torch.manual_seed(0)
    model = api.fully_shard(nn.Linear(4, 6), mesh=rank_mesh((world_size,)))
    model(torch.ones(2, 4))  # parameters that have been gathered once
    model.unshard() if unshard else model.reshard()
    copies = make(dict(model.named_parameters()))
    before = model.weight.detach().clone()
    for one in copies.values():
        one.grad = torch.ones_like(one)
    torch.optim.SGD(copies.values(), lr=0.5).step()  # a copy is not a parameter of the model
    assert (model.weight.detach() == before).all() or make is COPIES["copy"]
    values = [one.to_local() if isinstance(one, DTensor) else one for one in copies.values()]
    return [*values, *[(type(one), isinstance(one, nn.Parameter), vars(one)) for one in copies.values()]]


@on_ranks(1, 2)
def test_copies_like_stock(rank: int, world_size: int) -> None:
    """Saved, pickled or copied parameters carry nothing of ours, and an optimizer steps on them."""
    for name, make in COPIES.items():
        for unshard in (False, True):
            assert_equal(*(_copies(api, world_size, make, unshard) for api in (shardkit, stock)), (name, unshard))
