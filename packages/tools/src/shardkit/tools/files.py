"""Files that commands read and write, and errors for unusable input."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


class InputError(ValueError):
    """Input or a setting that cannot be used: the message has the place, the value seen and the value expected."""


def check_targets(*paths: Path | None) -> None:
    """Checks, before work starts, that the requested files can be written.

    Raises:
        InputError: for a directory, one that does not exist or is not writable, and two outputs in one file.
    """
    given = [path.absolute() for path in paths if path is not None]
    for path in given:
        if path.is_dir():
            raise InputError(f"{path} cannot be written: it is a directory; name a file")
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: there is no directory {path.parent}; make it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise InputError(f"{path} cannot be written: no permission to write into {path.parent}; name another file")
    if len(set(given)) < len(given):
        raise InputError(
            f"two outputs would be written to one file: {', '.join(map(str, given))}; name a file for each"
        )


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name, then renames it, so readers never see part of it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def json_text(value: Any, *, indent: int = 0) -> str:
    """A value of dataclasses, dicts and lists as JSON. NaN and infinity become null."""
    import msgspec  # here and below: errors and checks of paths do without it

    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode() + "\n"


def read_json(path: Path, kind: type[_T], what: str, error: type[InputError] = InputError) -> _T:
    """A JSON file as a dataclass of type `kind`; unknown fields are ignored.

    Raises:
        error: with the file, and the first place in it that is missing or of the wrong type.
    """
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as failed:
        raise error(
            f"{path} cannot be read as {what}: {failed.strerror}; check the path and its permissions"
        ) from failed
    except msgspec.ValidationError as failed:
        raise error(f"{path} is not {what}: {failed}; correct the file") from failed
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failed:
        told = "it is nested too deeply" if isinstance(failed, RecursionError) else failed
        raise error(f"{path} is not {what}, or was cut short: {told}; write it again") from failed
