"""Writes the generated pages into docs/reference, then builds the site with zensical; any warning is an error.

    hatch run docs:build    into website/built
    hatch run docs:serve    on http://localhost:8000, rebuilt when a page changes

Generated, and so not in git: the reference of public names, of commands and of errors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"


def generated() -> dict[Path, str]:
    """Every generated page by its path."""
    os.environ["COLUMNS"] = "100"  # the width of argparse's help
    import api_reference
    import command_reference
    import error_index

    if missing := api_reference.undocumented():
        raise SystemExit(f"public names without a docstring: {', '.join(missing)}")
    api = {REFERENCE / "api" / name: text for name, text in api_reference.pages().items()}
    return api | {
        REFERENCE / "commands.md": command_reference.page(),
        REFERENCE / "errors.md": error_index.page(ROOT),
    }


def write(pages: dict[Path, str]) -> None:
    """Writes the pages that have changed, so that a server that watches them rebuilds no others."""
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def main() -> int:
    """Builds or serves; returns zensical's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("generate", "build", "serve"))
    what = parser.parse_args().what
    write(generated())
    if what == "generate":
        return 0
    zensical = [sys.executable, "-m", "zensical", what]
    if what == "serve":
        return subprocess.run(zensical, cwd=ROOT, check=False).returncode
    done = subprocess.run(
        [*zensical, "--clean", "--strict"],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(done.stdout, end="")
    # zensical does not report problems that griffe finds in docstrings.
    return done.returncode or int("griffe: " in done.stdout)


if __name__ == "__main__":
    sys.exit(main())
