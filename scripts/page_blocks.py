"""The code blocks of a page, run as a reader would: one after the other, in one directory that starts empty.

Comments on the lines above a block, which no reader sees, say how to run it:

    <!-- processes: 2 -->           torchrun starts the Python block on so many ranks
    <!-- file: train.py -->         the Python or JSON block is saved under this name; later blocks use it
    <!-- exits: 1 -->               the block ends with this exit status, not with 0
    <!-- not run: the reason -->    the block is not run

Python and shell blocks (python, bash) without one run as they stand. A `text` block that is the next one after a block
that runs shows its output: each line has to be printed, in any order. Numbers with a decimal point may differ by 1 %,
and whole seconds by any amount. A line `...` stands for lines that are left out. Fences of other languages are for
reading only.

A reader does not see the notes, so the text of the page has to name the file and the number of processes as well.
"""

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.workspace import ROOT, packages

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_COMMENTS = re.compile(r"(?:^ *<!-- [^\n]*? -->\n+)+\Z", re.MULTILINE)
_COMMENT = re.compile(r"<!-- (?P<key>[^:\n]+): (?P<value>[^\n]*?) -->")
_WHOLE_SECONDS = re.compile(r"(?<![\d.])\d+ s\b")
_DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]\d+)?")
_KNOWN = {"processes", "file", "exits", "not run"}
RUN = {"python", "bash"}
"""Languages whose blocks run."""
SHOWN = {"", "text", "json", "toml", "yaml"}
"""Languages of blocks that are there to be read."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    notes: dict[str, str] = field(default_factory=dict)
    said: str = ""
    """The text of the page between the block before this one and this block, without notes."""
    output: str = ""
    """The output that the page shows after the block."""

    @property
    def processes(self) -> int | None:
        """How many ranks torchrun starts; None runs the block in one plain process."""
        return int(self.notes["processes"]) if "processes" in self.notes else None

    @property
    def runs(self) -> bool:
        return "not run" not in self.notes

    @property
    def saved(self) -> bool:
        """Whether the block is a file for later blocks, which does not run by itself."""
        return "file" in self.notes

    @property
    def status(self) -> int:
        """The exit status that is expected."""
        return int(self.notes.get("exits", "0"))

    def missing(self, printed: str) -> list[str]:
        """Lines of the output on the page that are not among those printed."""
        lines, missing = printed.splitlines(), []
        for shown in filter(None, map(str.strip, self.output.splitlines())):
            if shown == "...":
                continue
            found = next((line for line in lines if _alike(shown, line)), None)
            if found is None:
                missing.append(shown)
            else:
                lines.remove(found)
        return missing

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def _alike(shown: str, printed: str) -> bool:
    """Whether two lines are the same but for spaces, whole seconds, and decimals that differ by less than 1 %."""
    shown, printed = (_WHOLE_SECONDS.sub("# s", " ".join(line.split())) for line in (shown, printed))
    pairs = zip(_DECIMAL.findall(shown), _DECIMAL.findall(printed), strict=False)
    return _DECIMAL.sub("#", shown) == _DECIMAL.sub("#", printed) and all(
        math.isclose(float(one), float(other), rel_tol=0.01) for one, other in pairs
    )


def unseen(page: Path) -> list[str]:
    """The parts of notes that the text of the page does not tell its reader."""
    lines, found = page.read_text().splitlines(), []
    for block in blocks(page):
        if block.saved and f"`{block.notes['file']}`" not in block.said:
            found.append(f"{block}: the text above the block does not say to save it as `{block.notes['file']}`")
        before = " ".join(_COMMENT.sub("", "\n".join(lines[: block.line - 1])).split())
        if block.processes is not None and f"--nproc-per-node {block.processes}" not in before:
            found.append(f"{block}: nothing above it says to start it with --nproc-per-node {block.processes}")
    return found


def blocks(page: Path) -> list[Block]:
    """The Python and shell blocks of a page, and files in other languages, in order.

    Raises:
        ValueError: for a fence in a language that is neither run nor known to be for reading only, or that does not
            end, and for a note that nobody reads: such a block would silently not be run.
    """
    text = page.read_text()
    found = list(_blocks(page, text))
    fences = len(re.findall(r"^ *```", text, re.MULTILINE))
    if fences != 2 * len(found):
        raise ValueError(f"{page}: {fences} lines are fences, but {len(found)} blocks begin and end")
    for index, (block, after) in enumerate(itertools.pairwise(found)):
        if block.language in RUN and block.runs and not block.saved and after.language == "text":
            found[index] = replace(block, output=after.code)
    return [block for block in found if block.language in RUN or block.saved]


def _blocks(page: Path, text: str) -> Iterator[Block]:
    end = 0
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        language = match["language"]
        if language not in RUN | SHOWN:
            raise ValueError(f"{page}:{line}: a block of '{language}'; expected one of {sorted(RUN | SHOWN)}")
        above = _COMMENTS.search(text[: match.start()])
        notes = dict(_COMMENT.findall(above[0])) if above else {}
        if unknown := notes.keys() - _KNOWN:
            raise ValueError(f"{page}:{line}: notes {sorted(unknown)}; expected {sorted(_KNOWN)}")
        indent = match["indent"]
        code = "".join(part.removeprefix(indent) for part in match["code"].splitlines(keepends=True))
        said = _COMMENT.sub("", text[end : match.start()])
        end = match.end()
        yield Block(page, line, language, code, notes, said)


def run(
    block: Block, directory: Path, python: str = sys.executable, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run one block in `directory`, or save it if it is a file.

    Output and errors come back together in `stdout`, with paths below `directory` relative to it.

    Args:
        block: one that runs.
        directory: where; blocks of one page that belong together share it.
        python: the interpreter; commands that stand beside it are found by their names.
        timeout: seconds.
    """
    if block.saved:
        (directory / block.notes["file"]).write_text(block.code)
        return subprocess.CompletedProcess([], 0, stdout="")
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.code]
    else:
        script = directory / f"{block.page.stem.lower().replace('-', '_')}_{block.line}.py"
        script.write_text(block.code)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={block.processes}"]
        command = [python, *(launcher if block.processes is not None else []), str(script)]
    # Only what is installed may be found, never the checkout that the caller happens to stand in.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent / "stock_exit")}
    environment["PATH"] = f"{Path(python).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    done.stdout = done.stdout.replace(f"{directory}{os.sep}", "")
    return done


READMES = [ROOT / "README.md", *(package.readme for package in packages())]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
