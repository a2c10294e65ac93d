"""`directory.py`: which checkpoints stay, and what two runs in one directory may do to each other."""

from pathlib import Path

import torch

from shardkit.core.checkpoint import CheckpointManager, TrainingState
from tests.core.test_checkpoint_format import flip


def test_retention_spares_what_was_just_saved(tmp_path: Path):
    """A run that goes on from an older checkpoint, because the newest is damaged, must not lose all that are good."""
    state = TrainingState(torch.nn.Linear(3, 2))
    manager = CheckpointManager(tmp_path)
    for step in (5, 6, 8):
        manager.save(step, state, blocking=True)
    flip(tmp_path / "step-000008" / "__0_0.distcp")
    manager = CheckpointManager(tmp_path, keep=1)
    restored = manager.restore(state, fallback=True)
    assert restored is not None and restored.step == 6
    manager.save(7, state, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [7, 8]
    restored = manager.restore(state, fallback=True)
    assert restored is not None and restored.step == 7
    manager.save(8, state, blocking=True)
    assert [one.step for one in manager.checkpoints()] == [8]
