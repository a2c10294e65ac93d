"""`accelerate launch` with a configuration file."""

import functools
import sys
from pathlib import Path

import pytest

from tests.trainers.launch import SCRIPTS, Engine, assert_case, run_command

pytest.importorskip("accelerate")


# The words in front of `accelerate launch`, and the variables to set.
WAYS = {"shardkit run": (["shardkit", "run"], {}), "SHARDKIT_INSTALL": ([], {"SHARDKIT_INSTALL": "1"})}


@functools.cache
def _launched_on_stock(directory: Path) -> dict:
    return _launched("stock", directory, [])


def _launched(engine: Engine, directory: Path, front: list[str], **variables: str) -> dict:
    scripts = Path(sys.executable).parent
    command = [*front, "accelerate", "launch", f"--config_file={SCRIPTS / 'fsdp2.yaml'}"]
    command = [str(scripts / word) if word in ("accelerate", "shardkit") else word for word in command]
    out = directory / "out.pt"
    command += [str(SCRIPTS / "train_launched.py"), f"--out={out}"]
    seen = run_command(command, engine, directory, out, **variables)
    assert not isinstance(seen, str), seen
    return seen["launched"]


@pytest.mark.parametrize("way", WAYS)
def test_launched_from_a_configuration_file(way: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    expected = _launched_on_stock(tmp_path_factory.getbasetemp())
    front, variables = WAYS[way]
    seen = _launched("shardkit", tmp_path, front, **variables)
    assert_case(seen, expected)
