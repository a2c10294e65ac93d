"""Members of enumerations in files of ShardedTensors, as every version of Python writes them."""

import io
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING

from shardkit.core.checkpoint import CheckpointError
from shardkit.core.checkpoint.torch_files import load_torch_bytes
from shardkit.legacy_fsdp_compat.migrate.rank_files import ALLOWED


class Reduced:
    """Pickled as one call."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        function, *args = self.call
        return function, tuple(args)


def _read(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"value": value}, file)
    return load_torch_bytes(file.getvalue(), "file", ALLOWED)["value"]


def test_a_member_is_read_by_value_and_by_name():
    by_value = _read(Reduced(MEM_FORMAT_ENCODING, 0))
    by_name = _read(Reduced(getattr, MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert type(by_value) is type(by_name)


def test_no_other_attribute_is():
    with pytest.raises(CheckpointError, match=r"getattr\(.*OrderedDict.*'fromkeys'\) is not allowed"):
        _read(Reduced(getattr, __import__("collections").OrderedDict, "fromkeys"))
