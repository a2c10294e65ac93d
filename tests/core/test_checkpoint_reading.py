"""`reading.py`: checkpoints of torch.distributed.checkpoint whose tensors do not lie row by row."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardkit.core.checkpoint import CheckpointManager, DamagedCheckpointError, TrainingState
from tests.core.checkpoint_cases import differences


def layouts() -> nn.Module:
    """Channels last, transposed, a slice of every other column, complex conjugates, bytes that lie transposed."""
    torch.manual_seed(1)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model.transposed = nn.Parameter(torch.randn(5, 3).t())
    model.sliced = nn.Parameter(torch.randn(4, 6)[:, ::2])
    model.register_buffer("conjugate", torch.randn(3, 2, dtype=torch.complex64).conj())
    model.register_buffer("bytes", torch.randint(0, 255, (4, 3), dtype=torch.uint8).t())
    return model


def test_stock_checkpoints_of_tensors_that_are_not_contiguous(tmp_path: Path):
    expected = layouts().state_dict()
    dcp.save({"model": expected}, checkpoint_id=tmp_path / "stock", no_dist=True)
    model = layouts()
    for plain in (False, True):
        for name, value in model.state_dict().items():
            value.zero_()
            if plain and name not in dict(model.named_parameters()):
                setattr(model, name, value.contiguous().resolve_conj())
        CheckpointManager(tmp_path / "none").restore(TrainingState(model, rng=False), source=tmp_path / "stock")
        resolved = {name: value.resolve_conj() for name, value in expected.items()}
        seen = {name: value.resolve_conj() for name, value in model.state_dict().items()}
        assert differences(seen, resolved) == []


def test_ours_of_tensors_that_are_not_contiguous(tmp_path: Path):
    model = layouts()
    expected = {name: value.clone().resolve_conj() for name, value in model.state_dict().items()}
    manager = CheckpointManager(tmp_path)
    manager.save(1, TrainingState(model), blocking=True)
    for value in model.state_dict().values():
        value.zero_()
    manager.restore(TrainingState(model))
    assert differences({name: v.resolve_conj() for name, v in model.state_dict().items()}, expected) == []


def test_a_stock_chunk_of_another_shape_is_refused(tmp_path: Path):
    """The metadata says 2 x 6, the archive holds a transposed 4 x 3: as many bytes."""
    state = {"model": {"weight": torch.zeros(3, 4).t()}}
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path / "stock").read_metadata()
    described = metadata.state_dict_metadata["model.weight"]
    described.size = described.chunks[0].sizes = torch.Size((2, 6))
    (tmp_path / "stock" / ".metadata").write_bytes(pickle.dumps(metadata))
    model = nn.Linear(6, 2, bias=False)
    with pytest.raises(DamagedCheckpointError, match=r"model.weight: its chunk at \(0, 0\) in .* is \(4, 3\) of"):
        CheckpointManager(tmp_path / "none").restore(TrainingState(model, rng=False), source=tmp_path / "stock")
