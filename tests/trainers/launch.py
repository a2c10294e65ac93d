"""Runs the scripts of this directory under torchrun, on stock's engine and on ours, and compares their notes."""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
Engine = Literal["stock", "shardkit"]
# The modules that a script needs.
NEEDS = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "transformers": ["accelerate", "transformers"],
    "transformers_experts": ["accelerate", "transformers.distributed"],
    "trl": ["trl", "peft"],
    "tensors": ["torchao", "bitsandbytes", "peft"],
    "torchft": ["torchft"],
    **{name: ["torchtitan"] for name in ("torchtitan", "torchtitan_experts", "torchtitan_annotated")},
}


def ended(
    command: Sequence[object], directory: Path | None = None, timeout: float = 280, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command after its end, with what it printed. `variables` join its environment."""
    env = os.environ | ENVIRONMENT | variables
    words = [str(word) for word in command]
    return subprocess.run(words, env=env, cwd=directory, text=True, capture_output=True, timeout=timeout, check=False)


def succeeded(command: Sequence[object], directory: Path | None = None, timeout: float = 280, **variables: str) -> Any:
    done = ended(command, directory, timeout, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="shardkit-trainers-")


def _checkpoints(script: str, engine: Engine, ranks: int) -> Path:
    """Where that run of the script keeps its checkpoints."""
    return Path(_directory().name) / f"{script}-{engine}-{ranks}"


def results(script: str, engine: Engine, ranks: int = 2, only_across: bool = False) -> dict[str, dict[str, Any]]:
    """The notes of a script, by case.

    shardkit resumes from stock's checkpoints as well. With `only_across` stock resumes from shardkit's, nothing else.

    Raises:
        Failed: with the end of its output, if it fails, or if the other engine was imported or said that it ran.
    """
    for module in NEEDS[script]:
        pytest.importorskip(module)
    seen = _run(script, engine, ranks, only_across)
    if isinstance(seen, str):
        pytest.fail(seen)
    return seen


@functools.cache
def _run(script: str, engine: Engine, ranks: int, only_across: bool) -> dict[str, dict[str, Any]] | str:
    """The cases, or why there are none: a script that fails is not run again for its other cases."""
    own = _checkpoints(script, engine, ranks)
    own = own.with_name(f"{own.name}-across") if only_across else own
    out = own.with_suffix(".pt")
    own.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(SCRIPTS / f"train_{script}.py"), f"--out={out}", f"--own={own}"]
    command += ["--only-across"] if only_across else []
    other = _checkpoints(script, "stock" if engine == "shardkit" else "shardkit", ranks)
    command += [f"--other={other}"] if only_across or (engine == "shardkit" and other.exists()) else []
    if engine == "shardkit":
        command = [sys.executable, "-m", "shardkit.core", "run", *command]
    return run_command(command, engine, own, out)


def run_command(
    command: list[str], engine: Engine, directory: Path, out: Path, **variables: str
) -> dict[str, dict[str, Any]] | str:
    """The notes that the command saved in `out`, by case, or why there are none. `variables` join the environment."""
    done = ended(command, directory, 500, TOKENIZERS_PARALLELISM="false", **variables)
    if done.returncode:
        return f"{command} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}"
    if (" parameters in " in done.stderr) != (engine == "shardkit"):
        return f"{command} does not say which engine ran:\n{done.stderr[-2000:]}"
    seen = torch.load(out, weights_only=False)
    assert seen["shardkit"] == (engine == "shardkit")
    cases: dict[str, dict[str, Any]] = seen["cases"]
    return cases


def assert_same(script: str, case: str, *, ranks: int = 2) -> None:
    """The same bits from both engines in a case of `train_<script>.py`: losses, norms, weights and all else noted."""
    # Stock first: shardkit resumes from its checkpoints.
    expected = results(script, "stock", ranks)[case]
    assert_case(results(script, "shardkit", ranks)[case], expected)


def assert_case(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    """The notes of a case on shardkit equal those on stock, and each ran on its own engine alone."""
    assert_engines(expected["runs"], seen["runs"])
    assert_equal(seen, expected)


def assert_equal(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close({**seen, "runs": 0}, {**expected, "runs": 0}, rtol=0, atol=0)


def assert_resumes_across(script: str, engine: Engine) -> None:
    """The engine goes on from the other's checkpoint as stock does from its own."""
    expected = results(script, "stock")["resumed"]
    shardkit = results(script, "shardkit")["across"]
    seen = shardkit if engine == "shardkit" else results(script, "stock", only_across=True)["across"]
    assert_engines(expected["runs"] if engine == "shardkit" else seen["runs"], shardkit["runs"])
    assert_equal(seen, expected)


def assert_engines(stock: dict[str, int], shardkit: dict[str, int]) -> None:
    """Each run gathered with its own engine and not once with the other."""
    assert stock["stock"] > 0 == stock["shardkit"]
    assert shardkit["shardkit"] > 0 == shardkit["stock"]
