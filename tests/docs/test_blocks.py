"""Every Python block and every shell command of the pages and READMEs runs, or says why it does not."""

import textwrap
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from scripts.page_blocks import PAGES, READMES, blocks, run, unseen
from scripts.workspace import ROOT
from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES

# How-to pages that take some seconds.
QUICK = ("estimate", "mixed-precision", "offload", "trainers")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _pages() -> list[ParameterSet]:
    """Pages with a block that runs. Most train, or start torchrun several times: those are for `hatch run test-all`.

    `hatch run wheels` runs the packages' READMEs.
    """
    pages = [page for page in PAGES if any(block.runs for block in blocks(page))]
    quick = {ROOT / "README.md", *(ROOT / "docs" / "how-to" / f"{name}.md" for name in QUICK)}
    return [pytest.param(page, id=_name(page), marks=[] if page in quick else [pytest.mark.slow]) for page in pages]


@pytest.mark.parametrize("page", _pages())
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path):
    for block in blocks(page):
        if not block.runs:
            continue
        result = run(block, tmp_path)
        assert result.returncode == block.status, f"{block}:\n{result.stdout}"
        # The page shows estimates for torch before 2.15, which sums in another dtype and launches collectives together.
        if page.name != "estimate.md" or not GRAD_DTYPE_DECIDES:
            assert block.missing(result.stdout) == [], f"{block}:\n{result.stdout}"
        if block.language == "python" and not block.saved:
            # A quiet example is one that a reader cannot check.
            assert result.stdout.strip(), block
            assert "Warning" not in result.stdout, f"{block}:\n{result.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_reader_sees_names_of_files_and_numbers_of_processes(page: Path):
    assert unseen(page) == []


def test_what_does_not_run_says_why():
    reasons = {str(block): block.notes["not run"] for page in PAGES for block in blocks(page) if not block.runs}
    assert [block for block, reason in reasons.items() if len(reason.split()) < 3] == []


@pytest.mark.parametrize("readme", READMES, ids=_name)
def test_every_readme_has_an_example(readme: Path):
    assert any(block.language == "python" and block.runs for block in blocks(readme))


def test_the_readme_is_a_screen_and_a_half():
    readme = ROOT / "README.md"
    quick_start = next(block for block in blocks(readme) if block.language == "python")
    assert quick_start.code.count("\n") <= 30
    assert readme.read_text().count("\n") <= 108


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
