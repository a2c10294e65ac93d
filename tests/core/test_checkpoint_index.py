"""`index.py`: a checkpoint cannot claim to hold more than its files do."""

import json
from pathlib import Path

import pytest
import torch

from shardkit.core.checkpoint import CheckpointManager, DamagedCheckpointError, TrainingState
from shardkit.core.checkpoint.manifest import seal
from shardkit.core.checkpoint.opening import open_index


def test_bytes_count_once(tmp_path: Path):
    """A thousand tensors in the place of one would make a few kilobytes ask for a thousand times as much memory."""
    CheckpointManager(tmp_path).save(1, TrainingState(torch.nn.Linear(30, 20, bias=False), rng=False), blocking=True)
    path = tmp_path / "step-000001" / "manifest.json"
    document = json.loads(path.read_bytes())
    del document["seal"]
    [[name, *rest]] = document["tensors"]
    document["tensors"] = [[[*name, str(number)], *rest] for number in range(1000)]
    path.write_bytes(seal(document))
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp: \d{7} bytes are said to lie in it, it has \d{4}$"):
        open_index(path.parent)
