"""Every Python block and every shell command of the pages and READMEs runs, or says why it does not."""

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from tests.docs.blocks import PAGES, READMES, Block, blocks, run, unseen
from tests.gpu.publish import BEGIN, END
from tests.packaging.workspace import ROOT

# How-to pages that take some seconds.
QUICK = ("estimate", "hang", "mixed-precision", "offload", "plan", "profile", "trainers")


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
    before, _, rest = readme.read_text().partition(BEGIN)
    assert before.count("\n") + rest.partition(END)[2].count("\n") <= 108


def test_blocks_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\n```\n```bash\nls\n```\n<!-- processes: 2 -->\n\n```python\nx = 2\n```\n"
        "- in a list\n\n  <!-- not run: needs a cluster -->\n  ```bash\n  sbatch\n  ```\n```\na drawing\n```\n"
    )
    assert [(b.line, b.language, b.code, b.processes, b.runs) for b in blocks(page)] == [
        (2, "python", "x = 1\n", None, True),
        (5, "bash", "ls\n", None, True),
        (10, "python", "x = 2\n", 2, True),
        (16, "bash", "sbatch\n", None, False),
    ]


def test_notes_that_a_reader_does_not_see_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- file: a.py -->\n```python\n```\nSave this as `b.py`:\n<!-- file: b.py -->\n```python\n```\n"
        "As before.\n<!-- file: b.py -->\n```json\n```\n<!-- processes: 2 -->\n```python\n```\n"
        "Start it with `torchrun\n--nproc-per-node 2 c.py`:\n<!-- processes: 2 -->\n```python\n```\n"
    )
    assert [problem.split()[0] for problem in unseen(page)] == ["page.md:3:", "page.md:11:", "page.md:14:"]


def test_the_output_on_a_page_is_compared(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nrun\n```\nIt prints:\n"
        "```text\nrank 0: 2 of 4\nrank 1:  2 of 4\n...\nloss 1.000 in 2.5e-03 after 4 s\n```\n"
        "```bash\nquiet\n```\n```\nnot its output\n```\n"
        "<!-- not run: there is no cluster -->\n```bash\n```\n```text\nx\n```\n"
    )
    first, *others = blocks(page)
    assert first.missing("rank 1: 2 of 4\nwarning\nrank 0: 2 of 4\nloss 1.005 in 2.49e-03 after 7 s\n") == []
    assert first.missing("rank 1: 2 of 4\nloss 1.02 in 2.5e-03 after 4 s\n") == [
        "rank 0: 2 of 4",
        "loss 1.000 in 2.5e-03 after 4 s",
    ]
    assert first.missing("rank 0: 3 of 4\nrank 1: 2 of 4\nloss 1.0 in 2.5e-03 after 4 s\n") == ["rank 0: 2 of 4"]
    assert [block.output for block in others] == ["", ""]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python3\nx = 1\n```\n", "a block of 'python3'"),
        ("```python\nx = 1\n", "1 lines are fences, but 0 blocks"),
        ("<!-- proceses: 2 -->\n```python\nx = 1\n```\n", "proceses"),
    ],
)
def test_a_block_that_would_not_be_run_is_refused(tmp_path: Path, text: str, message: str):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        blocks(page)


def test_a_file_is_there_for_the_commands_after_it(tmp_path: Path):
    script = Block(tmp_path / "page.md", 1, "python", "raise SystemExit('no such luck')\n", {"file": "train.py"})
    assert run(script, tmp_path).returncode == 0
    result = run(Block(tmp_path / "page.md", 5, "bash", "python train.py\n"), tmp_path)
    assert result.returncode == 1
    assert "no such luck" in result.stdout


def test_a_block_may_end_with_another_exit_status(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("<!-- exits: 3 -->\n```bash\nexit 3\n```\n")
    (block,) = blocks(page)
    assert run(block, tmp_path).returncode == block.status == 3


def test_a_failing_line_ends_a_shell_block(tmp_path: Path):
    result = run(Block(tmp_path / "page.md", 1, "bash", "false\necho went on\n"), tmp_path)
    assert result.returncode == 1
    assert "went on" not in result.stdout
