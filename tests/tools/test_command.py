"""The `shardkit` command and what it prints."""

import json
from pathlib import Path

import pytest

from shardkit.tools import command
from shardkit.tools.estimating.command import main as estimate
from shardkit.tools.planning.command import main as plan

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_commands_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command.main([]) == 0
    assert "shardkit COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]):
    assert command.main(["frobnicate"]) == 2
    assert "there is no command 'frobnicate'" in capsys.readouterr().err


def test_a_hugging_face_config_on_64_ranks(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "estimate.json"
    assert estimate(["--hf-config", config, "--world-size", "64", "--sequence", "32", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "rank 0 of 64" in printed and "exposed communication" in printed
    found = json.loads(out.read_text())
    assert found["kind"] == "estimate" and found["axes"] == {"dp": 64}
    assert found["peak"]["bytes"] == sum(found["peak"]["by_category"].values())
    layer = [row for row in found["traffic"] if row["fqn"] == "layers.0" and row["collective"] == "all-gather"]
    assert [(row["phase"], row["calls"]) for row in layer] == [("forward", 1), ("backward", 1)]
    assert all(row["between"] > row["inside"] > 0 for row in layer)


def test_a_sweep_is_a_table_and_a_drawing(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    drawing, out = tmp_path / "sweep.png", tmp_path / "sweep.json"
    arguments = ["--hf-config", config, "--sequence", "16", "--sweep", "world-size=2,20000", "--sweep", "reshard"]
    assert estimate([*arguments, "--plot", str(drawing), "--json", str(out)]) == 0
    assert "16384 ranks at most" in capsys.readouterr().out
    assert drawing.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert [one["settings"]["reshard"] for one in found] == ["true", "false"] * 2
    assert [one["estimate"] is None for one in found] == [False, False, True, True]
    # Three layers and the root, which is not resharded: gathered again for backward, or not.
    assert [_gathers(one["estimate"]) for one in found[:2]] == [7, 4]


def _gathers(estimate: dict) -> int:
    return sum(row["calls"] for row in estimate["traffic"] if row["collective"] == "all-gather")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a model"),
        (["tests.tools.jobs:GPT"], "nothing says what goes in"),
        (["tests.tools.jobs:Nothing"], "has no 'Nothing'"),
        (["no.such.module:thing"], "cannot be imported"),
        (["tests.tools.jobs"], "names no function"),
        (["tests.tools.jobs:WIDTH"], "is a int"),
        (["tests.tools.jobs:GPT", "--vocabulary", "9", "--machine", "abacus"], "there is no preset 'abacus'"),
        (["tests.tools.jobs:GPT", "--vocabulary", "9", "--world-size", "dp=x"], "is no mesh"),
        (["tests.tools.jobs:GPT", "--vocabulary", "9", "--sweep", "colour"], "'colour' cannot be swept"),
        (["tests.tools.jobs:GPT", "--vocabulary", "9", "--optimizer", "newton"], "no optimizer 'newton'"),
        ([":GPT"], "':GPT' names no function"),
        ([".jobs:GPT"], "'.jobs:GPT' names no function"),
        (["--hf-config", "no-such.json"], "no-such.json cannot be read as a Hugging Face config"),
        (["tests.tools.jobs:GPT", "--vocabulary", "9", "--json", "no/such/place.json"], "there is no directory"),
        (["tests.tools.jobs:GPT", "--vocabulary", "9", "--sweep", "dtype", "--plot", "x.doc"], "no drawings of this"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert estimate(arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "rwkv"}, "install transformers"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None}, 'has no "vocab_size" at its top'),
    ],
)
def test_configs_of_other_models_are_refused(change: dict, message: str, tmp_path: Path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **change}))
    assert estimate(["--hf-config", str(path)]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_machine_is_shown_as_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert estimate(["--show-machine", "a100"]) == 0
    path = tmp_path / "mine.json"
    path.write_text(capsys.readouterr().out)
    assert estimate(["--show-machine", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_nothing_fits_a_tiny_limit(capsys: pytest.CaptureFixture[str]):
    assert plan(["tests.tools.test_planning:JOB", "--world-size", "2", "--memory", "10kB"]) == 1
    assert "ways fits" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "0"], "--count is 0; expected a number from 1 on"),
        (["--micro-batch", "0"], "--micro-batch is 0"),
        (["--reshard", "true"], "a plan chooses --reshard itself"),
        (["--write", "no/such/place.py"], "there is no directory"),
    ],
)
def test_bad_arguments_of_a_plan_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert plan(["tests.tools.test_planning:JOB", "--world-size", "2", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def broken() -> None:
    """A factory that fails."""
    raise FileNotFoundError("weights.bin")


def test_a_factory_that_fails_is_told(capsys: pytest.CaptureFixture[str]):
    for command_of in (estimate, plan):
        assert command_of(["tests.tools.test_command:broken", "--vocabulary", "9", "--world-size", "2"]) == 1
        assert "FileNotFoundError: weights.bin" in " ".join(capsys.readouterr().err.split())


def test_a_sweep_goes_on_where_the_machine_has_holes(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "sweep.json"
    arguments = ["--hf-config", config, "--sequence", "16", "--machine", "v100", "--sweep", "dtype", "--json", str(out)]
    assert estimate(arguments) == 0
    assert "nothing of FLOP/s in bfloat16" in " ".join(capsys.readouterr().out.split())
    assert [one["estimate"] is None for one in json.loads(out.read_text())] == [False, True]
