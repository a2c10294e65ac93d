"""From JSON to the dataclasses of the schema, with an error that says where in the file something is wrong."""

from __future__ import annotations

import dataclasses
import types
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["decode"]

_T = TypeVar("_T")


def decode(kind: type[_T], value: Any, path: str = "") -> _T:
    """`value`, as `json.load` gives it, as a dataclass of type `kind`.

    Raises:
        ValueError: with the path of the first entry that is missing or of another type, and both types.
    """
    result: _T = _decode(kind, value, path)
    return result


def _decode(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, path)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list:
        _expect(list, value, path, "a list")
        return [_decode(arguments[0], entry, f"{path}[{index}]") for index, entry in enumerate(value)]
    if origin is dict:
        _expect(dict, value, path, "an object")
        return {key: _decode(arguments[1], entry, f"{path}.{key}") for key, entry in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise ValueError(
                f"{path or 'the report'}: found {value!r}, expected one of {', '.join(map(repr, arguments))}"
            )
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (one for one in arguments if one is not types.NoneType)
        return _decode(inner, value, path)
    return _decode_plain(kind, value, path)


def _decode_plain(kind: Any, value: Any, path: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    _expect(kind, value, path, {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[kind])
    return value


def _decode_dataclass(kind: Any, value: Any, path: str) -> Any:
    _expect(dict, value, path, "an object")
    hints = _hints(kind)
    missing = [name for name in hints if name not in value]
    if missing:
        raise ValueError(f"{path or 'the report'}: '{missing[0]}' is missing")
    prefix = f"{path}." if path else ""
    return kind(**{name: _decode(hint, value[name], prefix + name) for name, hint in hints.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _expect(kind: type, value: Any, path: str, words: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
        raise ValueError(f"{path or 'the report'}: found {found}, expected {words}")
