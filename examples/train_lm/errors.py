"""Errors that the user can correct: reported in one line, by one rank, with exit code 2."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: a flag, a path, a text, a checkpoint. The message says what was seen and what to do."""
