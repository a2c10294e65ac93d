"""Published step times of torchtitan's Llama models beside predicted ones: `published.json` has figures and sources.

python -m tests.tools.published
"""

import functools
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardkit.tools import Estimate, Policies, TrainingJob, estimate_job, preset
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
def _estimated(model: str, layers: int, recompute: str, batch: int, ranks: int, machine: str) -> Estimate:
    sizes = {**DATA["models"][model], "layers": layers}
    sequence = sizes.pop("sequence")
    job = TrainingJob(
        functools.partial(Titan, recompute, **sizes),
        lambda: torch.randint(sizes["vocabulary"], (batch, sequence)),
        functools.partial(torch.optim.AdamW, foreach=True),
        policies=Policies(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    # torchtitan's run_train.sh (run_llama_train.sh before) sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
    return estimate_job(job, {"dp_shard": ranks}, preset(machine).replace(expandable_segments=True))


def _of(run: dict, layers: int) -> Estimate:
    return _estimated(run["model"], layers, run["recompute"], run["batch"], run["ranks"], run["machine"])


def tokens_per_second(run: dict) -> float:
    """Of a GPU, predicted."""
    sizes = DATA["models"][run["model"]]
    two, four = (_of(run, layers).timeline.step for layers in (2, 4))
    return run["batch"] * sizes["sequence"] / (four + (sizes["layers"] - 4) * (four - two) / 2)


def memory_gib(run: dict) -> float:
    """Predicted memory of the allocator with stock's engine; all layers are simulated, as holes do not grow evenly.

    Stock gathers into a buffer on a stream of its own and copies from there, where ours gathers in place; and its
    sharded gradients, in float32, belong to the stream of reduce-scatters, where ours reuse the memory of activations
    (torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_all_gather, foreach_reduce).
    """
    found = _of(run, DATA["models"][run["model"]]["layers"])
    copies = found.peak.by_category["unsharded_parameters"]
    gradients = 4 * found.parameters / run["ranks"]
    return (found.memory.reserved + copies + gradients) / 2**30


def errors(runs: list[dict]) -> list[float]:
    return [tokens_per_second(run) / run["tokens_per_second"] - 1 for run in runs]


def memory_errors(runs: list[dict]) -> list[float]:
    return [memory_gib(run) / run["memory_gib"] - 1 for run in runs if "memory_gib" in run]


def main() -> None:
    print("| model | GPUs | batch | recomputed | tokens/s | predicted | error | memory | predicted |")
    print("|" + "---|" * 9)
    for run in DATA["runs"]:
        speed, told = tokens_per_second(run), run["tokens_per_second"]
        error = f"{speed / told - 1:+.0%}{' (fitted)' if run.get('fitted') else ''}"
        memory = [f"{run['memory_gib']} GiB", f"{memory_gib(run):.1f} GiB"] if "memory_gib" in run else ["-", "-"]
        job = [run["model"], f"{run['ranks']} {run['machine']}", run["batch"], run["recompute"]]
        print("| " + " | ".join(map(str, [*job, told, f"{speed:.0f}", error, *memory])) + " |", flush=True)
    others = [run for run in DATA["runs"] if not run.get("fitted")]
    print(f"median error of those that nothing was fitted to: {statistics.median(map(abs, errors(others))):.1%}")
    print(f"median error of memory: {statistics.median(map(abs, memory_errors(DATA['runs']))):.1%}")


if __name__ == "__main__":
    main()
