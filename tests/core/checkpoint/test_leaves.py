"""`leaves.py`: every kind of value that can be saved can be read, and no archive unpacks to more than its length."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, TrainingState
from shardkit.core.checkpoint.leaves import flatten, object_bytes, unflatten
from shardkit.core.checkpoint.torch_files import load_torch_bytes
from tests.core.checkpoint.trainee import differences

VALUES: list[Any] = [
    *(None, True, 3, 2**40, -(2**70), 1.5, float("inf"), -0.0, 1 + 2j, "", "é", b"ab", set(), {1, 2}),
    *((), [], [[], [1]], {1: "a", (1, 2): 3}, OrderedDict(a=1), list(range(999))),
    *(torch.float8_e4m3fn, torch.device("cpu"), torch.Size([1, 2])),
    (torch.eye(2), {"x": (nn.Parameter(torch.ones(1)),)}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_what_is_saved_can_be_read(value: Any):
    assert differences(load_torch_bytes(object_bytes("value", value), "value"), value) == []


class Labelled(torch.Tensor):
    """A tensor that torch.load does not know."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", "bytes of length 0, which torch.load refuses to read"),
        ((torch.ones(2).as_subclass(Labelled),), "Labelled in the state, expected tensors, numbers"),
        ((torch.ones(2, device="meta"),), "is on the meta device and has no values"),
    ],
    ids=str,
)
def test_what_could_not_be_read_is_not_saved(value: Any, text: str):
    with pytest.raises(TypeError, match=f"value: .*{text}"):
        object_bytes("value", value)


def test_a_model_on_the_meta_device_is_refused_by_name(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(CheckpointError, match=r"model\.1\.weight: is on the meta device"):
        CheckpointManager(tmp_path).save(1, TrainingState(model))


def test_what_is_empty_on_one_rank_only():
    leaves = flatten({"state": {"a": 1}, "other": {}})
    assert unflatten(leaves.values, [*leaves.empties, ("state",)]) == {"state": {"a": 1}, "other": {}}


@pytest.mark.parametrize(
    "state", [{1: 0, "1": 0}, {"a": {"b": 0}, "a.b": 0}, {"a": [{}, {"b": 0}], "a.1.b": 0}], ids=str
)
def test_two_values_of_one_name_are_refused(state: Any):
    """One of the two values would be lost on disk."""
    with pytest.raises(ValueError, match="two values have this name"):
        flatten(state)
