"""Pickles that would take far more memory, or time, than they have bytes: refused before anything is made of them."""

import io
import pickle
import resource
import struct
import zipfile

import pytest
import torch

from shardkit.core.checkpoint import CheckpointError
from shardkit.core.checkpoint.pickled import check_pickle
from shardkit.core.checkpoint.torch_files import load_torch_bytes


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def remembered(value: bytes) -> bytes:
    return value + b"q\x010"


LONG = "x" * 10**6
BOMBS = {
    "bytearray": b"cbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85R",
    "bytearray by way of another": b"ctorch._tensor\n_rebuild_from_type_v2\n"
    b"(cbuiltins\nbytearray\ncbuiltins\nbytearray\nJ\x00\x00\x00\x40\x85}tR",
    "tensor": b"ctorch\nFloatTensor\nJ\x00\x00\x00\x40\x85R",
    "encoded": remembered(text(LONG)) + b"]" + (b"c_codecs\nencode\nh\x01" + text("utf-32") + b"\x86Ra") * 1000,
    "copied": remembered(b"](" + b"K\x01" * 10**5 + b"e") + b"]" + b"ccollections\nCounter\nh\x01\x85Ra" * 5000,
    "sets": b"(" + b"\x8f" * 10**6 + b"t",
    "hashed": b"}" + b"N\x85q\x01" + b"h\x01h\x01\x86q\x01" * 40 + b"K\x01s",
    "memo": b"Nr\x00\x00\x00\x7f",
}


def archive(data: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/byteorder", b"little")
        file.writestr("x/version", b"3\n")
    return packed.getvalue()


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_that_would_take_memory(bomb: str):
    data = archive(b"\x80\x02" + BOMBS[bomb] + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"evil.pt .*refused"):
        load_torch_bytes(data, "evil.pt")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (64 << 10) + (len(data) >> 10)


def test_containers_that_contain_each_other():
    """Lists of two references to the one before: small in memory, and without end for whoever walks over them."""
    value: list[object] = []
    for _ in range(60):
        value = [value, value]
    packed = io.BytesIO()
    torch.save({"a": value}, packed)
    with pytest.raises(CheckpointError, match="contain each other too often"):
        load_torch_bytes(packed.getvalue(), "evil.pt")


def test_usual_pickles_pass():
    check_pickle(pickle.dumps({"model": dict.fromkeys(map(str, range(1000)), (1, 2.5, [3, {"x"}]))}))
    check_pickle(pickle.dumps(list(range(10**6))))
