"""The generated pages: every public name, every command and every error, and a name without a docstring is found."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.packaging.workspace import ROOT

sys.path.insert(0, str(ROOT / "website"))

import api_reference
import command_reference
import error_index


def test_every_public_name_has_a_docstring():
    assert api_reference.undocumented() == []


def test_a_name_without_a_docstring_is_found(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("shardkit.made_up")
    code = "class Bare:\n    def method(self): ...\n    def _own(self): ...\n\ndef documented():\n    'Does it.'\n"
    exec(code, vars(module) | {"__name__": module.__name__}, vars(module))
    monkeypatch.setattr(api_reference, "modules", lambda: [module])
    assert api_reference.undocumented() == ["shardkit.made_up.Bare", "shardkit.made_up.Bare.method"]


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


def test_errors_are_read_from_the_sources(tmp_path: Path):
    source = tmp_path / "module.py"
    source.write_text(
        "_TEXT = 'expected a mesh'\n"
        "class Kept:\n"
        "    def add(self, fqn):\n"
        "        raise ValueError(f\"'{fqn}' has {len(fqn.parts)} \" f'parts') from None\n"
        "def check(x):\n"
        "    raise TypeError(_TEXT)\n"
        "    raise KeyError('not for users')\n"
        "    raise x\n"
    )
    assert list(error_index.raised(source, "shardkit.module")) == [
        error_index.Raised("ValueError", "'{fqn}' has {len} parts", "shardkit.module", "Kept.add"),
        error_index.Raised("TypeError", "expected a mesh", "shardkit.module", "check"),
    ]


def test_the_index_has_errors_of_every_package():
    page = error_index.page(ROOT)
    for package in ("core", "tp_adapter", "legacy_fsdp_compat", "tools"):
        assert f"## shardkit.{package}\n" in page
    assert page.count("\n| ") > 500
