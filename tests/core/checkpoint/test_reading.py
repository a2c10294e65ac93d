"""`reading.py`: checkpoints of torch.distributed.checkpoint whose tensors do not lie row by row."""

import itertools
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardkit.core.checkpoint import CheckpointManager, DamagedCheckpointError, TrainingState, reading, stored
from shardkit.core.checkpoint.command import main
from shardkit.core.checkpoint.directory import open_index
from tests.core.checkpoint.trainee import saved
from tests.support.twins import differences


def layouts() -> nn.Module:
    """Channels last, transposed, a slice of every other column, complex conjugates, bytes that lie transposed."""
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.transposed = nn.Parameter(torch.randn(5, 3).t())
    model.sliced = nn.Parameter(torch.randn(4, 6)[:, ::2])
    model.register_buffer("conjugate", torch.randn(3, 2, dtype=torch.complex64).conj())
    model.register_buffer("bytes", torch.randint(0, 255, (4, 3), dtype=torch.uint8).t())
    return model


@pytest.mark.parametrize("whose", ["stock", "ours"])
def test_tensors_that_are_not_contiguous(tmp_path, whose: str):
    expected = layouts().state_dict()
    if whose == "stock":
        dcp.save({"model": expected}, checkpoint_id=tmp_path / "x", no_dist=True)
    else:
        saved(tmp_path, TrainingState(layouts(), rng=False), 1)
    source = tmp_path / ("x" if whose == "stock" else "step-000001")
    model = layouts()
    for plain in (False, True):
        for name, value in model.state_dict().items():
            value.zero_()
            if plain and name not in dict(model.named_parameters()):
                setattr(model, name, value.contiguous().resolve_conj())
        CheckpointManager(tmp_path / "none").restore(TrainingState(model, rng=False), source=source)
        resolved = {name: value.resolve_conj() for name, value in expected.items()}
        seen = {name: value.resolve_conj() for name, value in model.state_dict().items()}
        assert differences(seen, resolved) == []


def test_a_stock_chunk_of_another_shape_is_refused(tmp_path):
    """The metadata says 2 x 6, but the archive holds a transposed 4 x 3 of as many bytes."""
    state = {"model": {"weight": torch.zeros(3, 4).t()}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    described = metadata.state_dict_metadata["model.weight"]
    described.size = described.chunks[0].sizes = torch.Size((2, 6))
    (tmp_path / "stock" / ".metadata").write_bytes(pickle.dumps(metadata))
    model = nn.Linear(6, 2, bias=False)
    with pytest.raises(DamagedCheckpointError, match=r"model.weight: its chunk at \(0, 0\) in .* is \(4, 3\) of"):
        CheckpointManager(tmp_path / "none").restore(TrainingState(model, rng=False), source=tmp_path / "stock")


@pytest.mark.parametrize("slab_bytes", [1, 40, 100])
def test_large_tensors_come_slab_by_slab(tmp_path, monkeypatch, slab_bytes: int):
    """Rows of 20 bytes, those of the targets in another order in memory; and the same offline."""
    torch.manual_seed(0)
    model = nn.Linear(5, 11)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    manager = saved(tmp_path / "run", TrainingState(model, rng=False), 1)
    for module in (reading, stored):
        monkeypatch.setattr(module, "CHUNK_BYTES", slab_bytes)
    other = nn.Linear(5, 11)
    other.weight = nn.Parameter(torch.zeros(5, 11).t())
    manager.restore(TrainingState(other, rng=False))
    assert differences(dict(other.state_dict()), expected) == []
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "one.pt"), "--to", "torch"]) == 0
    assert differences(torch.load(tmp_path / "one.pt"), expected) == []
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "three"), "--ranks", "3"]) == 0
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "three")]) == 0
    manager.restore(TrainingState(model, rng=False), source=tmp_path / "three")
    assert differences(dict(model.state_dict()), expected) == []


@pytest.mark.parametrize("slab_bytes", [1, 50, 2**25])
def test_any_box_of_a_tensor(tmp_path, monkeypatch, slab_bytes: int):
    """Rows and columns in the midst of chunks, and over their edges."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", slab_bytes)
    model = nn.Linear(5, 7, bias=False)
    saved(tmp_path / "run", TrainingState(model, rng=False), 1)
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "two"), "--ranks", "2"]) == 0
    for path in (tmp_path / "run" / "step-000001", tmp_path / "two"):
        index = open_index(path)
        for top, left, rows, columns in itertools.product((0, 2, 3), (0, 1), (1, 3, 4), (2, 4)):
            box = torch.empty(rows, columns)
            reading.read_box(path, index, index.tensors["model.weight"], (top, left), box)
            assert torch.equal(box, model.weight[top : top + rows, left : left + columns])
