"""torchtitan's DeepSeek-V3 with expert parallelism, through its own parallelize_deepseekv3."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from recording import Recording, arguments
from titan import BACKEND, dims_of, sharded, train
from torchtitan.distributed import utils
from torchtitan.models.deepseek_v3 import model_registry


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    utils.set_spmd_backend(BACKEND)
    for replicas, experts in ((1, 2), (1, 4), (2, 2)):
        case = f"{replicas} replicas, experts over {experts}"
        recording.begin(case)
        dims = dims_of(replicas, experts)
        model = sharded(model_registry, dims, layers=3, directory=options.own)
        train(recording, model, utils.get_spmd_context(parallel_dims=dims))
        place = case.replace(" ", "-")
        dcp.save({"model": model.state_dict()}, checkpoint_id=options.own / place)
        loaded = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        dcp.load(loaded, checkpoint_id=(options.other or options.own) / place)
        for name, value in loaded["model"].items():
            recording.note(f"loaded {name}", value)
    recording.save(options.out)


main()
