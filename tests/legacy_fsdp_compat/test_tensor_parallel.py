"""FSDP1 around modules that tensor parallelism has cut, on a mesh of 2 x 2; conversion of its checkpoints."""

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
from tests.legacy_fsdp_compat.both import (
    CPU,
    OPTIMIZERS,
    OURS,
    STOCK,
    TOLERANCE,
    Engine,
    assert_same_tensors,
    tensors_of,
)
from tests.support import on_ranks, run_ranks
from tests.support.meshes import rank_mesh
from tests.support.twins import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore")


class Pair(nn.Module):
    """Parameters that both parallelisms cut on dim 0, that they cut on dims 1 and 0, and that only FSDP cuts."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, hidden), nn.Linear(hidden, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def batch(place: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + place))


def build(seed: int, hidden: int = 8) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Pair(hidden), Pair(hidden))


def wrapped(seed: int, hidden: int = 8, engine: Engine = OURS, use_orig_params: bool = True) -> Any:
    mesh, model = rank_mesh((2, 2), ("dp", "tp")), build(seed, hidden)
    up = ColwiseParallel(use_local_output=hidden % 2 == 0)  # the next layer asks for the size of uneven columns
    for pair in model:
        parallelize_module(pair, mesh["tp"], {"up": up, "down": RowwiseParallel()})
    arguments = {"device_mesh": mesh["dp"], "auto_wrap_policy": engine.api.ModuleWrapPolicy({Pair}), "device_id": CPU}
    return engine.api.FSDP(model, use_orig_params=use_orig_params, **arguments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, places: list[int], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        (sum(model(batch(place, step)).square().mean() for place in places) / len(places)).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@on_ranks(4)
def test_training_and_state_dicts(rank: int, world_size: int, kind: str) -> None:
    names, place = OURS.api, rank // 2
    model, plain = wrapped(0), build(0)
    optimizer, its_optimizer = OPTIMIZERS["adam"](model.parameters()), OPTIMIZERS["adam"](plain.parameters())
    train(model, optimizer, [place], range(2))
    train(plain, its_optimizer, [0, 1], range(2))
    assert_same_tensors(dict(plain.state_dict()), OURS.state(model), **TOLERANCE)
    with OURS.of_type(kind, model):
        state, optim = model.state_dict(), names.FSDP.optim_state_dict(model, optimizer)
    average = optim["state"]["0.up.weight"]["exp_avg"]
    for value in (state["0.up.weight"], average):
        assert isinstance(value, DTensor) == (kind == "SHARDED")
        assert value.shape == (8, 4)
    whole = average.full_tensor() if kind == "SHARDED" else average
    torch.testing.assert_close(whole, its_optimizer.state[plain[0].up.weight]["exp_avg"], **TOLERANCE)
    other = wrapped(1)
    other_optimizer = OPTIMIZERS["adam"](other.parameters())
    with OURS.of_type(kind, other):
        other.load_state_dict(state)
        other_optimizer.load_state_dict(names.FSDP.optim_state_dict_to_load(other, other_optimizer, optim))
    train(other, other_optimizer, [place], range(2, 4))
    train(model, optimizer, [place], range(2, 4))
    assert_same_tensors(OURS.state(model), OURS.state(other), rtol=0, atol=0)


@on_ranks(4)
def test_whole_parameters(rank: int, world_size: int) -> None:
    names = OURS.api
    model = wrapped(0)
    with (
        OURS.of_type("LOCAL", model),
        pytest.raises(RuntimeError, match="LOCAL_STATE_DICT cannot be used with device_mesh"),
    ):
        model.state_dict()
    with names.FSDP.summon_full_params(model), torch.no_grad():
        weight = model[0].up.weight
        assert weight.device_mesh.mesh_dim_names == ("tp",)
        assert_same_tensors(dict(build(0).state_dict()), OURS.state(model), rtol=0, atol=0)
        torch.testing.assert_close(model(batch(0, 0)), build(0)(batch(0, 0)), **TOLERANCE)
        weight.mul_(2)
    expected = build(0).state_dict()
    expected["0.up.weight"] *= 2
    assert_same_tensors(dict(expected), OURS.state(model), rtol=0, atol=0)


def write(rank: int, world_size: int, engine: Engine, hidden: int, use_orig_params: bool, directory: Path) -> Any:
    """Saves SHARDED and FULL state after two steps on a mesh of 2 x 2. Returns the whole values."""
    model = wrapped(0, hidden, engine, use_orig_params)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, [rank // 2], range(2))
    state = engine.state_of("SHARDED", model, optimizer)
    (directory / "ranks").mkdir(exist_ok=True)
    torch.save(state, directory / "ranks" / f"rank{rank}.pt")
    dcp.save(state, checkpoint_id=directory / "dcp")
    values = {("model", name): value for name, value in state["model"].items()}
    values |= {("optim", "state", name, k): v for name, vs in state["optim"]["state"].items() for k, v in vs.items()}
    return {path: one.full_tensor() if isinstance(one, DTensor) else one for path, one in values.items()}


@pytest.mark.parametrize(("engine", "hidden", "use_orig_params"), [(STOCK, 8, False), (OURS, 7, True)])
def test_dtensors_on_two_axes(engine: Engine, hidden: int, use_orig_params: bool, tmp_path):
    """Files of ranks and a distributed checkpoint; stock's can be cut evenly only."""
    expected = run_ranks(4, write, engine, hidden, use_orig_params, tmp_path)[0]
    assert expected["model", "0.up.weight"].shape == (hidden, 4)
    for number, kind in enumerate(("ranks", "dcp")):
        checkpoint = open_checkpoint(tmp_path / kind)
        assert checkpoint.notes == []
        assert_equal(tensors_of(checkpoint), expected)
        for to in ("full", "safetensors", "dcp")[number::2]:
            convert(checkpoint, tmp_path / f"{kind}-{to}", to)
            assert_equal(tensors_of(open_checkpoint(tmp_path / f"{kind}-{to}")), expected)
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
def test_sharded_tensors_in_sharded_tensors(kind: str, tmp_path):
    run_ranks(4, write_nested, False, tmp_path)
    expected = {("model", name): torch.arange(35.0).view(7, 5) for name in CUTS}
    expected["model", "apart"] = torch.arange(6.0).view(3, 2)
    checkpoint = open_checkpoint(tmp_path / kind)
    assert checkpoint.notes == []
    assert_equal(tensors_of(checkpoint), expected)
    convert(checkpoint, tmp_path / "out", "full")
    assert_equal(tensors_of(open_checkpoint(tmp_path / "out")), expected)
    if kind == "ranks":
        (tmp_path / "ranks" / "rank3.pt").unlink()
        with pytest.raises(CheckpointError, match="there is no file of rank 3"):
            open_checkpoint(tmp_path / "ranks")
        (tmp_path / "ranks" / "rank1.pt").unlink()  # now nothing tells of their group
        with pytest.raises(CheckpointError, match=r"'model.rows' of shape \(7, 5\)"):
            open_checkpoint(tmp_path / "ranks")


def test_what_tensor_parallelism_replicates_and_is_not_the_same(tmp_path):
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
