"""The generated pages: every public name and every command, and a name without a docstring is found."""

import sys

import pytest

from tests.packaging.workspace import ROOT

sys.path.insert(0, str(ROOT / "website"))

import api_reference
import command_reference


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
