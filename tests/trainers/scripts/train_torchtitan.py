"""torchtitan's Llama through its own parallelize_llama, on one axis and replicated (HSDP)."""

import os

import torch
import torch.distributed as dist
from recording import Recording, arguments, gradient_norm, sharded_modules, tokens
from torch.distributed.fsdp import FSDPModule


def llama():
    """The debug model, with the attention of torchtitan's that runs without compiling on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def main() -> None:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallel_dims.device_type = "cpu"  # it takes a machine without accelerators for one with CUDA
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    cases = {"one axis": (1, world)} | ({"HSDP": (2, world // 2)} if world == 4 else {})
    for case, (replicas, shards) in cases.items():
        recording.begin(case)
        spec = llama()
        dims = ParallelDims(
            dp_replicate=replicas, dp_shard=shards, cp=1, tp=1, pp=1, ep=1, world_size=world,
            spmd_backend="partial_dtensor",
        )  # fmt: skip
        dims.build_mesh()
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model, parallel_dims=dims, training=TrainingConfig(), compile_config=CompileConfig(enable=False),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"), ac_config=None, dump_folder=str(options.own),
        )  # fmt: skip
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_states(buffer_device=torch.device("cpu"))
        for module in model.modules():
            if isinstance(module, FSDPModule):  # torchtitan divides gradients itself, which gloo cannot do for stock
                module.set_force_sum_reduction_for_comms(True)
        recording.note("sharded modules", sharded_modules(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            batch = tokens(step, dist.get_rank(), vocabulary=2048)
            logits = model(batch)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())
            loss.backward()
            recording.note("losses", loss)
            recording.note("gradient norms", gradient_norm(model))
            optimizer.step()
            optimizer.zero_grad()
        recording.end(model)
    recording.save(options.out)


main()
