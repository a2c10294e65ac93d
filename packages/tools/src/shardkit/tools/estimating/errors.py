"""What goes wrong before there is an estimate."""

from __future__ import annotations


class EstimateError(Exception):
    """A model, an input or a setting that cannot be estimated; the message says what was seen and what to do."""
