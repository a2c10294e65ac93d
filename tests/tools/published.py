"""Published step times of torchtitan's Llama models beside predicted ones: `published.json` has figures and sources.

    python -m tests.tools.published

A model of many equal layers is estimated with two and with four of them; time and memory grow by the same with each.
"""

import functools
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardkit.tools import Policies, TrainingJob, estimate_job
from tests.tools.llama_shaped import LlamaShaped

DATA = json.loads(Path(__file__).with_name("published.json").read_text())
# torchtitan's "op": results of these are kept, of products every other one, and all else is computed again.
_KEPT = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)


def _policy():
    products = 0

    def choose(context, function, *args, **kwargs):
        nonlocal products
        if function == torch.ops.aten.mm.default:
            products += 1
            return CheckpointPolicy.MUST_SAVE if products % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if function in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


class Titan(LlamaShaped):
    """With rotary positions and one of torchtitan's ways to recompute."""

    def __init__(self, recompute: str, **sizes: int) -> None:
        super().__init__(**sizes)
        self.recompute = recompute
        self.head_dim = sizes["width"] // sizes["heads"]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        angles = torch.outer(torch.arange(tokens.shape[1]), torch.rand(self.head_dim // 2))
        turns = torch.polar(torch.ones_like(angles), angles)
        for number, layer in enumerate(self.layers):
            if self.recompute == "operators":
                x = checkpoint(layer, x, turns, use_reentrant=False, context_fn=_policy)
            elif self.recompute == "layers" or (self.recompute == "every other layer" and number % 2 == 0):
                x = checkpoint(layer, x, turns, use_reentrant=False)
            else:
                x = layer(x, turns)
        return self.lm_head(self.norm(x))


@functools.cache
def _estimated(model: str, layers: int, recompute: str, batch: int, ranks: int, machine: str) -> tuple[float, float]:
    """Seconds of a step, and bytes of tensors at the peak."""
    sizes = {**DATA["models"][model], "layers": layers}
    sequence = sizes.pop("sequence")

    def made() -> nn.Module:
        return Titan(recompute, **sizes)

    job = TrainingJob(
        made,
        lambda: torch.randint(sizes["vocabulary"], (batch, sequence)),
        functools.partial(torch.optim.AdamW, foreach=True),
        policies=Policies(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    found = estimate_job(job, {"dp_shard": ranks}, machine)
    return found.timeline.step, float(found.memory.reserved)


def predicted(run: dict) -> tuple[float, float]:
    """Tokens per second of a GPU, and GiB that the allocator takes, of all layers of a run's model."""
    what = (run["recompute"], run["batch"], run["ranks"], run["machine"])
    two, four = (_estimated(run["model"], layers, *what) for layers in (2, 4))
    sizes = DATA["models"][run["model"]]
    step, memory = (b + (sizes["layers"] - 4) * (b - a) / 2 for a, b in zip(two, four, strict=True))
    return run["batch"] * sizes["sequence"] / step, memory / 2**30


def errors(runs: list[dict]) -> list[float]:
    """Of predicted speeds."""
    return [predicted(run)[0] / run["tokens_per_second"] - 1 for run in runs]


def memory_errors(runs: list[dict]) -> list[float]:
    """Of predicted memory, where it is published."""
    return [predicted(run)[1] / run["memory_gib"] - 1 for run in runs if "memory_gib" in run]


def main() -> None:
    print(
        "| model | GPUs | batch | recomputed | tokens/s published | predicted | error | memory published | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for run in DATA["runs"]:
        speed, memory = predicted(run)
        told = run["tokens_per_second"]
        error = f"{speed / told - 1:+.0%}{' (fitted)' if run.get('fitted') else ''}"
        held = f"{run['memory_gib']} GiB" if "memory_gib" in run else "-"
        gpus = f"{run['ranks']} {run['machine']}"
        row = (
            run["model"],
            gpus,
            run["batch"],
            run["recompute"],
            told,
            f"{speed:.0f}",
            error,
            held,
            f"{memory:.1f} GiB",
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    others = [run for run in DATA["runs"] if not run.get("fitted")]
    print(f"median error of those that nothing was fitted to: {statistics.median(map(abs, errors(others))):.1%}")
    print(f"median error of memory: {statistics.median(map(abs, memory_errors(DATA['runs']))):.1%}")


if __name__ == "__main__":
    main()
