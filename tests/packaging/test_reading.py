"""How many files a reader opens to follow a gather, a reduction or a reshard of a group: those that it runs through.

A reduction goes from the gradients that backward has left to the sharded ones. The reshard in its middle, which frees
the parameters, is a walk of its own. Not counted are the callers (states, the schedule), the lowest layer (names of
torch, events, meshes) and the leaves below, whose one job is their name.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardkit.core
from shardkit.core import fully_shard
from shardkit.core.engine.group import FSDPParamGroup
from tests.support import run_ranks

ROOT = Path(shardkit.core.__file__).parent
# The lowest layer; storage that comes and goes, places in modules, the form of a plain parameter.
LEAVES = {
    "events",
    "mesh",
    "observers",
    "policies",
    "stock_names",
    "tensors",
    "torch_compat",
    "users_code",
    "runtime/storage",
    "parameters/registration",
    "parameters/adapters",
}


class Block(nn.Module):
    """A parameter that goes in place, and small ones that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(16, 16)
        self.large = nn.Parameter(torch.ones(512, 512))

    def forward(self, x: Tensor) -> Tensor:
        return self.small(x) + self.large[:1, :16]


def _files(model: nn.Module, x: Tensor, methods: tuple[str, ...], *, without: str = "") -> set[str]:
    """The files of a training step's calls of these methods of groups, but not their calls of `without`."""
    files: set[str] = set()
    inside = False

    def note(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if inside and event == "call" and path.is_relative_to(ROOT):
            files.add(path.relative_to(ROOT).with_suffix("").as_posix())

    def counted(method: Any, counts: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            around, inside = inside, counts
            try:
                return method(*args, **kwargs)
            finally:
                inside = around

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in filter(None, (*methods, without)):
            patch.setattr(FSDPParamGroup, name, counted(getattr(FSDPParamGroup, name), name != without))
        sys.setprofile(note)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
    return files - LEAVES


def _follow(rank: int, world_size: int) -> tuple[set[str], ...]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    x = torch.ones(2, 16, requires_grad=True)
    model(x).sum().backward()
    return (
        _files(model, x, ("unshard", "wait_for_unshard")),
        _files(model, x, ("post_backward",), without="reshard_after_use"),
        _files(model, x, ("reshard",)),
    )


def test_each_walk_of_a_group_leads_through_few_files():
    ((gather, reduction, reshard),) = run_ranks(1, _follow, isolated=True)
    assert {"engine/group", "parameters/param", "runtime/collective", "runtime/lanes"} <= gather & reduction
    assert len(gather) <= 8, sorted(gather)
    assert len(reduction) <= 8, sorted(reduction)
    assert {"engine/group", "engine/room"} <= reshard
    assert len(reshard) <= 8, sorted(reshard)
