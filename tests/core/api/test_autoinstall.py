"""`run` and SHARDKIT_INSTALL, as a user types them: unmodified scripts, in processes that Python starts anew."""

import os
import signal
import subprocess
import sys
import threading
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from scripts.workspace import ROOT
from shardkit.autoinstall import VARIABLE
from shardkit.autoinstall.run import main, run, run_command
from tests.support.waiting import await_true

SOURCES = ROOT / "packages" / "core" / "src"
TRAIN = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # imports FSDP in its middle, when shardkit could not be imported yet
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
fully_shard(model[0])
fully_shard(model)
options = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": torch.device("cpu")}
legacy = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 3)), **options)
for one in (model, legacy):
    one(torch.randn(2, 6)).square().mean().backward()
with FullyShardedDataParallel.state_dict_type(legacy, StateDictType.FULL_STATE_DICT):
    assert legacy.state_dict()["0.weight"].shape == (3, 6) == get_model_state_dict(legacy)["0.weight"].shape
if dist.get_rank() == 0:
    print("engines", type(model).__mro__[1].__module__, type(legacy).__module__)
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
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


def test_an_unmodified_script_under_torchrun(tmp_path: Path):
    """The names of FSDP1 as well; tests/tools runs a script without them."""
    pytest.importorskip("shardkit.legacy_fsdp_compat")
    core_run = (sys.executable, "-m", "shardkit.core", "run", "--fsdp1", "--")
    done = started(*core_run, *TORCHRUN, script(tmp_path, TRAIN), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "engines shardkit.core.module shardkit.legacy_fsdp_compat.fully_sharded_data_parallel\n"
    assert done.stderr.count("runs FSDPSequential: 63 parameters in 2 groups, 2 ranks\n") == 1
    assert "warning: no model ran" not in done.stderr


SPAWNING = """
import multiprocessing

def child(queue):
    import torch.distributed.fsdp as fsdp
    queue.put(fsdp.fully_shard.__wrapped__.__module__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    context.Process(target=child, args=(queue,)).start()
    print(queue.get())
"""


@pytest.mark.slow
def test_a_spawned_process(tmp_path: Path):
    done = started(sys.executable, script(tmp_path, SPAWNING), cwd=tmp_path, SHARDKIT_INSTALL="1")
    assert done.stdout == "shardkit.core.fully_shard\n", done.stderr


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("value", "error"), [("1", "=1 asks for shardkit, but"), ("yes", " is 'yes'; expected 1, fsdp1")]
)
def test_a_python_that_cannot_install_shardkit_does_not_go_on_with_stock(value: str, error: str, tmp_path: Path):
    package = tmp_path / "torch" / "distributed" / "fsdp"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    code = "import shardkit.autoinstall; shardkit.autoinstall.arm(); import torch.distributed.fsdp"
    # -S leaves out site-packages, where torch is.
    done = started(sys.executable, "-S", "-c", code, cwd=tmp_path, SHARDKIT_INSTALL=value)
    assert f"RuntimeError: SHARDKIT_INSTALL{error}" in done.stderr


def test_commands_that_train_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for arguments in ([], ["--"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert "a command is missing" in capsys.readouterr().err
    assert main(["true"]) == 0
    assert "warning: no model ran on shardkit's engine" in capsys.readouterr().err
    monkeypatch.setattr("shardkit.autoinstall.run.entry_points", lambda **_: EntryPoints())
    assert run(["false"], fsdp1=True) == 2  # and not the status of the command, which was not started
    captured = capsys.readouterr().err
    assert "--fsdp1 needs the package shardkit-legacy-fsdp-compat" in captured and captured.count("\n") == 1


# -- a command runs to its own end -------------------------------------------------------------------------------------


def test_the_status_of_the_command_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sh", "-c", "exit $STATUS"], os.environ | {"STATUS": "3"}, "watch") == 3
    assert run_command(["sh", "-c", "kill -KILL $$"], os.environ, "watch") == 128 + signal.SIGKILL
    assert run_command(["no-such-command-anywhere"], os.environ, "watch") == 127
    assert (
        capsys.readouterr().err == "shardkit watch: no-such-command-anywhere cannot be run: No such file or directory\n"
    )


def test_a_script_is_run_by_this_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; raise SystemExit(int(sys.argv[1]) + (sys.executable != sys.argv[2]))")
    assert run_command([str(script), "7", sys.executable], os.environ, "profile") == 7


def test_a_signal_to_end_reaches_the_command_and_its_last_words_are_heard(tmp_path: Path) -> None:
    handler, ready = signal.getsignal(signal.SIGTERM), tmp_path / "ready"

    def end() -> None:
        await_true(lambda: ready.exists() and signal.getsignal(signal.SIGTERM) != handler, "the command runs")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    command = f"trap 'exit 5' TERM; touch {ready}; while :; do sleep 0.1; done"
    assert run_command(["sh", "-c", command], os.environ, "watch") == 5
    assert signal.getsignal(signal.SIGTERM) == handler


def test_an_interrupt_is_the_commands_to_handle() -> None:
    script = """if True:
        import os, signal
        from shardkit.autoinstall.run import run_command
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
        slow_to_end = "trap 'sleep 0.5; exit 6' INT; sleep 1; echo up; while :; do sleep 0.1; done"
        raise SystemExit(run_command(["sh", "-c", slow_to_end], os.environ, "watch"))
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True, env=environment
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    assert process.wait(30) == 6
