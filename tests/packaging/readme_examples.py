"""Takes the Python blocks out of a README and runs each as a reader would: saved to a file, in an empty directory.

A block runs on its own in one process. ``<!-- processes: 2 -->`` on the line above it starts it through torchrun.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:<!-- processes: (?P<processes>\d+) -->\n+)?```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FENCE = re.compile(r"^```python", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    readme: Path
    line: int
    processes: int | None
    """How many ranks torchrun starts; None runs the block in one plain process."""
    code: str


def examples(readme: Path) -> list[Example]:
    """The Python blocks of a README, in order.

    Raises:
        ValueError: a block starts with ```python but is not well formed, and would silently not be run.
    """
    text = readme.read_text()
    found = [
        Example(
            readme=readme,
            line=text.count("\n", 0, match.start("code")) + 1,
            processes=int(match["processes"]) if match["processes"] else None,
            code=match["code"],
        )
        for match in _BLOCK.finditer(text)
    ]
    fences = len(_FENCE.findall(text))
    if len(found) != fences:
        raise ValueError(f"{readme}: {fences} python fences, but {len(found)} well-formed blocks")
    return found


def run_example(
    example: Example, directory: Path, python: str = sys.executable, timeout: float = 180.0
) -> subprocess.CompletedProcess[str]:
    """Run the block with ``python`` inside ``directory``; output and errors come back together in ``stdout``."""
    script = directory / "example.py"
    script.write_text(example.code)
    command = [python]
    if example.processes is not None:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={example.processes}"]
    # Only what is installed may be found, never the checkout that the caller happens to stand in.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [*command, str(script)],
        cwd=directory,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
