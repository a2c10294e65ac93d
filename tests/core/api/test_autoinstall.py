"""`run` and SHARDKIT_INSTALL, as a user types them: unmodified scripts, in processes that Python starts anew."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from shardkit.autoinstall import VARIABLE
from shardkit.autoinstall.run import run
from tests.packaging.workspace import ROOT

SOURCES = ROOT / "packages" / "core" / "src"
TRAIN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
fully_shard(model[0])
fully_shard(model)
loss = model(torch.randn(2, 6)).square().mean()
loss.backward()
if dist.get_rank() == 0:
    print("engine", type(model).__mro__[1].__module__)
dist.destroy_process_group()
"""
TRAIN_FSDP1 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
model = FSDP(nn.Linear(6, 3), device_id=torch.device("cpu"))
model(torch.randn(2, 6)).sum().backward()
if dist.get_rank() == 0:
    print("engine", type(model).__module__)
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def started(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with the checkout's packages on PYTHONPATH, before those that are installed."""
    env = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RANK")}
    bin_directory = str(Path(sys.executable).parent)
    env |= {"PYTHONPATH": str(SOURCES), "PATH": f"{bin_directory}{os.pathsep}{env['PATH']}"} | variables
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, text=True, capture_output=True, timeout=180, check=False
    )


def core_run(*arguments: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return started(sys.executable, "-m", "shardkit.core", "run", *arguments, cwd=cwd, **variables)


def test_an_unmodified_script_under_torchrun(tmp_path: Path):
    done = core_run("--", *TORCHRUN, script(tmp_path, TRAIN), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "engine shardkit.core.module\n"
    assert done.stderr.count("runs FSDPSequential: 63 parameters in 2 groups, 2 ranks\n") == 1
    assert "warning: no model ran" not in done.stderr


def test_fsdp1_under_torchrun(tmp_path: Path):
    pytest.importorskip("shardkit.legacy_fsdp_compat")
    done = started(
        sys.executable, "-m", "shardkit.core", "run", "--fsdp1", *TORCHRUN, script(tmp_path, TRAIN_FSDP1), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "engine shardkit.legacy_fsdp_compat.fully_sharded_data_parallel\n"
    assert done.stderr.count("21 parameters in 1 groups, 2 ranks\n") == 1


SPAWNING = """
import multiprocessing, subprocess, sys
import torch.distributed.fsdp  # before the environment is asked for anything

def child(queue):
    import torch.distributed.fsdp as fsdp
    queue.put(fsdp.fully_shard.__wrapped__.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    code = "import torch.distributed.checkpoint, torch.distributed.fsdp as f"
    code += "; print(f.fully_shard.__wrapped__.__module__)"
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_child_processes_and_the_warning_that_nothing_was_sharded(tmp_path: Path):
    """torch.distributed.checkpoint imports FSDP in its middle, when shardkit could not import it yet."""
    done = core_run(script(tmp_path, SPAWNING), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["shardkit.core.fully_shard"] * 2
    assert "warning: no model ran on shardkit's engine" in done.stderr


@pytest.mark.daily(first=["torch._dynamo"])
@pytest.mark.parametrize(
    "first", ["torch.distributed.checkpoint.state_dict", "torch._dynamo", "torch.distributed.pipelining"]
)
def test_whichever_module_imports_fsdp(first: str, tmp_path: Path):
    code = f"import {first}; from torch.distributed.fsdp import fully_shard as f; print(f.__wrapped__.__module__)"
    done = started(sys.executable, "-c", code, cwd=tmp_path, SHARDKIT_INSTALL="1")
    assert done.stdout == "shardkit.core.fully_shard\n", done.stderr


def test_start_up_imports_nothing_else(tmp_path: Path):
    code = "import sys; print([name for name in sys.modules if name.startswith(('torch', 'shardkit.'))])"
    done = started(sys.executable, "-c", code, cwd=tmp_path, SHARDKIT_INSTALL="1")
    assert done.stdout == "['shardkit.autoinstall']\n", done.stderr


def test_a_python_that_cannot_import_shardkit_does_not_go_on_with_stock(tmp_path: Path):
    package = tmp_path / "torch" / "distributed" / "fsdp"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    code = "import shardkit.autoinstall; shardkit.autoinstall.arm(); import torch.distributed.fsdp"
    # -S leaves out site-packages, where torch is.
    done = started(sys.executable, "-S", "-c", code, cwd=tmp_path, SHARDKIT_INSTALL="1")
    assert "RuntimeError: SHARDKIT_INSTALL=1 asks for shardkit, but" in done.stderr


def test_a_value_that_means_nothing(tmp_path: Path):
    command = (sys.executable, "-c", "import torch.distributed.fsdp")
    done = started(*command, cwd=tmp_path, SHARDKIT_INSTALL="yes")
    assert "RuntimeError: SHARDKIT_INSTALL is 'yes'; expected 1, fsdp1" in done.stderr


@pytest.mark.daily(arguments=[("--",)])
@pytest.mark.parametrize("arguments", [(), ("--",)])
def test_a_missing_command(arguments: tuple[str, ...], tmp_path: Path):
    done = core_run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "a command is missing" in done.stderr


def test_fsdp1_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("shardkit.autoinstall.run.entry_points", lambda **_: EntryPoints())
    assert run(["false"], fsdp1=True) == 2  # and not the status of the command, which was not started
    captured = capsys.readouterr().err
    assert "--fsdp1 needs the package shardkit-legacy-fsdp-compat" in captured and captured.count("\n") == 1
