"""A comparison that is worse than the last saved one on the same machine is reported, and nothing else is."""

import copy
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "regression.py"


def ratio(median: float, spread: float = 0.02) -> dict[str, float]:
    return {"median": median, "first_quartile": median - spread, "third_quartile": median + spread}


# The parts of the form of `compare.py --json` that count, which test_compare.py makes for real.
SAVED: dict[str, Any] = {
    "surroundings": {"date": "2026-01-05", "cpu": "Some CPU", "cores": 2, "system": "Linux", "commit": "abc1234"},
    "settings": {"workload": "tiny", "world_size": 2, "device": "cpu", "systems": ["shardkit", "fsdp2", "ddp"]},
    "rows": [
        {"key": "step", "label": "step time", "ratios": {"fsdp2": ratio(0.5), "ddp": ratio(0.8)}},
        {"key": "calls", "label": "c10d calls", "ratios": {"fsdp2": ratio(2.0, spread=0)}},
    ],
}


def with_step(changed: dict[str, float], **more: dict[str, Any]) -> dict[str, Any]:
    run = copy.deepcopy(SAVED)
    run["rows"][0]["ratios"]["fsdp2"] = changed
    for part, values in more.items():
        run[part] |= values
    return run


def test_only_a_ratio_that_has_clearly_grown_on_the_same_machine_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)

    def said(run: dict[str, Any], status: int, *options: str) -> str:
        new, results = tmp_path / "new.json", tmp_path / "results"
        new.write_text(json.dumps({"runs": [run]}))
        monkeypatch.setattr(sys, "argv", ["regression.py", str(new), f"--results={results}", *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert ended.value.code == status
        return capsys.readouterr().out

    assert "nothing saved of this" in said(SAVED, 0, "--save")
    (file,) = (tmp_path / "results").iterdir()
    assert file.name == "tiny_2_cpu_shardkit.json" and json.loads(file.read_text()) == SAVED
    for unchanged in (ratio(0.4), ratio(0.54), ratio(0.6, spread=0.2)):  # better, a little worse, scattered
        assert "WORSE" not in said(with_step(unchanged), 0)
    for other in ({"surroundings": {"cpu": "Another"}}, {"settings": {"world_size": 4}}):
        assert "nothing saved of this" in said(with_step(ratio(5.0), **other), 0)
    worse = with_step(ratio(0.6))
    text = said(worse, 1, "--save")  # reported, and kept as asked
    assert "step time, shardkit to fsdp2: 0.500 -> 0.600 WORSE" in text and "1 of 3 ratios are worse" in text
    said(worse, 0)
