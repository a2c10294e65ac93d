"""Observers: the environment names them, entry points provide them, and a missing one raises an error."""

import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardkit.core.observers import start_observers


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A distribution with two observers is installed, and no other; the list says which of them were started."""
    started: list[str] = []
    module = types.ModuleType("somebodys_observers")
    module.watch = lambda: started.append("watch")  # type: ignore[attr-defined]
    module.profile = lambda: started.append("profile")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    metadata = tmp_path / "somebody-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    names = "".join(f"{name} = somebodys_observers:{name}\n" for name in ("watch", "profile"))
    (metadata / "entry_points.txt").write_text(f"[shardkit.observers]\n{names}")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("SHARDKIT_WATCH", "SHARDKIT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    start_observers.cache_clear()
    yield started
    start_observers.cache_clear()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"SHARDKIT_WATCH": "1"}, ["watch"]),
        ({"SHARDKIT_WATCH": "0", "SHARDKIT_PROFILE": "yes"}, ["profile"]),
        ({"SHARDKIT_WATCH": ""}, []),
    ],
)
def test_those_that_are_asked_for_start_once(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_observers()
        start_observers()
    assert calls == expected


def test_one_that_nobody_offers_is_not_missed_in_silence(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_PROFILE", "records")
    monkeypatch.setattr(sys, "path", [])
    with pytest.warns(
        UserWarning, match=r"SHARDKIT_PROFILE is set, but .* entry point 'profile' in group shardkit.observers; install"
    ):
        start_observers()
    assert calls == []
