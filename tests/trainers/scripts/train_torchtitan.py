"""torchtitan's Llama through its own parallelize_llama, on one axis and replicated (HSDP)."""

import os

import torch.distributed as dist
from recording import Recording, arguments
from titan import dims_of, sharded, train
from torchtitan.models.llama3 import model_registry


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    for case, replicas in {"one axis": 1, **({"HSDP": 2} if os.environ["WORLD_SIZE"] == "4" else {})}.items():
        recording.begin(case)
        train(recording, sharded(model_registry, dims_of(replicas), layers=2, directory=options.own))
    recording.save(options.out)


main()
