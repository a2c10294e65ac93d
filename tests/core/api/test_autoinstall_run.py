"""Commands are run to their own end: their status comes back, and SIGTERM reaches them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardkit.autoinstall.run import run_command
from tests.support.waiting import await_true


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
