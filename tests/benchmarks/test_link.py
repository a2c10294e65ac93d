"""`compare.py --link` without the rights or the programs for a shaped link says what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.side_by_side.link import NoLink, shaped_link

IP = shutil.which("ip")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOR_ANOTHER_USER = """
import os, runpy, sys
os.geteuid = lambda: 1000
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _refused() -> str:
    with pytest.raises(NoLink) as caught, shaped_link("1gbit"):
        pass
    return str(caught.value)


def _program(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is all that PATH has, for a user who is root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_another_user_than_root_is_told(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(programs, "ip", f"echo ran >>{programs}/ran")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert _refused() == "--link makes network namespaces, which only root may do: run it as root"
    assert not (programs / "ran").exists()


def test_a_comparison_by_another_user_ends_with_that_error() -> None:
    command = [sys.executable, "-c", FOR_ANOTHER_USER, str(BENCHMARKS / "compare.py"), "--model=tiny", "--link=1gbit"]
    command += ["--world-size=2", "--systems=shardkit,fsdp2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "tiny, 2 ranks: --link makes network namespaces, which only root may do: run it as root"


def test_a_missing_program_is_named(programs: Path) -> None:
    needs = "--link needs the program {!r} (iproute2), which is not installed"
    assert _refused() == needs.format("ip")
    _program(programs, "ip", ":")
    assert _refused() == needs.format("tc")


@pytest.mark.skipif(os.geteuid() != 0 or IP is None, reason="network namespaces need root and ip")
def test_no_namespace_is_left_where_tc_is_missing(programs: Path) -> None:
    assert IP is not None
    (programs / "ip").symlink_to(IP)
    _refused()  # because of tc, or because a container may not make namespaces
    left = subprocess.run([IP, "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert f"compare{os.getpid()}" not in left


def test_a_command_that_is_refused_is_shown_with_its_error(programs: Path) -> None:
    _program(programs, "ip", "echo 'mount failed: Operation not permitted' >&2; exit 1")
    name = f"compare{os.getpid()}a"
    assert _refused() == f"--link: ip netns add {name} failed: mount failed: Operation not permitted"
