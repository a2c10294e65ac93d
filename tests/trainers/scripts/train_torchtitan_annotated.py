"""torchtitan's Llama with tensor parallelism and DeepSeek-V3 with experts, on both of its back ends.

By default parameters are plain tensors with annotations of spmd_types, else DTensors.
"""

from typing import Any

import torch
import torch.distributed as dist
from recording import Recording, arguments, tokens
from titan import dims_of, sharded
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.distributed import utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models import deepseek_v3, llama3


class Whole(torch.autograd.Function):
    """The logits of all of a group's ranks, each of which has the columns of a part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.columns = slice(part.shape[-1] * group.rank(), part.shape[-1] * (group.rank() + 1))
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[..., ctx.columns].contiguous(), None


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None, async_op: bool = False) -> None:
    """Gloo's takes tensors of one size only."""
    received = torch.empty(sum(one.numel() for one in outputs), dtype=inputs[0].dtype)
    sizes = [one.numel() for one in outputs], [one.numel() for one in inputs]
    dist.all_to_all_single(received, torch.cat([one.flatten() for one in inputs]), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part.view(output.shape))


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    dist.all_to_all = all_to_all
    for backend in ("partial_dtensor", "spmd_types"):
        utils.set_spmd_backend(backend)
        for model_registry, experts, tp in ((llama3.model_registry, 1, 2), (deepseek_v3.model_registry, 2, 1)):
            recording.begin(f"{backend}, tp={tp}, ep={experts}")
            dims = dims_of(1, experts, tp, backend)
            checks = backend == "spmd_types"
            context = utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=checks)
            with utils.get_spmd_context(parallel_dims=dims)():
                model = sharded(model_registry, dims, layers=2, directory=options.own)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(2):
                batch = tokens(step, dist.get_rank() // tp, vocabulary=2048)
                positions = torch.arange(batch.shape[1]).expand(batch.shape)
                if checks:
                    annotate_input_spmd_types(dims, batch, batch.clone(), {"positions": positions})
                with context():
                    logits = model(batch, positions=positions)
                with utils.get_spmd_context(parallel_dims=dims)():
                    if isinstance(logits, DTensor):
                        logits = logits.full_tensor()
                    if logits.shape[-1] < 2048:
                        logits = Whole.apply(logits, dims.get_mesh("tp").get_group())
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())
                    recording.step(model, optimizer, loss)
            recording.end(model)
    recording.save(options.out)


main()
