"""`index.py`: a checkpoint cannot claim to hold more than its files do."""

import json
from typing import Any

import pytest
import torch

from shardkit.core.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpointError, TrainingState
from shardkit.core.checkpoint.directory import open_index
from shardkit.core.checkpoint.index import (
    BLOCK_BYTES,
    Chunk,
    File,
    Index,
    ObjectEntry,
    TensorEntry,
    pack,
    seal,
    unpack,
    unseal,
)


def test_bytes_count_once(tmp_path):
    """A thousand tensors in the place of one would make a few kilobytes ask for a thousand times as much memory."""
    CheckpointManager(tmp_path).save(1, TrainingState(torch.nn.Linear(30, 20, bias=False), rng=False), blocking=True)
    path = tmp_path / "step-000001" / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["seal"]
    [[name, *rest]] = document["tensors"]
    document["tensors"] = [[[*name, str(number)], *rest] for number in range(1000)]
    path.write_bytes(seal(document))
    with pytest.raises(
        DamagedCheckpointError, match=r"__0_0.distcp: the index places \d{7} bytes in it, but it has \d{4}$"
    ):
        open_index(path.parent)


FILE = {"f": File("f", 1000, None)}


def whole(shape: tuple[int, ...], *chunks: Chunk) -> dict[str, TensorEntry]:
    return {"w": TensorEntry(("w",), torch.float32, shape, chunks)}


def piece(offsets: tuple[int, ...], sizes: tuple[int, ...], **other: Any) -> Chunk:
    return Chunk(**{"file": "f", "offset": 0, "length": 100, "values": None, **other}, offsets=offsets, sizes=sizes)


def test_what_fits_is_taken():
    rows = [piece((row, 0), (1, 6), offset=100 * row) for row in range(4)]
    Index(whole((4, 6), *rows, piece((4, 0), (0, 6))), {}, FILE)
    Index(whole((2, 2), *(piece((r, c), (1, 1), offset=200 * r + 100 * c) for r in (0, 1) for c in (0, 1))), {}, FILE)
    Index(whole((), piece((), (), values=96)), {"o": ObjectEntry(("o",), "f", 900, 100)}, FILE)
    Index(whole((0, 3)), {}, FILE)


@pytest.mark.parametrize(
    ("tensors", "objects", "text"),
    [
        (whole((4,), piece((0,), (3,))), {}, "w: the chunks .* leave holes: they hold 3 of its 4 elements"),
        (whole((2,)), {}, "hold 0 of its 2 elements"),
        (whole((4,), piece((0,), (3,)), piece((2,), (2,))), {}, r"overlap: \[0:3\] in f and \[2:4\] in f"),
        (whole((4,), piece((0,), (2,)), piece((3,), (1,)), piece((1,), (2,))), {}, "overlap"),
        (whole((), piece((), ()), piece((), ())), {}, "overlap"),
        (whole((2, 4), piece((0, 0), (2, 3)), piece((1, 1), (1, 2))), {}, "overlap"),
        (whole((4,), piece((1,), (4,))), {}, r"w: the chunks of shape \(4,\) stick out of it: \[1:5\]"),
        (whole((4,), piece((-1,), (5,))), {}, "stick out"),
        (whole((4,), piece((0, 0), (4, 1))), {}, "stick out"),
        (whole((4,), piece((0,), (4,), length=15)), {}, "w: .* a chunk of 16 bytes at .* in 15 bytes of f"),
        (
            whole((4,), piece((0,), (4,), values=85)),
            {},
            "w: the index places a chunk of 16 bytes at .* in 100 bytes of f",
        ),
        (whole((4,), piece((0,), (4,), offset=50, values=49)), {}, " in 100 bytes of f"),
        (whole((4,), piece((0,), (4,), offset=901)), {}, "w: .* at bytes 901 to 1001 of f, which has 1000"),
        (whole((4,), piece((0,), (4,), offset=-1)), {}, "the index places it at bytes -1"),
        (whole((4,), piece((0,), (4,), file="g")), {}, "of g, which is not among the files"),
        (whole((2**20, 0, 2**40)), {}, "w: no tensor has the shape"),
        ({}, {"o": ObjectEntry(("o",), "f", 990, 11)}, "o: the index places it at bytes 990 to 1001"),
        ({}, {"o": ObjectEntry(("o",), "f", 9, -1)}, "o: the index places it at bytes 9 to 8"),
        (whole((0,)), {"w": ObjectEntry(("w",), "f", 0, 1)}, "w: both a tensor and an object"),
        ({}, {n: ObjectEntry((n,), "f", 0, 600) for n in "ab"}, "f: the index places 1200 bytes in it, but"),
    ],
)
def test_what_contradicts_itself_is_refused(tensors: Any, objects: Any, text: str):
    with pytest.raises(DamagedCheckpointError, match=text):
        Index(tensors, objects, FILE)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\0", "a\n", "\u00e9", "a" * 201])
def test_names_of_files_that_lead_elsewhere(name: str):
    with pytest.raises(DamagedCheckpointError, match="expected a plain name inside the checkpoint"):
        File(name, 0, None)


@pytest.mark.parametrize(("nbytes", "blocks"), [(-1, 0), (0, 1), (1, 0), (BLOCK_BYTES, 2), (BLOCK_BYTES + 1, 1)])
def test_a_checksum_for_each_block(nbytes: int, blocks: int):
    with pytest.raises(DamagedCheckpointError, match="bytes do not match its number of checksums"):
        File("f", nbytes, ("0" * 32,) * blocks)


def sealed(**changes: Any) -> bytes:
    document = unseal(pack(Index({}, {}, FILE, step=3), "now"), "manifest")
    return seal({**document, **changes})


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (sealed(version=2), CheckpointError, "m is of version 2, this code reads 1; use the newer shardkit"),
        (sealed(block_bytes=7), CheckpointError, "use the newer shardkit"),
        (sealed(format="x"), DamagedCheckpointError, "m is of format 'x'"),
        (sealed(step=-1), DamagedCheckpointError, "-1 where a whole number should be"),
        (sealed(step=True), DamagedCheckpointError, "True where a whole number should be"),
        (sealed(info=[]), DamagedCheckpointError, "info"),
        (sealed(files=[["f", 1, None]] * 2), DamagedCheckpointError, "'f' stands there twice"),
        (sealed(objects=[[["a"], -1, 0, 0]]), DamagedCheckpointError, "-1 where a whole number should be"),
        (sealed()[:-1], DamagedCheckpointError, "does not end with a seal"),
        (sealed() + b"\n", DamagedCheckpointError, "does not end with a seal"),
        (sealed().replace(b'"step":3', b'"step":4'), DamagedCheckpointError, "its seal does not fit"),
        (b"", DamagedCheckpointError, "does not end with a seal"),
    ],
)
def test_manifests_that_are_refused(data: bytes, kind: type[CheckpointError], text: str):
    with pytest.raises(CheckpointError, match=text) as refused:
        unpack(data, "m")
    assert type(refused.value) is kind
