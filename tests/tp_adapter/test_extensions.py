"""FSDP1's hooks for DTensor parameters: chunks in the old 2-D format with the boxes of the layout, and the way back."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, _init_utils
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions as StockExtensions

from shardkit.tp_adapter.extensions import DTensorExtensions, _model_pieces
from shardkit.tp_adapter.torch_compat import sharded_tensor
from tests.support import on_ranks, rank_mesh
from tests.tp_adapter.models import SPECS, build

OURS = DTensorExtensions()


def boxes(tensor) -> list[tuple[list[int], list[int]]]:
    return [(list(one.shard_offsets), list(one.shard_sizes)) for one in tensor.metadata().shards_metadata]


@on_ranks(4)
def test_the_old_format(rank: int, world_size: int, tmp_path) -> None:
    path = tmp_path
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    stock = StockExtensions(torch.get_device_module("cpu"))
    arguments = (mesh.get_local_rank("dp"), 2, 1, mesh["dp"].get_group())
    for placement in (Shard(0), Shard(1), Replicate()):
        even = distribute_tensor(torch.arange(64.0).view(8, 8), mesh["tp"], [placement])
        mine = OURS.chunk_tensor(even, *arguments)
        if rank > 1:  # stock takes ranks of a group for global ones
            with pytest.raises(ValueError, match=r"Global rank \d does not exist"):
                stock.chunk_tensor(even, *arguments)
            continue
        theirs = stock.chunk_tensor(even, *arguments)
        assert boxes(mine) == boxes(theirs)
        inner, inner_theirs = mine.local_shards()[0].tensor, theirs.local_shards()[0].tensor
        assert boxes(inner) == boxes(inner_theirs)
        assert torch.equal(inner.local_tensor(), inner_theirs.local_tensor())

    # Seven rows over two: four and three. Stock divides, so the second rank's would begin at row 3.
    whole = torch.arange(35.0).view(7, 5)
    uneven = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    mine = OURS.chunk_tensor(uneven, *arguments)
    assert boxes(mine) == [([0, 0], [4, 5]), ([4, 0], [3, 5])]
    if rank < 2:
        with pytest.raises(ValueError, match=r"(?i)overlap|volume"):
            stock.chunk_tensor(uneven, *arguments)

    dcp.save({"w": mine}, checkpoint_id=path)
    plain = {"w": torch.zeros(7, 5)}
    dcp.load(plain, checkpoint_id=path)
    assert torch.equal(plain["w"], whole)
    empty = OURS.chunk_tensor(distribute_tensor(torch.zeros(7, 5), mesh["tp"], [Shard(0)]), *arguments)
    dcp.load({"w": empty}, checkpoint_id=path)
    tensor, shards = OURS.pre_load_state_dict_transform(empty)
    assert tensor.size() == uneven.to_local().size()
    assert torch.equal(shards[0].tensor, mine.local_shards()[0].tensor.local_tensor())
    flat, (only,) = OURS.pre_load_state_dict_transform(tensor)
    assert flat is tensor and only is shards[0]

    # FSDP1 may hold a ShardedTensor over tp instead of a DTensor.
    local = uneven.to_local()
    held = sharded_tensor(_model_pieces(uneven), uneven.shape, local, local, mesh["tp"].get_group())
    again = OURS.chunk_tensor(held, *arguments)
    assert boxes(again) == boxes(mine)
    assert torch.equal(again.local_shards()[0].tensor.local_tensor(), shards[0].tensor)

    strided = OURS.chunk_dtensor(distribute_tensor(whole, mesh["tp"], [Shard(0)]), arguments[0], mesh["dp"])
    with pytest.raises(ValueError, match=r"placements \(_?Strided.*1-D mesh"):
        OURS.chunk_tensor(strided, *arguments)


@on_ranks(4)
def test_dtensors(rank: int, world_size: int) -> None:
    for shape, names in (((2, 2), ("dp", "tp")), ((1, 2, 2), ("dp_replicate", "dp_shard", "tp"))):
        mesh = rank_mesh(shape, names)
        data = mesh[names[:-1]] if len(shape) > 2 else mesh["dp"]
        place = data.get_local_rank(data.ndim - 1)
        for size in ((8, 4), (7, 5), (3, 2), (1, 3)):
            whole = torch.arange(float(size[0] * size[1])).view(size)
            for placement in (Shard(0), Shard(1), Replicate()):
                dtensor = distribute_tensor(whole, mesh["tp"], [placement])
                chunk = OURS.chunk_dtensor(dtensor, place, data)
                assert torch.equal(chunk.full_tensor(), whole), (shape, size, placement)
                assert torch.equal(OURS.all_gather_dtensor(chunk, mesh), dtensor.to_local())
            assert torch.equal(OURS.chunk_dtensor(whole, place, data).full_tensor(), whole)
        with pytest.raises(ValueError, match="not on the ranks of"):
            OURS.all_gather_dtensor(chunk, None)


@on_ranks(4)
def test_inside_stock_fsdp1(rank: int, world_size: int) -> None:
    """A stock FSDP1 model on two axes with its own hooks and with ours: the same training and state dicts."""
    mesh = rank_mesh((2, 2), ("dp", "tp"))
    gathered = []
    for extensions in (StockExtensions, lambda _: DTensorExtensions()):
        before, _init_utils.DTensorExtensions = _init_utils.DTensorExtensions, extensions
        try:
            model = build("tensor")
            SPECS["tensor"].parallelize(model, mesh["tp"])
            model = FullyShardedDataParallel(
                model, device_mesh=mesh["dp"], use_orig_params=True, device_id=torch.device("cpu")
            )
        finally:
            _init_utils.DTensorExtensions = before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            SPECS["tensor"].loss(model, 10 * step + rank // 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            whole = {name: value.full_tensor() for name, value in state.items()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(state)
            loaded = model.state_dict()
        gathered.append((type(model._fsdp_extension), whole, {name: one.full_tensor() for name, one in loaded.items()}))
    (stock, theirs, _), (ours, mine, loaded) = gathered
    assert (stock, ours) == (StockExtensions, DTensorExtensions)
    assert mine.keys() == theirs.keys() == loaded.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
        assert torch.equal(loaded[name], value), name
