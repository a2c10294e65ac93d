"""All jobs, in order of value. Names of checks are "module:function" below tests.gpu."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu.schedule import Check, Job

PARTS = ["right", "memory", "speed", "graphs", "tools", "offload", "weights"]

_HOSTS = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MAX_CTAS": "2",
}
_WAYS = (_HOSTS, {**_HOSTS, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"})
"""Environments with which NCCL may accept several ranks on one GPU, in the order in which they are tried."""

# name, model, features, optimizer: see tests/support/parity.py
_ON_TWO: list[tuple[str, str, tuple[str, ...], str]] = [
    ("fp32", "mlp", (), "adamw"),
    ("bf16, reduced in fp32", "mlp", ("bfloat16_reduce_float32",), "adamw"),
    ("accumulation", "mlp", ("accumulate_no_sync",), "adamw"),
    ("dim 1", "transformer", ("dim_1",), "adamw"),
    ("pinned offload", "mlp", ("offload",), "adamw"),
    ("recomputation", "checkpoint_non_reentrant", (), "adamw"),
    ("clipping", "mlp", ("clipped",), "adamw"),
    ("fused AdamW", "mlp", (), "adamw_fused"),
    ("kept after forward", "mlp", ("no_reshard",), "adamw"),
    ("bf16 reductions", "mlp", ("reduce_bfloat16",), "adamw"),
    ("unshard by hand", "mlp", ("explicit_unshard",), "adamw"),
    ("steps within backward", "mlp", ("optimizer_in_backward",), "adamw"),
]
_ON_FOUR: list[tuple[str, str, tuple[str, ...], str]] = [
    ("HSDP 2 x 2", "mlp", ("hsdp_2",), "sgd"),
    ("HSDP 2 x 2, all-reduced later", "mlp", ("hsdp_2", "accumulate_no_all_reduce"), "sgd"),
    ("resharding to 2", "mlp", ("reshard_to_2",), "sgd"),
]


def _as_stock(cases: Sequence[tuple[Any, ...]], function: str = "right:parity") -> tuple[Check, ...]:
    return tuple(Check(f"{name} as stock's", function, rest) for name, *rest in cases)


_PLACED = Check("Owned and Blocks", "right:placed")
_RACES = tuple(
    Check(f"races, {name}", "right:races", (name,))
    for name in (
        *("fp32", "bf16", "kept", "HSDP", "offload", "activations"),
        *("overlapped", "overlapped on the device", "overlapped with backward"),
    )
)
_STEPS = (
    Check("a step never waits", "right:never_waits", limit=60),
    Check("a pinned input used again", "right:reused_input"),
)
_FAILED = Check("a launch that fails", "right:failed_launch")
_MEMORY = tuple(
    Check(f"{model}, {precision}", "memory:peaks", (model, precision))
    for model in ("uniform", "llama", "uneven")
    for precision in ("fp32", "bf16")
)
_SPEED = tuple(Check(model, "speed:turns", (model,)) for model in ("llama-1.3b", "deep", "uneven"))
_PROFILES = tuple(Check(f"profile of {engine}", "speed:profile", (engine,)) for engine in ("ours", "stock"))
_GRAPHS = tuple(
    Check(f"{engine}{', kept after forward' if kept else ''}", "graphs:replayed", (engine, kept))
    for engine, kept in (("ours", False), ("ours", True), ("stock", False))
)
_TOOLS = (Check("machine", "tools:machine"), Check("estimates", "tools:estimates"))
_OFFLOAD = tuple(Check(name, f"offload:{name}") for name in ("bandwidth", "hidden", "overlapped", "activations"))
_IPC = Check("one GPU", "weights:moved", ("IPC",))
_PAIR = Check("a pair", "weights:moved", ("pair",))


def jobs(facts: dict[str, Any]) -> list[Job]:
    """All jobs for a machine."""
    if facts["gpu"] is None:
        return _on_cpu()
    streams = Check("side streams", "right:side_streams")
    return [
        _trial(0),
        Job("right", "one rank", _STEPS, 60, "bound"),
        Job("right", "rank of 2", (*_STEPS, streams, _FAILED, *_RACES), 90, "mirror", 2),
        *_elsewhere(),
        *(Job("memory", f"rank of {ranks}", _MEMORY, 90, "mirror", ranks) for ranks in (8, 2)),
        Job("speed", "one rank", _SPEED, 60, quiet=True),
        Job("speed", "rank of 2", (*_SPEED, *_PROFILES), 70, "mirror", 2, quiet=True),
        Job("graphs", "rank of 2", _GRAPHS, 35, "mirror", 2, quiet=True),
        Job("tools", "this machine", _TOOLS, 40, "none", quiet=True),
        Job("offload", "rank of 2", _OFFLOAD, 70, "mirror", 2, quiet=True),
        Job("weights", "CUDA IPC", (_IPC,), 60, "gloo", 2),
    ]


def _on_cpu() -> list[Job]:
    """The same checks in few processes: there is only to learn whether they work."""
    played = (*_as_stock([*_ON_TWO, *_ON_FOUR]), *_STEPS, _FAILED, *_RACES, Check("compiled blocks", "right:compiled"))
    real = _real(2, {})
    return [
        replace(real, checks=(real.checks[0], *real.checks[-3:])),
        Job("right", "rank of 4", played, 200, "mirror", 4),
        Job("memory", "rank of 8", _MEMORY[2:4], 90, "mirror", 8),
        Job("speed", "one rank", (_SPEED[0], _PROFILES[0]), 70),  # for an estimate to compare with
        Job("graphs", "rank of 2", _GRAPHS, 70, "mirror", 2),
        Job("tools", "this machine", _TOOLS, 70, "none"),
        Job("offload", "rank of 2", _OFFLOAD, 200, "mirror", 2),
        Job("weights", "gloo", (_PAIR, _IPC), 60, "gloo", 2),
    ]


def _trial(way: int) -> Job:
    """Whether NCCL takes two ranks on this GPU. Where it does not, ranks are played, and two are real over gloo."""

    def then(held: bool) -> list[Job]:
        env = _WAYS[way]
        if held:
            registered = Check("registered memory", "right:registered")
            apart = _as_stock(_ON_FOUR)
            return [
                _real(2, env),
                _real(4, env),
                Job("right", "NCCL x4, bound", apart, 60, "bound", 4, env=env),
                Job("right", "NCCL x2, registered", (registered,), 60, ranks=2, env=env),
                *_checked("NCCL x2", "nccl", env),
                Job("weights", "NCCL", (_PAIR,), 60, "gloo", 2, env=env),
            ]
        if way + 1 < len(_WAYS):
            return [_trial(way + 1)]
        gloo = Job("right", "gloo x2", (*_as_stock(_ON_TWO[:3]), _PLACED), 90, "gloo", 2)
        return [_played(2), _played(4), gloo, *_checked("rank of 2", "mirror", {})]

    checks = (Check("collectives", "right:collectives", limit=30),)
    env = _WAYS[way]
    return Job("right", f"NCCL x2, way {way + 1}", checks, 50, "nccl", 2, env=env, then=then, trial=True, restarts=0)


def _real(ranks: int, env: dict[str, str]) -> Job:
    """Ranks over NCCL; on a CPU, over gloo."""
    cases = _ON_TWO if ranks == 2 else [*_ON_TWO[:4], *_ON_FOUR]
    checks = (Check("collectives", "right:collectives"), *_as_stock(cases), _PLACED)
    streams = Check("side streams", "right:side_streams")
    return Job("right", f"NCCL x{ranks}", (*checks, streams), 110, "nccl", ranks, env=env)


def _played(ranks: int) -> Job:
    cases = [*_ON_TWO, *(_ON_FOUR if ranks == 4 else ())]
    return Job("right", f"rank of {ranks}, parity", _as_stock(cases), 60, "mirror", ranks)


def _checked(name: str, kind: str, env: dict[str, str]) -> list[Job]:
    """Training under the checks of NCCL and torch; what is sent without having been written is NaN."""
    checks = _as_stock(_ON_TWO[:3], "right:poisoned")
    return [
        Job("right", f"{name}, NaN check", checks, 60, kind, 2, env={**env, "TORCH_NCCL_NAN_CHECK": "1"}),
        Job("right", f"{name}, DETAIL", checks, 60, kind, 2, env={**env, "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    ]


def _elsewhere() -> list[Job]:
    """Compiled blocks; races with another allocator; a small training under compute-sanitizer."""
    segments = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    compiled = Check("compiled blocks", "right:compiled", limit=100)
    found = [
        Job("right", "compiled", (compiled,), 110, "mirror", 2),
        Job("right", "expandable segments", _RACES, 60, "mirror", 2, env=segments),
    ]
    sanitizer = _sanitizer()
    for tool, engine in (("memcheck", "ours"), ("initcheck", "ours"), ("initcheck", "stock")) if sanitizer else ():
        check = Check("a small training", "right:small_training", (engine,), limit=150)
        command = (sanitizer, "--tool", tool, "--error-exitcode", "66", "--print-limit", "20")
        env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        found.append(
            Job("right", f"{tool} of {engine}", (check,), 150, "mirror", 2, env=env, command=command, restarts=0)
        )
    return found


def _sanitizer() -> str:
    """The path of compute-sanitizer, "" if there is none."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    paths = [home / place for home in homes for place in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or next(
        (str(path / "compute-sanitizer") for path in paths if (path / "compute-sanitizer").is_file()), ""
    )
