"""`accelerate launch`: engines from a configuration file, and ranks that go different ways."""

import functools
import sys
from pathlib import Path

import pytest

from tests.trainers.launch import SCRIPTS, Engine, assert_case, ended, run_command

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


@pytest.mark.parametrize(
    ("loop", "where"),
    [
        *(("accelerate", "after a step"), ("Trainer", "between micro-batches")),
        *(
            pytest.param("accelerate", where, marks=pytest.mark.slow)
            for where in ("before backward", "without grad after a step", "raises before backward", "returns early")
        ),
        pytest.param("Trainer", "raises after a step", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_goes_another_way_is_an_error_on_all(loop: str, where: str, tmp_path: Path):
    """Rank 0 runs a forward more, raises, or returns early: each rank has its error, and none waits for the other."""
    scripts = Path(sys.executable).parent
    command = [scripts / "shardkit", "run", scripts / "accelerate", "launch", f"--config_file={SCRIPTS / 'fsdp2.yaml'}"]
    command += [SCRIPTS / "train_mismatched.py", f"--out={tmp_path}", f"--loop={loop}", f"--where={where}"]
    done = ended(command, tmp_path, 400)
    seen = [(tmp_path / f"rank{rank}") for rank in range(2)]
    assert all(one.exists() for one in seen), (done.stdout + done.stderr)[-6000:]
    first, second = (one.read_text() for one in seen)
    assert second.startswith("RuntimeError: ")
    if where.startswith("raises"):
        assert first == f"Other: {where}"
    elif where == "returns early":
        assert first == "no error"
    else:
        assert first.startswith("RuntimeError: ")
        assert "where this rank is at 'model." in first + second
