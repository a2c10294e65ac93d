"""The `shardkit` command: one tree of commands, its output, and its exit status for good and bad input."""

import dataclasses
import json
import subprocess
import sys
from importlib.metadata import EntryPoints

import pytest

from scripts.workspace import ROOT
from shardkit.tools.command import main, tree
from shardkit.tools.machine import Machine

pytest.importorskip("msgspec")

JOB = "tests.tools.test_planning:JOB"
GPT = ["estimate", "tests.tools.jobs:GPT"]
CONFIG = str(ROOT / "examples" / "recipes" / "llama-tiny.json")


def test_commands_are_listed_without_importing_torch():
    asked = ["", "--help", "--version", *(f"{name} --help" for name in tree.commands)]
    asked += ["checkpoint --help", "migrate --help", "migrate script --help"]
    asked += [f"checkpoint {name} --help" for name in ("inspect", "verify", "diff", "export", "import", "reshard")]
    code = f"""if True:
        import contextlib, sys
        from shardkit.tools.command import main
        for words in {asked}:
            with contextlib.suppress(SystemExit):  # argparse ends so
                main(words.split())
        assert not {{"torch", "libcst", "transformers"}} & sys.modules.keys()
    """
    shown = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout
    for words in ("estimate", "migrate", "checkpoint", "shardkit-tools 0.", "--world-size", "--fail-on", "Exit status"):
        assert words in shown
    for usage in ("checkpoint reshard [-h]", "migrate [-h]", "migrate script [-h]"):
        assert f"usage: shardkit {usage}" in shown


def test_help_needs_no_long_word(capsys):
    for arguments in ([], ["-h"], *([name, "-h"] for name in tree.commands)):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith("Usage: shardkit") and not shown.err


