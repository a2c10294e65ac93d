"""Checkpoints from elsewhere: whatever their bytes are, they are read rightly or refused, and nothing else happens.

150 changes of each kind are tried; `SHARDKIT_FUZZ` multiplies their number.
"""

import contextlib
import json
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardkit.core.checkpoint import CheckpointError, TrainingState
from shardkit.core.checkpoint.directory import open_index
from shardkit.core.checkpoint.index import MANIFEST, seal, unseal
from shardkit.core.checkpoint.leaves import LeftOut
from shardkit.core.checkpoint.reading import read_objects, stored_tensors
from shardkit.core.checkpoint.sources import weights_of_files
from tests.core.checkpoint.trainee import Held, saved
from tests.faults.fuzzing import Reduced, fuzzed, takes_at_most, with_bytes, with_values

EVERYTHING = {"a": [torch.arange(4), {"b": (1, 2.5, "c")}], "empty": {}, 3: True, "bytes": b"xyz"}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    saved(tmp_path, TrainingState(torch.nn.Linear(4, 3), user={"user": Held(EVERYTHING)}), 1)
    return tmp_path / "step-000001"


@pytest.fixture
def stocks(tmp_path: Path) -> Path:
    dcp.save({"model": torch.nn.Linear(4, 3).state_dict(), "step": 7}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def read_all(path: Path) -> int:
    """Read every value, and return the bytes that they took."""
    index = open_index(path)
    total = sum(slab.nbytes for one in stored_tensors(path, index) for slab in one.slabs())
    read_objects(path, index, index.objects)
    return total


def survives(path: Path) -> bool:
    """Whether it was read. A `CheckpointError` is fine; any other error fails the test, and so does much memory."""
    total = None
    with takes_at_most(100), contextlib.suppress(CheckpointError):
        total = read_all(path)
    assert total is None or total <= sum(file.stat().st_size for file in path.iterdir())
    return total is not None


@pytest.mark.parametrize(
    ("whose", "file"), [("ours", MANIFEST), ("stocks", ".metadata"), ("stocks", "__0_0.distcp")], ids=str
)
def test_changed_bytes_of_a_checkpoint(whose: str, file: str, request: pytest.FixtureRequest):
    """Stock's have no checksums: other values may be read, but nothing else happens."""
    path: Path = request.getfixturevalue(whose)
    original = (path / file).read_bytes()

    @fuzzed
    def run(generator: random.Random) -> None:
        data = with_bytes(original, generator)
        (path / file).write_bytes(data)
        read = survives(path)
        assert whose == "stocks" or read == (data == original)

    run()


def test_values_of_a_manifest_that_is_sealed_anew(ours: Path):
    """The seal only detects accidents: anybody who makes a manifest can seal it."""
    original = unseal((ours / MANIFEST).read_bytes(), MANIFEST)

    @fuzzed
    def run(generator: random.Random) -> None:
        document = original
        for _ in range(generator.randint(1, 3)):
            document = with_values(document, generator)
        (ours / MANIFEST).write_bytes(seal(document))
        survives(ours)

    run()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_changed_bytes_of_a_file(suffix: str, tmp_path: Path):
    path = tmp_path / f"model.{suffix}"
    tensors = {"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.int8)}
    if suffix == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(tensors, path)
    else:
        torch.save({**tensors, "step": 3}, path)
    original = path.read_bytes()
    # A ValueError names a dtype or a kind of file that is not known.
    refusals = (CheckpointError, ValueError) if suffix == "safetensors" else (CheckpointError,)

    @fuzzed
    def run(generator: random.Random) -> None:
        path.write_bytes(with_bytes(original, generator))
        with takes_at_most(100), contextlib.suppress(*refusals):
            for one in weights_of_files(path, LeftOut()).tensors.values():
                assert sum(slab.nbytes for slab in one.slabs()) == one.nbytes

    run()


def test_an_object_that_would_run_code(tmp_path: Path):
    marker = tmp_path / "ran"
    dcp.save({"step": Reduced(os.mkdir, str(marker))}, checkpoint_id=tmp_path / "evil", no_dist=True)
    with pytest.raises(CheckpointError, match=r"step in .* holds more than tensors .* refused: .*posix.mkdir"):
        read_all(tmp_path / "evil")
    assert not marker.exists()


def test_an_index_of_safetensors_that_leads_elsewhere(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names the file '\.\./a\.safetensors', expected one beside it"):
        weights_of_files(tmp_path, LeftOut())
