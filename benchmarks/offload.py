"""Training beyond memory, all ways in turn in one run: `python benchmarks/offload.py --directory DIR`.

See benchmarks/METHOD.md. `--waits 20` lets each block wait 20 ms in forward and 40 ms in backward, as for a device that
computes so long; `--context 16` leaves little else to compute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import shardkit.core as ours
from benchmarks.side_by_side.networks import GPT
from benchmarks.turns import Seconds, milliseconds, ratio, slowest, table
from shardkit.core import FileTier, offload_activations, overlap_step
from tests.support import run_ranks
from tests.support.sharding import shard_each

RANKS = 2
FIRST_STEPS = 3
"""They warm up, and their losses must agree."""


@dataclass(frozen=True)
class Way:
    """One row. `beside` is the row that lacks only what this one adds; losses agree (`exact`: to the bit)."""

    name: str
    beside: str
    exact: bool = True
    engine: ModuleType = ours
    fused: bool = True
    overlaps: bool = False
    states_in_files: bool = False
    activations_in_files: bool = False


PLAIN = "shardkit"
WAYS = (
    Way("FSDP2", "FSDP2", engine=stock, fused=False),
    Way(PLAIN, "FSDP2", exact=False, fused=False),
    Way("fused", PLAIN, exact=False),
    Way("fused, overlapped", "fused", overlaps=True),
    Way("fused, overlapped, states in files", "fused, overlapped", overlaps=True, states_in_files=True),
    Way("fused, activations in files", "fused", activations_in_files=True),
)


class Training:
    """A model that is trained in one way on one batch, and has its first gradients."""

    def __init__(self, way: Way, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        width, context = options.width, options.context
        self.model = GPT(10 * width, context, width, max(1, width // 64), [4 * width] * 12)
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        policy = way.engine.CPUOffloadPolicy(pin_memory=False)
        shard_each(*self.model.blocks, self.model, api=way.engine, mesh=mesh, offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=way.fused or None)
        if way.fused:
            ours.optimizer_step_on_shards(self.optimizer)
        states = 2 * sum(one.to_local().nbytes for one in self.model.parameters())
        tier = FileTier(options.directory, states // 4) if way.states_in_files else None
        if way.overlaps:
            overlap_step(self.optimizer, states=tier)
        self.states_in_files = states if way.states_in_files else 0
        self.activations = None
        if way.activations_in_files:
            self.activations = offload_activations(self.model, min_bytes=2**16, directory=options.directory)
        if options.waits:
            for block in self.model.blocks:
                block.register_forward_pre_hook(lambda *_: time.sleep(options.waits / 1e3))
                block.register_full_backward_pre_hook(lambda *_: time.sleep(2 * options.waits / 1e3))
        torch.manual_seed(1 + dist.get_rank())
        tokens = torch.randint(10 * width, (options.batch, context + 1))
        self.batch = tokens[:, :-1], tokens[:, 1:]
        self.losses = [self._forward_backward()]

    def _forward_backward(self) -> float:
        loss = self.model(*self.batch)
        loss.backward()
        return loss.item()

    def step(self) -> tuple[float, float]:
        """Seconds of `optimizer.step()`, and of all."""
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.step()
        stepped = time.perf_counter()
        self.optimizer.zero_grad()
        self.losses.append(self._forward_backward())
        return stepped - begin, time.perf_counter() - begin

    @property
    def in_files(self) -> float:
        activations = 0 if self.activations is None else self.activations.host_bytes
        return (self.states_in_files + activations) / 2**20


def run(rank: int, world_size: int, options: argparse.Namespace) -> tuple[Seconds, Seconds, Seconds]:
    """One rank: all ways take turns."""
    torch.set_num_threads(1)
    trainings = {way.name: Training(way, options) for way in WAYS}
    for _ in range(FIRST_STEPS):
        for training in trainings.values():
            training.step()
    for way in WAYS:
        seen, expected = trainings[way.name].losses, trainings[way.beside].losses
        tolerance = 0.0 if way.exact else 1e-4
        torch.testing.assert_close(seen, expected, rtol=tolerance, atol=0.0, msg=f"{way.name}: {seen}, not {expected}")
    rounds = [{name: training.step() for name, training in trainings.items()} for _ in range(options.rounds)]
    optimizer, step = ({name: [one[name][part] for one in rounds] for name in trainings} for part in (0, 1))
    return optimizer, step, {name: [training.in_files] for name, training in trainings.items()}


def rows(optimizer: Seconds, step: Seconds, in_files: Seconds) -> Iterator[tuple[object, ...]]:
    """Of seconds of `optimizer.step()` and of whole steps, and of MiB in files."""
    for way in WAYS:
        times = [milliseconds(optimizer[way.name]), milliseconds(step[way.name])]
        compared = [way.beside, *(ratio(one[way.name], one[way.beside]) for one in (optimizer, step))]
        if way.beside == way.name:
            compared = ["", "", ""]
        yield (way.name, *times, ratio(step[way.name], step[PLAIN]), *compared, f"{in_files[way.name][0]:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768, help="of 12 blocks; 768 makes 97 M parameters")
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--waits", type=float, default=0.0, help="ms that a block waits in forward, half of backward's")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="for the files; on a disk, not in memory")
    options = parser.parse_args()
    found = run_ranks(RANKS, run, options, timeout=3600.0, isolated=True)
    head = f"way|optimizer, ms|whole step, ms|of {PLAIN}'s|beside|optimizer|whole step|MiB in files".split("|")
    print(table(head, rows(*map(slowest, zip(*found, strict=True)))))


if __name__ == "__main__":
    # The ranks find functions by the name of this module, not as part of a script.
    from benchmarks import offload

    offload.main()