def test_a_hugging_face_config_on_64_ranks(tmp_path, capsys):
    pytest.importorskip("transformers")
    out = tmp_path / "estimate.json"
    arguments = ["--hf-config", CONFIG, "--world-size", "64", "--sequence", "32", "--dtype", "float32"]
    assert main(["estimate", *arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "rank 0 of 64" in printed and "exposed communication" in printed
    found = json.loads(out.read_text())
    assert found["kind"] == "estimate" and found["axes"] == {"dp": 64}
    assert found["peak"]["bytes"] == sum(found["peak"]["by_category"].values())
    layer = [row for row in found["traffic"] if row["fqn"] == "model.layers.0" and row["collective"] == "all-gather"]
    assert [(row["phase"], row["calls"]) for row in layer] == [("forward", 1), ("backward", 1)]
    assert all(row["between"] > row["inside"] > 0 for row in layer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["estimate"], "expected a model (pkg.module:name) or --hf-config"),
        ([*GPT], "nothing says what goes in"),
        (["estimate", "tests.tools.jobs:Nothing"], "has no 'Nothing'"),
        (["estimate", "no.such.module:thing"], "raised ModuleNotFoundError"),
        (["estimate", "tests.tools.jobs"], "is not MODULE:FUNCTION"),
        (["estimate", ":GPT"], "is not MODULE:FUNCTION"),
        (["estimate", ".jobs:GPT"], "raised TypeError"),
        (["estimate", "tests.tools.jobs:WIDTH"], "is of type int"),
        ([*GPT, "--vocabulary", "9", "--machine", "abacus"], "there is no preset 'abacus'"),
        ([*GPT, "--vocabulary", "9", "--world-size", "dp=x"], "is not a mesh"),
        ([*GPT, "--vocabulary", "9", "--world-size", "dp=2,dp=2"], "is not a mesh"),
        ([*GPT, "--vocabulary", "9", "--reshard", "never"], "reshard is 'never'; expected default, true, false or a"),
        ([*GPT, "--vocabulary", "9", "--overlap-step"], "under the next forward, or in files, is one on the host"),
        ([*GPT, "--vocabulary", "9", "--offload", "--resident", "1GiB"], "add --overlap-step"),
        ([*GPT, "--vocabulary", "9", "--optimizer", "newton"], "no optimizer 'newton'"),
        ([*GPT, "--vocabulary", "0"], "0 is not in the range x>=1"),
        ([*GPT, "--vocabulary", "9", "--hf-config", "x.json"], "exclude each other"),
        ([*GPT, "--vocabulary", "9", "--inputs", "a:b"], "--inputs and --vocabulary exclude each other"),
        ([*GPT, "--vocabulary", "9", "--prefetch", "1", "--prefetch-budget", "1GiB"], "exclude each other"),
        (["estimate", JOB, "--vocabulary", "9"], "makes its own inputs"),
        (["estimate", "--hf-config", "no-such.json"], "no-such.json cannot be read as a Hugging Face config"),
        (["plan", JOB, "--world-size", "2", "--count", "0"], "0 is not in the range"),
        (["plan", JOB, "--world-size", "2", "--margin", "100"], "is not in the range"),
        (["plan", JOB, "--world-size", "2", "--memory", "lots"], "'lots' is not a number of bytes"),
        (["plan", JOB, "--world-size", "2", "--memory", "10"], "'10' has no unit; did you mean 10GiB?"),
        (["estimate", JOB, "--prefetch-budget", "1.5"], "'1.5' has no unit; did you mean 1.5GiB?"),
        (["plan", JOB, "--world-size", "2", "--memory", "0GiB"], "'0GiB' is nothing"),
        (["plan", JOB, "--world-size", "dp=2"], "'dp=2' is not a valid integer"),
        (["plan", JOB, "--world-size", "2", "--reshard", "true"], "No such option"),
        (["plan", JOB, "--write", "both.py", "--json", "both.py"], "two outputs would be written to one file"),
        (["profile", "--steps", "0", "true"], "0 is not in the range"),
        (["profile"], "Missing argument 'COMMAND...'"),
        (["watch", "--seconds", "3"], "Missing argument 'COMMAND...'"),
        *((["watch", "--seconds", one, "true"], "Invalid value for '--seconds'") for one in ("0", "-1", "soon", "inf")),
        (["report", "a", "b", "c"], "3 reports were given"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], message: str, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert not captured.out


def test_a_machine_is_shown_as_it_is_read(tmp_path, capsys):
    assert main(["estimate", "--show-machine", "a100"]) == 0
    path = tmp_path / "mine.json"
    path.write_text(capsys.readouterr().out)
    assert json.loads(path.read_text()).keys() == {field.name for field in dataclasses.fields(Machine)}
    assert main(["estimate", "--show-machine", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


def test_nothing_fits_a_tiny_limit(capsys):
    assert main(["plan", JOB, "--world-size", "2", "--memory", "10kB"]) == 1
    assert "ways fits" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_and_three(monkeypatch, capsys):
    def fails(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("shardkit.tools.estimating.command.machine_named", fails)
    assert main(["estimate", "--show-machine", "h100"]) == 3
    assert "error: this is a fault of shardkit, please report it: KeyError: 'oops' (line " in capsys.readouterr().err


def test_short_and_capital_names_are_understood(tmp_path):
    out = tmp_path / "estimate.json"
    assert (
        main(["estimate", JOB, "--machine", "H100", "--dtype", "BF16", "--reduce-dtype", "fp32", "--json", str(out)])
        == 0
    )
    found = json.loads(out.read_text())["dtypes"]
    assert (found["computation"], found["reduction"]) == ("bfloat16", "float32")


def test_a_command_of_a_package_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr("shardkit.tools.command.entry_points", lambda **_: EntryPoints())
    for arguments in (["a", "b"], ["--help"], []):
        assert main(["migrate", *arguments]) == 2
        told = capsys.readouterr().err
        assert "'migrate' needs the package shardkit-legacy-fsdp-compat, which is not installed" in told
    assert main(["--help"]) == 0
    assert "\n  migrate   Not installed: needs shardkit-legacy-fsdp-compat.\n" in capsys.readouterr().out
