"""Generated pages: every error with cause and remedy, every public name, every command."""

import ast
import sys

import pytest

from scripts.workspace import ROOT

sys.path.insert(0, str(ROOT / "website"))

import api_reference
import command_reference
import error_index


def index() -> error_index.Index:
    return error_index.Index.of(ROOT)


def test_every_raise_is_read():
    """A message from elsewhere needs an entry in PASSED_ON, an error that users cannot see one in NOT_FOR_USERS."""
    assert [row.place for row in index().all() if row.cause is None] == []


def test_every_error_has_a_remedy():
    """Say in the message what to do, after "; " and as an instruction; error_remedies.py has the convention."""
    assert [(row.place, row.cause) for row in index().all() if row.remedy is None] == []


def test_exceptions_are_still_needed():
    left_out = {row.place for row in index().left_out}
    assert {*error_index.NOT_FOR_USERS, *error_index.PASSED_ON} - left_out == set()
    rows = list(index().all())
    for place, outer in error_index.PARTS.items():
        assert any(row.place.startswith(place) and row.cause.startswith("...: ") for row in rows), place
        assert outer == "DamagedCheckpointError" or any(outer in row.cause for row in rows), outer


def test_errors_that_helpers_make_are_listed():
    """Whatever the helper: a function, a method, an argument, or a class that makes the message."""
    listed = {(row.module, name) for row in index().all() for name in row.function.split(".")}
    passed_on = {tuple(place.rsplit(".", 1)) for place in error_index.PASSED_ON}
    through = [
        (module, function.name)
        for module, tree in error_index.sources_of(ROOT).trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for one in ast.walk(function)
        if isinstance(one, ast.Raise) and isinstance(one.exc, ast.Call)
        if ast.unparse(one.exc.func).rsplit(".", 1)[-1].islower()
    ]
    assert len(through) > 25
    assert [place for place in through if place not in listed | passed_on] == []


def test_the_page_has_errors_of_every_package():
    page = error_index.page(ROOT)
    for package in ("core", "tp_adapter", "legacy_fsdp_compat", "tools"):
        assert f"## shardkit.{package}\n" in page
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| error |")]
    assert len(rows) > 500
    assert [row for row in rows if "|  |" in row] == []


def test_every_public_name_has_a_docstring():
    assert api_reference.undocumented() == []


def test_the_reference_has_the_public_names():
    core = api_reference.pages()["core.md"]
    for name in ("fully_shard.fully_shard", "module.FSDPModule", "clip.clip_grad_norm_", "policies.AllGather"):
        assert f"::: shardkit.core.{name}\n" in core
    assert "::: shardkit.tools.estimating.job.TrainingJob\n" in api_reference.pages()["tools.md"]


def test_every_command_is_there_with_its_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = command_reference.page()
    for command in ("estimate", "watch", "run", "checkpoint reshard", "migrate script"):
        assert f"## `shardkit {command}`" in page
    assert "--fallback" in page and "--fail-on" in page
