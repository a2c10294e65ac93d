"""Every command over a matrix of bad input: status 2, one line that names the file, no traceback, nothing written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit.tools.command import main
from shardkit.tools.machine import preset
from shardkit.tools.report.files import write_report
from tests.tools.synthetic import report

GPT = ["tests.tools.jobs:GPT", "--vocabulary", "9", "--world-size", "2"]
# Commands that read a file, with the place of its name.
READERS = {
    "report": ["report", "FILE"],
    "report of two": ["report", "GOOD", "FILE"],
    "report and estimate": ["report", "GOOD", "--estimate", "FILE"],
    "doctor": ["doctor", "FILE"],
    "machine of estimate": ["estimate", *GPT, "--machine", "FILE"],
    "machine that is shown": ["estimate", "--show-machine", "FILE"],
    "machine of plan": ["plan", *GPT, "--machine", "FILE"],
    "config of estimate": ["estimate", "--hf-config", "FILE"],
    "config of plan": ["plan", "--hf-config", "FILE", "--world-size", "2"],
}
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e</script>"


def damaged(directory: Path) -> dict[str, bytes | None]:
    """Contents of bad files by their defect; None where there is no file."""
    path = directory / "report.json"
    write_report(report(), path)
    whole = path.read_text()
    machine = preset("h100").to_json()
    return {
        "missing": None,
        "a directory": None,
        "empty": b"",
        "blank": b" \n",
        "truncated": whole[: len(whole) // 2].encode(),
        "binary": bytes(range(256)),
        "another encoding": "\ufeff{}".encode("utf-16"),
        "a number": b"1",
        "null": b"null",
        "a list": b"[]",
        "an empty object": b"{}",
        "deep": b"[" * 200_000,
        "deep object": b'{"a":' * 200_000,
        "huge number": b'{"schema": 1e999, "version": 1e999}',
        "long number": b'{"schema": ' + b"9" * 10_000 + b"}",
        "NaN": json.dumps({**machine, "memory_bandwidth": float("nan")}).encode(),
        "hostile strings": json.dumps({"schema": HOSTILE, "name": HOSTILE, "model_type": HOSTILE}).encode(),
        "wrong types": json.dumps({**machine, "flops": HOSTILE, "model_type": 7, "schema": [], "version": {}}).encode(),
        "a report of nobody": json.dumps({**json.loads(whole), "ranks": []}).encode(),
    }


@pytest.mark.parametrize("reader", READERS)
def test_bad_files_are_told_in_one_line(reader: str, tmp_path, capsys) -> None:
    good = tmp_path / "report.json"
    for what, content in damaged(tmp_path).items():
        path = tmp_path / "bad.json"
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        if what == "a directory":
            path.mkdir()
        elif content is not None:
            path.write_bytes(content)
        before = sorted(tmp_path.iterdir())
        names = {"FILE": str(path), "GOOD": str(good)}
        status = main([names.get(word, word) for word in READERS[reader]])
        told = capsys.readouterr()
        assert status == 2, (what, status, told)
        assert told.err.startswith("error: ") and told.err.count("\n") == 1, (what, told.err)
        assert "bad.json" in told.err and "\x1b" not in told.err + told.out and not told.out, (what, told)
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", "GOOD", "--html", "OUT"],
        ["report", "GOOD", "--trace", "OUT"],
        ["report", "GOOD", "--json", "OUT"],
        ["doctor", "GOOD", "--json", "OUT"],
        ["estimate", *GPT, "--json", "OUT"],
        ["plan", *GPT, "--write", "OUT"],
        ["plan", *GPT, "--json", "OUT"],
        ["profile", "--out", "OUT", "touch", "MARK"],
        ["profile", "--html", "OUT", "touch", "MARK"],
    ],
)
def test_outputs_are_checked_before_work_starts(arguments: list[str], tmp_path, capsys) -> None:
    damaged(tmp_path)
    (tmp_path / "full").write_text("a file")
    for out in (tmp_path, tmp_path / "none" / "x", tmp_path / "full" / "x"):
        names = {"OUT": str(out), "GOOD": str(tmp_path / "report.json"), "MARK": str(tmp_path / "ran")}
        before = sorted(tmp_path.iterdir())
        assert main([names.get(word, word) for word in arguments]) == 2
        told = capsys.readouterr()
        assert "cannot be written" in told.err and told.err.count("\n") == 1 and not told.out
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("ending", ["raise ValueError('no\\nway')", "import sys; sys.exit(0)", "def f(:", "1 / 0"])
@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_a_module_that_fails_is_told(command: str, ending: str, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "failing.py").write_text(ending + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    for option in ([], ["--inputs", "failing:x"], ["--tp-plan", "failing:x"], ["--optimizer", "failing:x"]):
        model = ["tests.tools.jobs:GPT", *([] if "--inputs" in option else ["--vocabulary", "9"])] if option else []
        assert main([command, *(model or ["failing:x"]), *option, "--world-size", "2"]) == 2
        told = capsys.readouterr()
        assert told.err.startswith("error: importing ") and told.err.count("\n") == 1 and not told.out


def test_control_characters_of_a_report_never_reach_the_terminal(tmp_path, capsys) -> None:
    path = tmp_path / "report.json"
    write_report(report(), path)
    found = json.loads(path.read_text())

    def poisoned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: poisoned(one) for name, one in value.items()}
        if isinstance(value, list):
            return [poisoned(one) for one in value]
        return f"{value}{HOSTILE}" if value in ("blocks.0", "cpu", "host-a", "Net") else value

    path.write_text(json.dumps(poisoned({**found, "notes": [HOSTILE]})))
    for arguments in (["report", str(path)], ["report", str(path), str(path)], ["doctor", str(path)]):
        assert main(arguments) == 0
        told = capsys.readouterr()
        assert not set("\x1b\x07\u202e") & set(told.out + told.err)
    assert main(["report", str(path), "--fail-on", f"step_time>{HOSTILE}"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_records_of_others_are_not_deleted(tmp_path, capsys) -> None:
    records = tmp_path / "records"
    records.mkdir()
    (records / "rank-7.json").write_text('{"mine": true}')
    (records / "notes.txt").write_text("mine")
    assert main(["profile", "--records", str(records), "--out", str(tmp_path / "out.json"), "true"]) == 2
    assert "rank-7.json is not a record of a rank, so it is not deleted" in capsys.readouterr().err
    assert sorted(path.name for path in records.iterdir()) == ["notes.txt", "rank-7.json"]
    assert main(["profile", "--records", str(tmp_path / "records" / "notes.txt"), "true"]) == 2


def test_nobody_reads_on(tmp_path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from shardkit.tools.command import main; sys.exit(main(['estimate', '--show-machine', 'h100']))"
    found = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert not found.stderr
