"""The code blocks of a page, run as a reader would: one after the other, in one directory that starts empty.

What a block needs stands in comments on the lines above it, which no reader sees:

    <!-- processes: 2 -->           torchrun starts the Python block on so many ranks
    <!-- file: train.py -->         the Python block is saved under this name; later blocks run it
    <!-- not run: the reason -->    the block is not run

Python and shell blocks (python, bash) without one run as they stand. Fences of other languages are no code to run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
_COMMENTS = re.compile(r"(?:^ *<!-- [^\n]*? -->\n+)+\Z", re.MULTILINE)
_COMMENT = re.compile(r"<!-- (?P<key>[^:\n]+): (?P<value>[^\n]*?) -->")
_KNOWN = {"processes", "file", "not run"}
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

    @property
    def processes(self) -> int | None:
        """How many ranks torchrun starts; None runs the block in one plain process."""
        return int(self.notes["processes"]) if "processes" in self.notes else None

    @property
    def runs(self) -> bool:
        return "not run" not in self.notes

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The Python and shell blocks of a page, in order.

    Raises:
        ValueError: for a fence in a language that is neither run nor known to be for reading only, or that does not
            end, and for a note that nobody reads: such a block would silently not be run.
    """
    text = page.read_text()
    found = list(_blocks(page, text))
    fences = len(re.findall(r"^ *```", text, re.MULTILINE))
    if fences != 2 * len(found):
        raise ValueError(f"{page}: {fences} lines are fences, but {len(found)} blocks begin and end")
    return [block for block in found if block.language in RUN]


def _blocks(page: Path, text: str) -> Iterator[Block]:
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
        yield Block(page, line, language, code, notes)


def run(
    block: Block, directory: Path, python: str = sys.executable, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run one block in `directory`, or save it if it is a file; output and errors come back together in `stdout`.

    Args:
        block: one that runs.
        directory: where; blocks of one page that belong together share it.
        python: the interpreter; commands that stand beside it are found by their names.
        timeout: seconds.
    """
    if block.language == "python" and "file" in block.notes:
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
    return subprocess.run(
        command,
        cwd=directory,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
