"""`migrate script FILE`: shows how an FSDP1 script is rewritten, or rewrites it."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from shardkit.legacy_fsdp_compat.migrate.script import rewrite

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        "migrate script",
        description="Rewrites the imports and calls of an FSDP1 script that map one to one onto this package. Prints a "
        "diff to stdout, and to stderr what a person must decide.",
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="change the file")
    options = parser.parse_args(arguments)
    try:
        source = options.file.read_text()
        result = rewrite(source)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        sys.stderr.write(f"error: {options.file}: {error}\n")
        return 2
    name = str(options.file)
    before, after = source.splitlines(keepends=True), result.source.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"))
    for finding in result.findings:
        sys.stderr.write(f"{name}:{finding.line}: {finding.text}\n")
    if options.write and result.source != source:
        options.file.write_text(result.source)
    return 0
