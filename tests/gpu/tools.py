"""How true the tools are: the description that calibration writes, and estimates beside measured figures."""

import importlib.util
import json
from typing import Any

import torch

from tests.gpu.training import MIB, MS, NETWORKS
from tests.gpu.worlds import ON_CPU, Place, Skip


def machine(place: Place) -> dict[str, Any]:
    """Measures this machine in a process of its own, and leaves its description in the results."""
    from shardkit.tools.calibration import calibrate

    described = calibrate(1, place.device.type).to_json()
    (place.directory / "machine.json").write_text(json.dumps(described, indent=2) + "\n")
    flops = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in described["flops"].items())
    rest = f"{described['memory_bandwidth'] / 1e12:.3g} TB/s, a launch {described['operator_seconds'] * 1e6:.1f} us"
    return {**described, "text": f"TFLOP/s {flops}; {rest}"}


def estimates(place: Place) -> dict[str, Any]:
    """Estimated and measured MiB and milliseconds for each row of the parts memory and speed so far."""
    if importlib.util.find_spec("msgspec") is None:
        raise Skip("msgspec is not installed")
    from shardkit.tools import load_machine

    described = load_machine(place.directory / "machine.json")
    rows = [row for row in json.loads((place.directory / "results.json").read_text())["rows"] if row["figures"]]
    found: dict[str, Any] = {}
    for row in rows:
        measured = row["figures"].get("ours")
        if row["part"] not in ("memory", "speed") or not isinstance(measured, dict) or (ON_CPU and len(found) == 2):
            continue
        model, _, precision = row["check"].partition(", ")
        estimate = _estimated(model, row["figures"]["world"], precision != "fp32", described)
        # The time of several ranks depends on a network that is not there.
        names = [name for name in estimate if name in measured and (name != "ms" or row["figures"]["world"] == 1)]
        pairs = {name: [estimate[name], measured[name]] for name in names}
        found[f"{row['part']}, {row['job']}, {row['check']}"] = pairs
    errors = [round(abs(mine / seen - 1), 3) for pairs in found.values() for mine, seen in pairs.values() if seen]
    return {
        "estimated and measured": found,
        "text": f"{len(errors)} figures, errors up to {max(errors, default=0):.0%}",
    }


def _estimated(model: str, world: int, bf16: bool, described: Any) -> dict[str, float]:
    from shardkit.tools import Policies, TrainingJob, estimate_job

    network, precision = NETWORKS[model], (torch.bfloat16, torch.float32) if bf16 else (None, None)
    job = TrainingJob(
        network.build,
        network.inputs,
        torch.optim.AdamW,
        loss=lambda output, batch: output,
        policies=Policies(
            wrap=("LlamaBlock",) if "llama" in model else ("GPTBlock",),
            param_dtype=precision[0],
            reduce_dtype=precision[1],
        ),
    )
    made = estimate_job(job, world, described.replace(ranks_per_host=world))
    return {
        "allocated": round(made.peak.bytes / MIB, 1),
        "reserved": round((made.reserved_bytes - described.process_bytes) / MIB, 1),
        "ms": round(made.timeline.step / MS, 3),
    }
