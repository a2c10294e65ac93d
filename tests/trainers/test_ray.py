"""Ray Train's TorchTrainer, whose workers are processes that Ray starts."""

import sys
from pathlib import Path

import pytest

from tests.trainers.launch import SCRIPTS, Engine, assert_case, run_command

pytest.importorskip("ray.train")


def trained(engine: Engine, directory: Path, **variables: str) -> dict:
    directory.mkdir()
    command = [sys.executable, str(SCRIPTS / "train_ray.py"), f"--out={directory / 'out.pt'}", f"--own={directory}"]
    # Ray's workers import the script's modules, and need no report of its use.
    variables |= {"PYTHONPATH": str(SCRIPTS), "RAY_USAGE_STATS_ENABLED": "0"}
    seen = run_command(command, engine, directory, directory / "out.pt", **variables)
    assert not isinstance(seen, str), seen
    return seen["ray"]


@pytest.mark.slow
def test_same_as_stock(tmp_path: Path):
    expected = trained("stock", tmp_path / "stock")
    assert_case(trained("shardkit", tmp_path / "shardkit", SHARDKIT_INSTALL="1"), expected)
