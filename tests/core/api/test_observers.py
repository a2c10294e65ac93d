"""Observers: the environment names them, entry points provide them, and a missing one raises an error."""

import contextlib
import io
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from shardkit.core import fully_shard
from shardkit.core.observers import start_logs, start_observers
from tests.support import on_ranks


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


# -- SHARDKIT_LOGS: messages of the loggers that it names, with the rank -----------------------------------------------


@pytest.mark.parametrize(
    ("logs", "modules"),
    [
        ("all,+core.engine", ["engine.root", "engine.group", "engine.group", "engine.step"]),
        ("all,-core.engine", []),
    ],
)
@on_ranks(1, isolated=True)
def test_the_loggers_that_are_named_write_once(rank: int, world_size: int, logs: str, modules: list[str]) -> None:
    os.environ["SHARDKIT_LOGS"] = logs
    with contextlib.redirect_stderr(io.StringIO()) as said:
        logging.basicConfig()  # the program's own handler
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)))
        model(torch.ones(1, 2)).sum().backward()
        model.reset_iter_state()
    lines = [line for line in said.getvalue().splitlines() if "shardkit" in line]
    assert [line.split(" rank 0 shardkit.core.")[1].split(":")[0] for line in lines] == modules
    if modules:
        assert "Sequential is a root: 4 parameters in 2 groups of 2 calls" in lines[0]


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDKIT_LOGS", "+engine")
    with pytest.raises(ValueError, match=r"SHARDKIT_LOGS has '\+engine'; use all, core.engine or core.checkpoint"):
        start_logs.__wrapped__()
