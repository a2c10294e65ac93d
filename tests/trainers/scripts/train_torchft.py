"""torchft: two replicas of two shards each; its manager averages gradients over the replicas in the all-reduce hook."""

from datetime import timedelta

import torch
import torch.distributed as dist
from recording import Recording, arguments, sharded_modules
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer


def manager_for(replica: int, shard: int, lighthouse: str, port: int) -> Manager:
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), load_state_dict=None, state_dict=None, min_replica_size=2,
        use_async_quorum=False, rank=shard, world_size=2, store_addr="localhost", store_port=port,
        lighthouse_addr=lighthouse, replica_id=f"replica-{replica}-", hostname="localhost", init_sync=False,
    )  # fmt: skip


def main() -> None:
    options, recording = arguments(), Recording()
    dist.init_process_group("gloo")
    replica, shard = divmod(dist.get_rank(), 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2) if dist.get_rank() == 0 else None
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if shard == 0 else None
    # The lighthouse's own address names the host, which not every machine can resolve.
    here = (lighthouse and f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}", store and store.port)
    everywhere: list = [None] * 4
    dist.all_gather_object(everywhere, here)
    manager = manager_for(replica, shard, everywhere[0][0], everywhere[2 * replica][1])

    recording.begin("torchft")
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    for module in (*model, model):
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh["shard"]).set_all_reduce_hook(
                lambda gradient: manager.allreduce(gradient).wait()
            )
    recording.note("sharded modules", sharded_modules(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        manager.start_quorum()
        batch = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        recording.step(model, optimizer, model(batch).square().mean())
        recording.note("committed", manager.should_commit())
    recording.end(model)
    every_weight: list = [None] * 4
    dist.all_gather_object(every_weight, recording.cases["torchft"]["weights"]["0.weight"])
    recording.note("replicas agree", all(torch.equal(one, every_weight[0]) for one in every_weight))
    manager.shutdown()
    recording.save(options.out)
    if lighthouse is not None:
        lighthouse.shutdown()


main()
