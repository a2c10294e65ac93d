"""Phrases that native readers stumble over stay out of what people read. The list grows when a review finds another."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.workspace import ROOT, packages

BETTER = {
    r"\b(?:is|are) no (?!longer\b|more\b|less\b|such\b|wider\b|larger\b)[a-zA-Z`]\w*": "is not a ..., are not ...",
    r"\bwhat is no\b": "what is not a ...; better: name it",
    r"\bthat which\b": "name it",
    r"\bfor no one\b": "for none, or None",
    r"\bto be had\b": "available",
    r"\bneed be\b": "is necessary, must",
    r"\bdear\b": "slow, expensive",
    r"\blets? go of\b|\blet go of\b": "frees",
    r"\bin silence\b": "without an error",
    r"\band (?:its |their )?kin\b": "and the like",
    r"\bwill do\b": "is enough",
    r"\bsuperfluous\b": "old, unused",
    r"\bhas got\b|\bhave got\b": "has, is",
    r"\bbehind (?:the|each) other\b|\bone behind the other\b": "one after the other",
    r"\b(?:of|for|from|than|beside|without|is|are) what\b(?! to\b)": "name it",
    # A sentence that begins with "What" and is not a question, first in its paragraph or after another sentence.
    r"(?:^|(?<=[.!] ))What [^\s.!?]+(?=(?:(?![.?!](?:\s|$)).)*(?:[.!]|$))": "name it",
}
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(package.readme for package in packages()),
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        # The site generates these from sources, which are read below.
        if path.name not in ("errors.md", "commands.md") and path.parent.name != "api"
    ),
]
# "There is no flat parameter" is plain; "It is no parameter" is not.
_THERE = re.compile(r"\b[Tt]here (?:is|are) no\b")


def stumbles(text: str) -> Iterator[tuple[str, str]]:
    """Every phrase of the list that stands in a text, with words to write in its place."""
    for paragraph in re.split(r"\n\s*\n", text):
        plain = _THERE.sub("", re.sub(r"\s+", " ", paragraph).strip())
        for pattern, better in BETTER.items():
            yield from ((match[0], better) for match in re.finditer(pattern, plain))


def test_pages_are_plain():
    found = {str(page.relative_to(ROOT)): list(stumbles(page.read_text())) for page in PAGES}
    assert {page: phrases for page, phrases in found.items() if phrases} == {}


def _strings(source: str) -> Iterator[str]:
    """All string literals of several words: messages, help texts and docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def _comments(source: str) -> Iterator[str]:
    """The comments; those on consecutive lines are one text."""
    found = [re.search(r"(?:^ *|  )#+ (.*)", line) for line in source.splitlines()]
    for are_comments, lines in itertools.groupby(found, bool):
        if are_comments:
            yield " ".join(line[1] for line in lines)


def stumbles_in_source(source: str) -> list[tuple[str, str]]:
    """Every phrase of the list in the strings and comments of Python source."""
    return [one for text in (*_strings(source), *_comments(source)) for one in stumbles(text)]


# This file has the phrases themselves. The benchmarks, examples and tests are read as often as the packages.
SOURCES = [
    path
    for folder in ("packages", "tests", "benchmarks", "website", "scripts", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__) and "built" not in path.parts
]
OTHERS = [ROOT / ".ci" / "run", ROOT / "pyproject.toml"]  # read as text, without the marks of comments


def test_sources_are_plain():
    found = {str(one.relative_to(ROOT)): stumbles_in_source(one.read_text()) for one in SOURCES}
    for one in OTHERS:
        found[str(one.relative_to(ROOT))] = list(stumbles(re.sub(r"^\s*# ?", "", one.read_text(), flags=re.MULTILINE)))
    assert {path: phrases for path, phrases in found.items() if phrases} == {}
