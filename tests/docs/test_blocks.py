"""Every Python block and every shell command of the pages and READMEs runs, or says why it does not."""

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from shardkit.core.torch_compat import GRAD_DTYPE_DECIDES
from tests.docs.blocks import PAGES, READMES, blocks, run, unseen
from tests.packaging.workspace import ROOT

# How-to pages that take some seconds.
QUICK = ("estimate", "hang", "mixed-precision", "offload", "trainers")


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
