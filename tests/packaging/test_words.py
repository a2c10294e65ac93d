"""Phrases that native readers stumble over stay out of what people read. The list grows when a review finds another."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.workspace import ROOT, packages

BETTER = {
    r"\bis no (?!longer\b|more\b|less\b|such\b)[a-zA-Z`]\w*": "is not a ...",
    r"\bwhat is no\b": "what is not a ...; better: name it",
    r"\bthat which\b": "name it",
    r"\bfor no one\b": "for none, or None",
    r"\bto be had\b": "available",
    r"\bneed be\b": "is necessary, must",
    r"\bdear\b": "slow, expensive",
    r"\blets? go of\b|\blet go of\b": "frees",
    r"\bin silence\b": "without an error",
    r"\band kin\b": "and the like",
    r"\bwill do\b": "is enough",
    r"\bsuperfluous\b": "old, unused",
    r"\bhas got\b|\bhave got\b": "has, is",
    r"\bbehind (?:the|each) other\b|\bone behind the other\b": "one after the other",
}
PAGES = [
    *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *(package.readme for package in packages()),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in ("errors.md", "commands.md")),
]
# "There is no flat parameter" is plain; "It is no parameter" is not.
_THERE = re.compile(r"\b[Tt]here (?:is|was) no\b|\bthere is no\b")


def stumbles(text: str) -> Iterator[tuple[str, str]]:
    """Every phrase of the list that stands in a text, with what to write in its place."""
    text = _THERE.sub("", re.sub(r"\s+", " ", text))
    for pattern, better in BETTER.items():
        yield from ((match[0], better) for match in re.finditer(pattern, text))


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("It is no tensor, and\nthat which is kept.", ["is no tensor", "that which"]),
        ("There is no tensor; it is no longer kept, and is no more than a view.", []),
    ],
)
def test_phrases_are_found(text: str, phrases: list[str]):
    assert [phrase for phrase, _ in stumbles(text)] == phrases


def test_pages_are_plain():
    found = {str(page.relative_to(ROOT)): list(stumbles(page.read_text())) for page in PAGES}
    assert {page: phrases for page, phrases in found.items() if phrases} == {}


def _messages(path: Path) -> Iterator[str]:
    """What a file raises and warns with, and its help texts: string literals inside calls."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield from (
                part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def test_messages_are_plain():
    sources = [source.path for package in packages() for source in package.sources()]
    found = {str(path.relative_to(ROOT)): [*stumbles(" \n".join(_messages(path)))] for path in sources}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}
