"""Ray Train's TorchTrainer with two workers; the function that a user writes calls fully_shard."""

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from recording import arguments


def train(settings: dict) -> None:
    from pathlib import Path

    import torch.distributed as dist
    from recording import Recording, sharded_modules
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    recording = Recording()
    recording.begin("ray")
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    recording.note("sharded modules", sharded_modules(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        recording.step(model, optimizer, model(batch).square().mean())
    recording.end(model)
    if dist.get_rank() == 0:
        recording.write(Path(settings["out"]))


def main() -> None:
    options = arguments()
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=True)
    TorchTrainer(
        train, train_loop_config={"out": str(options.out)}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False), run_config=RunConfig(storage_path=str(options.own)),
    ).fit()  # fmt: skip
    ray.shutdown()


main()
