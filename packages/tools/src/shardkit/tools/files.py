"""Files that commands read and write, and what is said of input that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")


class InputError(ValueError):
    """Input or a setting that cannot be used: the message says where, what was seen and what was expected."""


def check_targets(*paths: Path | None) -> None:
    """Before work starts: whether files can be written where they are asked for.

    Raises:
        InputError: for a directory, one that does not exist or must not be written, and two outputs in one file.
    """
    given = [path.absolute() for path in paths if path is not None]
    for path in given:
        if path.is_dir():
            raise InputError(f"{path} cannot be written: it is a directory; name a file")
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no directory {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise InputError(f"{path} cannot be written: no permission to write into {path.parent}")
    if len(set(given)) < len(given):
        raise InputError(f"two outputs would be written to one file: {', '.join(map(str, given))}")


def write_text(path: Path, text: str) -> None:
    """Writes a file under another name first, then renames it, so that a reader never sees half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def json_text(value: Any, *, indent: int = 0) -> str:
    """A value of dataclasses, dicts and lists as JSON. NaN and infinity become null."""
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode() + "\n"


def read_json(path: Path, kind: type[_T], what: str, error: type[InputError] = InputError) -> _T:
    """A JSON file as a dataclass of type `kind`; fields that it does not know are ignored.

    Raises:
        error: with the file, and the place of the first thing in it that is missing or of another type.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as failed:
        raise error(f"{path} cannot be read as {what}: {failed.strerror}") from failed
    except msgspec.ValidationError as failed:
        raise error(f"{path} is not {what}: {failed}") from failed
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failed:
        told = "it is nested too deeply" if isinstance(failed, RecursionError) else failed
        raise error(f"{path} is not {what}, or was cut short: {told}") from failed
