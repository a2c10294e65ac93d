"""Tensors inside arguments and outputs: every kind of container, found, replaced and cast."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from shardkit.core.tensors import cast_floating, map_tensors, tensors_in

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    note: str = "a note"
    deep: dict[str, Any] = field(default_factory=dict)


class Answer(OrderedDict):
    """A dataclass that is a dict too and keeps both in step, as the model outputs of Hugging Face do."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)


@dataclass
class ModelOutput(Answer):
    logits: Tensor | None = None
    loss: Tensor | None = None


def _one() -> Tensor:
    return torch.ones(2)


CONTAINERS = {
    "a tensor": _one,
    "list": lambda: [_one(), "text", 3],
    "tuple": lambda: (_one(), None),
    "named tuple": lambda: Pair(_one(), 2.5),
    "set": lambda: {_one()},
    "frozen set": lambda: frozenset([_one()]),
    "dict": lambda: {"a": _one(), "b": b"bytes"},
    "ordered dict": lambda: OrderedDict(a=_one()),
    "dataclass": lambda: Frozen(_one()),
    "dataclass and dict": lambda: ModelOutput(logits=_one()),
    "nested": lambda: {"a": (Pair(0, [Frozen(torch.tensor(3), deep={"x": _one()})]),)},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_are_found_and_replaced(kind: str) -> None:
    value = CONTAINERS[kind]()
    found = tensors_in(value)
    assert sum(tensor.is_floating_point() for tensor in found) == 1
    changed = map_tensors(lambda tensor: tensor * 2, value)
    assert type(changed) is type(value)
    assert [tensor.tolist() for tensor in tensors_in(changed)] == [(tensor * 2).tolist() for tensor in found]
    again = tensors_in(value)
    assert all(one is two for one, two in zip(found, again, strict=True)), "the original was changed"
    assert map_tensors(lambda tensor: tensor, value) is value, "nothing changes, and it is passed on"


def test_a_container_that_stands_in_two_places_is_copied_once() -> None:
    twice = [_one()]
    changed = map_tensors(lambda tensor: tensor * 2, (twice, {"again": twice}))
    assert changed[0] is not twice
    assert changed[0] is changed[1]["again"]


def test_a_dataclass_that_is_a_dict_is_changed_in_both_views() -> None:
    output = map_tensors(lambda tensor: tensor * 2, ModelOutput(logits=_one()))
    assert output.logits is output["logits"]
    assert output.logits.tolist() == [2, 2]


def test_only_floating_point_tensors_are_cast() -> None:
    value = {"float": _one(), "int": torch.tensor(1), "bool": torch.tensor(True), "complex": torch.tensor(1j)}
    cast = cast_floating(value, torch.bfloat16)
    assert [tensor.dtype for tensor in cast.values()] == [torch.bfloat16, torch.int64, torch.bool, torch.complex64]
