"""The restart of docs/how-to/elastic-resume.md: one rank is killed, and torchrun starts all of them again."""

import textwrap
from pathlib import Path

import pytest

from tests.docs.blocks import blocks, run
from tests.packaging.workspace import ROOT

INIT = 'dist.init_process_group("gloo")\n'
TEN_STEPS = "range(first, first + 10)"
STEP = "        model(torch.randn(8, 16))"
# Rank 1 of the first attempt waits until the first checkpoint is complete, and is killed.
DEATH = """\
        if step == 15 and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            while not pathlib.Path("checkpoints", "step-000010").exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def _replaced(text: str, part: str, by: str) -> str:
    assert text.count(part) == 1, f"the page has changed; expected {part!r} once in:\n{text}"
    return text.replace(part, by)


@pytest.mark.slow  # starts two ranks twice; by day tests/faults kills ranks of other jobs
def test_a_killed_rank_is_restarted_and_continues_from_the_newest_checkpoint(tmp_path: Path):
    page = blocks(ROOT / "docs" / "how-to" / "elastic-resume.md")
    script = next(block.code for block in page if block.notes.get("file") == "train.py")
    keys = next(block.code for block in page if "PrefixStore" in block.code)
    command = next(block for block in page if "--max-restarts" in block.code)
    script = _replaced(script, INIT, textwrap.dedent(keys))
    script = _replaced(script, TEN_STEPS, "range(first, 30)")
    script = _replaced(script, STEP, DEATH + STEP)
    (tmp_path / "train.py").write_text("import pathlib, signal, time\n" + script)
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stdout
    assert "Signal 9 (SIGKILL) received by PID" in done.stdout or "exitcode: -9" in done.stdout, done.stdout
    assert "2 ranks, steps 10 to 30" in done.stdout.splitlines()
