"""Every Python block of every README runs as it stands."""

from pathlib import Path

import pytest

from tests.packaging.readme_examples import Example, examples, run_example
from tests.packaging.workspace import ROOT, packages

READMES = [ROOT / "README.md", *(package.readme for package in packages())]


def name(example: Example) -> str:
    return f"{example.readme.relative_to(ROOT)}:{example.line}"


@pytest.mark.parametrize("example", [e for readme in READMES for e in examples(readme)], ids=name)
def test_example_runs(example: Example, tmp_path: Path):
    result = run_example(example, tmp_path)
    assert result.returncode == 0, result.stdout
    # A quiet example is one that a reader cannot check.
    assert result.stdout.strip()
    assert "Warning" not in result.stdout, result.stdout


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_readme_has_an_example(readme: Path):
    assert examples(readme)


def test_quick_start_is_short():
    quick_start = examples(ROOT / "README.md")[0]
    assert quick_start.code.count("\n") <= 30


def test_blocks_are_found(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("```python\nx = 1\n```\n```bash\nls\n```\n<!-- processes: 2 -->\n\n```python\nx = 2\n```\n")
    assert [(e.code, e.processes, e.line) for e in examples(readme)] == [("x = 1\n", None, 2), ("x = 2\n", 2, 10)]


def test_a_block_that_would_not_be_run_is_refused(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("```python3\nx = 1\n```\n")
    with pytest.raises(ValueError, match="1 python fences, but 0"):
        examples(readme)


def test_a_failing_example_is_reported(tmp_path: Path):
    result = run_example(Example(tmp_path / "README.md", 1, None, "raise SystemExit('no such luck')\n"), tmp_path)
    assert result.returncode == 1
    assert "no such luck" in result.stdout
