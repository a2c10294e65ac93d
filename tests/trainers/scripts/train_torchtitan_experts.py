"""torchtitan's DeepSeek-V3 with expert parallelism, through its own parallelize_deepseekv3."""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recording import Recording, arguments, gradient_norm, sharded_modules, tokens
from torch.distributed.fsdp import FSDPModule

LAYERS = 3


def deepseek():
    """The debug model, with the attention of torchtitan's that runs without compiling on a CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:LAYERS]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def main() -> None:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils

    parallel_dims.device_type = "cpu"  # it takes a machine without accelerators for one with CUDA
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    backend = "partial_dtensor"
    utils.set_spmd_backend(backend)
    for replicas, experts in ((1, 2), (1, 4), (2, 2)):
        case = f"{replicas} replicas, experts over {experts}"
        recording.begin(case)
        spec = deepseek()
        parallelism = ParallelismConfig(spmd_backend=backend, expert_parallel_degree=experts)
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        dims = ParallelDims(
            dp_replicate=replicas, dp_shard=world // replicas, cp=1, tp=1, pp=1, ep=experts, world_size=world,
            spmd_backend=backend,
        )  # fmt: skip
        dims.build_mesh()
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model, parallel_dims=dims, training=TrainingConfig(), compile_config=CompileConfig(enable=False),
            parallelism=parallelism, ac_config=None, dump_folder=str(options.own),
        )  # fmt: skip
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        model.init_states(buffer_device=torch.device("cpu"))
        for module in model.modules():
            if isinstance(module, FSDPModule):  # torchtitan divides gradients itself, which gloo cannot do for stock
                module.set_force_sum_reduction_for_comms(True)
        recording.note("sharded modules", sharded_modules(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        around = utils.get_spmd_context(parallel_dims=dims)
        for step in range(3):
            batch = tokens(step, dist.get_rank(), vocabulary=2048)
            with around():
                logits = model(batch)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())
                loss.backward()
            recording.note("losses", loss)
            recording.note("gradient norms", gradient_norm(model))
            optimizer.step()
            optimizer.zero_grad()
        recording.end(model)
        place = case.replace(" ", "-")
        dcp.save({"model": model.state_dict()}, checkpoint_id=options.own / place)
        loaded = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(loaded, checkpoint_id=(options.other or options.own) / place)
        for name, value in loaded["model"].items():
            recording.note(f"loaded {name}", value)
    recording.save(options.out)


main()
