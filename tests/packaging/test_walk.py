"""How much a reader of one training step must open: functions and files of core that each phase leads through.

Counted on one rank of torch's fake group, for a model of four blocks with AdamW. Every file counts. A limit that falls
is progress; one that must rise needs a reason.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit.core
from shardkit.core import fully_shard
from tests.support import run_ranks

ROOT = Path(shardkit.core.__file__).parent
LIMITS = {  # functions, files
    "fully_shard": (61, 15),
    "first forward": (129, 17),
    "forward": (75, 11),
    "backward": (89, 11),
    "step": (5, 3),
    "all": (237, 26),
}
if torch.__version__ >= "2.15":
    # Gradients stay wider than the compute dtype (`_common_dtype`), and torch imports an installed spmd_types, so
    # that parameters are asked for annotations (`form_of`).
    LIMITS |= {"fully_shard": (61, 16), "backward": (90, 11), "all": (239, 27)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


def _walk(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    everything: set[tuple[str, str]] = set()
    counts = {}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        seen: set[tuple[str, str]] = set()

        def note(frame: Any, event: str, argument: Any) -> None:
            code = frame.f_code
            if event == "call" and "<" not in code.co_name and code.co_filename.startswith(str(ROOT)):
                seen.add((code.co_filename, f"{code.co_name} in line {code.co_firstlineno}"))

        sys.setprofile(note)
        try:
            result = work()
        finally:
            sys.setprofile(None)
        counts[name] = len(seen), len({file for file, _ in seen})
        everything.update(seen)
        return result

    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(512, 512))
    x = torch.randn(4, 512)
    phase("fully_shard", lambda: [fully_shard(module) for module in (*model[:4], model)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for which in ("first ", "second ", ""):  # the order of forward is learnt by the second
        loss = phase(f"{which}forward", lambda: model(x).sum())
        phase(f"{which}backward", loss.backward)
        phase(f"{which}step", optimizer.step)
        optimizer.zero_grad()
    counts["all"] = len(everything), len({file for file, _ in everything})
    return counts


def test_a_step_leads_through_few_functions() -> None:
    (counts,) = run_ranks(1, _walk, isolated=True)
    too_many = {
        name: (counts[name], limit)
        for name, limit in LIMITS.items()
        if any(one > most for one, most in zip(counts[name], limit, strict=True))
    }
    assert too_many == {}
