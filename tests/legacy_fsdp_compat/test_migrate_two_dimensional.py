"""Checkpoints of FSDP1 over tensor parallelism: DTensors on two axes, and ShardedTensors inside ShardedTensors."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardkit.legacy_fsdp_compat.migrate import CheckpointError, convert, open_checkpoint
from shardkit.legacy_fsdp_compat.migrate.rank_files import Box, from_boxes
from shardkit.tp_adapter.extensions import DTensorExtensions
from tests.legacy_fsdp_compat.both import CPU, OURS, STOCK, api, state_of, tensors_of
from tests.legacy_fsdp_compat.tensor_parallel import Pair, adam, batch
from tests.support import run_ranks
from tests.support.meshes import rank_mesh

pytestmark = pytest.mark.filterwarnings("ignore")


def build(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Pair(), Pair())
    for pair in model:
        pair.up, pair.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)
    return model


def write(rank: int, world_size: int, engine: str, hidden: int, use_orig_params: bool, directory: Path) -> Any:
    """Saves SHARDED and FULL state after two steps on a mesh of 2 x 2. Returns the whole values."""
    names, mesh, model = api(engine), rank_mesh((2, 2), ("dp", "tp")), build(hidden)
    for pair in model:
        parallelize_module(pair, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    policy = names.ModuleWrapPolicy({Pair})
    model = names.FSDP(
        model, device_mesh=mesh["dp"], auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=CPU
    )
    optimizer = adam(model)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(mesh.get_coordinate()[0], step)).square().mean().backward()
        optimizer.step()
    state = state_of(engine, "SHARDED", model, optimizer)
    (directory / "ranks").mkdir(exist_ok=True)
    torch.save(state, directory / "ranks" / f"rank{rank}.pt")
    dcp.save(state, checkpoint_id=directory / "dcp")
    values = {("model", name): value for name, value in state["model"].items()}
    values |= {("optim", "state", name, k): v for name, vs in state["optim"]["state"].items() for k, v in vs.items()}
    return {path: one.full_tensor() if isinstance(one, DTensor) else one for path, one in values.items()}


def assert_same(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert torch.equal(found[path], value), path


@pytest.mark.parametrize(
    ("engine", "hidden", "use_orig_params"),
    [(STOCK, 8, False), (OURS, 7, True)],
)
def test_dtensors_on_two_axes(engine: str, hidden: int, use_orig_params: bool, tmp_path: Path):
    """Files of ranks and a distributed checkpoint; stock's can be cut evenly only."""
    expected = run_ranks(4, write, engine, hidden, use_orig_params, tmp_path)[0]
    assert expected["model", "0.up.weight"].shape == (hidden, 4)
    for number, kind in enumerate(("ranks", "dcp")):
        checkpoint = open_checkpoint(tmp_path / kind)
        assert checkpoint.notes == []
        assert_same(tensors_of(checkpoint), expected)
        for to in ("full", "safetensors", "dcp")[number::2]:
            convert(checkpoint, tmp_path / f"{kind}-{to}", to)
            assert_same(tensors_of(open_checkpoint(tmp_path / f"{kind}-{to}")), expected)
    (tmp_path / "ranks" / "rank2.pt").unlink()
    with pytest.raises(CheckpointError, match=r"written by ranks \[0, 1, 2, 3\], but there is no file of rank 2"):
        open_checkpoint(tmp_path / "ranks")


