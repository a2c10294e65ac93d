"""Splits the message of an error into its cause and its remedy.

The convention of messages: first the cause, then, after "; ", ": ", ". " or the end of a line, an instruction: a clause
that begins with a verb of `_VERBS`, perhaps after an introduction such as "to keep it", or one that says what must be,
such as "all ranks must run the same modules". A message that states the expected value needs no more words: the remedy
is to give it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORDS = """
    add align allocate apply ask assign avoid build call change check choose clip clone close compare complete compute
    convert copy correct cut define delete describe do drop enable export fix free gather give import include install
    keep leave let limit list load lower make mark move name open pack pad parallelize pass pick place point prepare
    put raise read record redistribute register remove rename repeat replicate report reshard restart restore return
    run save say see select set shard share show shrink skip slice split start step stop switch take train try
    uninstall unset update upgrade use wait wrap write
"""
_VERBS = frozenset(_WORDS.split())
_INTRODUCTIONS = frozenset(("else", "for", "if", "in", "on", "or", "otherwise", "then", "to", "when", "without"))
_ENDS = re.compile(r"(?<=[.?!])\s+|[;:]\s+|\n\s*|, so (?=\w+ \w+ must)")
_QUESTION = re.compile(r"(?:are|is|was) [^;]*\?", re.IGNORECASE)
_EXPECTED = re.compile(
    r"\b(?:expected|must (?:all |both )?(?:be|hold)|needs|takes|wraps|is for) (?!not\b)"
    r"(?P<value>[^;?]+?)(?:, got [^;]*)?$"
)
_ANOTHER = re.compile(r"\{(error|failed|failure|hint|problem|reason|strerror)\}$")
ANOTHER = "See the error that the message ends with."


@dataclass(frozen=True)
class Parts:
    """A message as a table shows it: the cause, and the remedy or None."""

    cause: str
    remedy: str | None


def split(message: str) -> Parts:
    """Cause and remedy of a message; the remedy is None if no clause of it says what to do."""
    for end in _ENDS.finditer(message):
        rest = message[end.end() :]
        if _instructs(rest):
            return Parts(_line(message[: end.start()]), _sentence(rest))
        if _QUESTION.match(rest):
            return Parts(_line(message[: end.start()]), f"Check: {_line(rest)}")
    return Parts(_line(message), None)


def implied(message: str) -> str | None:
    """The remedy of a message without an instruction: give the expected value, or see the error at its end."""
    if _ANOTHER.search(message):
        return ANOTHER
    expected = _EXPECTED.search(message)
    return _sentence(f"give {expected['value']}") if expected else None


def remedy_of_class(docstring: str | None) -> str | None:
    """The remedy that a class of errors has for all of them: the paragraph of its docstring after "Remedy:"."""
    found = re.search(r"^Remedy: (.+?)(?:\n\n|\Z)", docstring or "", re.DOTALL | re.MULTILINE)
    return _sentence(found[1].replace("`", "")) if found else None


def _instructs(text: str) -> bool:
    clause = _ENDS.split(text, maxsplit=1)[0]
    words = re.findall(r"[\w-]+(?=[\s,.)]|$)", clause)
    if not words or not clause.startswith(words[0]):
        return False
    first = words[0].lower()
    if "must" in words[1:]:
        return True
    if first in _INTRODUCTIONS:
        return any(word in _VERBS for word in words[2:])
    return first in _VERBS


def _line(text: str) -> str:
    return " ".join(text.split()).rstrip(";:,")


def _sentence(text: str) -> str:
    line = _line(text)
    return line[:1].upper() + line[1:] + ("" if line.endswith((".", "?")) else ".")