CUTS = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def write_nested(rank: int, world_size: int, drift: bool, directory: Path) -> None:
    """Writes FSDP1's format from before DTensors, by our hooks: stock's own refuse meshes of more than two ranks."""
    mesh, hooks, state = rank_mesh((2, 2), ("dp", "tp")), DTensorExtensions(), {}
    place, group = mesh.get_local_rank("dp"), mesh["dp"].get_group()
    for name, placement in CUTS.items():
        whole = torch.arange(35.0).view(7, 5)
        cut = distribute_tensor(whole, mesh["tp"], [placement])
        if drift and name == "whole" and mesh.get_local_rank("tp"):
            cut = DTensor.from_local(whole + 1, mesh["tp"], [placement], run_check=False)
        state[name] = hooks.chunk_tensor(cut, place, 2, 1, group)
    state["apart"] = hooks.chunk_tensor(torch.arange(6.0).view(3, 2), place, 2, 1, group)
    (directory / "ranks").mkdir(exist_ok=True)
    torch.save({"model": state, "seed": 3}, directory / "ranks" / f"rank{rank}.pt")
    if not drift:
        dcp.save({"model": state}, checkpoint_id=directory / "dcp")


@pytest.mark.parametrize("kind", ["ranks", "dcp"])
def test_sharded_tensors_in_sharded_tensors(kind: str, tmp_path: Path):
    run_ranks(4, write_nested, False, tmp_path)
    expected = {("model", name): torch.arange(35.0).view(7, 5) for name in CUTS}
    expected["model", "apart"] = torch.arange(6.0).view(3, 2)
    checkpoint = open_checkpoint(tmp_path / kind)
    assert checkpoint.notes == []
    assert_same(tensors_of(checkpoint), expected)
    convert(checkpoint, tmp_path / "out", "full")
    assert_same(tensors_of(open_checkpoint(tmp_path / "out")), expected)
    if kind == "ranks":
        (tmp_path / "ranks" / "rank3.pt").unlink()
        with pytest.raises(CheckpointError, match="there is no file of rank 3"):
            open_checkpoint(tmp_path / "ranks")
        (tmp_path / "ranks" / "rank1.pt").unlink()  # now nothing tells of their group
        with pytest.raises(CheckpointError, match=r"'model.rows' of shape \(7, 5\)"):
            open_checkpoint(tmp_path / "ranks")


def test_what_tensor_parallelism_replicates_and_is_not_the_same(tmp_path: Path):
    """Like stock's full state dict, the output has the first rank's value, and a note says so."""
    run_ranks(4, write_nested, True, tmp_path)
    checkpoint = open_checkpoint(tmp_path / "ranks")
    assert torch.equal(tensors_of(checkpoint)["model", "whole"], torch.arange(35.0).view(7, 5))
    notes = [f"'model.whole' differs between {tmp_path}/ranks/rank{rank}.pt and" for rank in (0, 2)]
    assert [note.partition(" and ")[0] + " and" for note in checkpoint.notes] == notes


# -- boxes -------------------------------------------------------------------------------------------------------------


def boxes_of(whole: torch.Tensor, places: list[tuple[slice, ...]]) -> list[Box]:
    made = []
    for number, place in enumerate(places):
        flat = whole[place].reshape(-1)
        offsets, sizes = tuple(one.start for one in place), tuple(one.stop - one.start for one in place)
        made.append(Box(offsets, sizes, lambda low, high, flat=flat: flat[low:high].clone(), f"file{number}"))
    return made


def split(draw: Any, size: int) -> list[slice]:
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


@given(st.data())
def test_boxes_make_up_a_tensor(data: Any):
    """Columns first, as tensor parallelism cuts, and then each column's rows in its own way."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    whole = torch.arange(torch.Size(shape).numel())
    columns = [split(data.draw, size) for size in shape[1:]]
    places = [(rows, *rest) for rest in itertools.product(*columns) for rows in split(data.draw, shape[0])]
    boxes = boxes_of(whole.view(shape), data.draw(st.permutations(places)))
    stored = from_boxes(("w",), whole.dtype, shape, boxes)
    low = data.draw(st.integers(0, whole.numel()))
    high = data.draw(st.integers(low, whole.numel()))
    assert torch.equal(stored.read(low, high), whole[low:high])
    if len(boxes) > 1:
        for wrong in (boxes[1:], [*boxes, boxes[0]]):
            with pytest.raises(CheckpointError, match="'w' of shape"):
                from_boxes(("w",), whole.dtype, shape, wrong)
