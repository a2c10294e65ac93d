"""Each rank's pieces, computed by one rank for all, hold each element once; what is saved can be read."""

import itertools
import math
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import metadata as stock
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core import Blocks
from shardkit.core.checkpoint.index import BLOCK_BYTES, Chunk, File, Index, ObjectEntry, TensorEntry, pack, unpack
from shardkit.core.checkpoint.leaves import At, flatten, object_bytes, stock_path, unflatten
from shardkit.core.checkpoint.plan import Layout, Piece
from shardkit.core.checkpoint.saving import Header, Part, build_index, chunks_after
from shardkit.core.checkpoint.stock_metadata import stock_metadata, unpickle_metadata
from shardkit.core.checkpoint.torch_files import load_torch_bytes
from shardkit.core.parameters.region import region_at, regions_of_mesh
from tests.support.twins import differences

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes)
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    kinds = [st.just(Replicate())]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [
            dims.map(Shard),
            st.builds(lambda dim, n: _StridedShard(dim, split_factor=n), dims, st.integers(1, 3)),
        ]
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    if shape and not any(isinstance(one, _StridedShard) for one in placements) and draw(st.booleans()):
        axis = draw(st.integers(0, len(mesh_shape) - 1))
        placements = (*placements[:axis], Blocks(elements=draw(st.integers(1, 20))), *placements[axis + 1 :])
    return Layout(("weight",), torch.float32, shape, placements, mesh_shape, tuple(range(math.prod(mesh_shape))))


@settings(max_examples=150, derandomize=True)
@given(layouts(), st.integers(0, 7))
def test_each_element_is_written_once(layout: Layout, number: int):
    coordinates = list(itertools.product(*map(range, layout.mesh_shape)))
    alone = [region_at("w", layout.shape, layout.placements, layout.mesh_shape, at) for at in coordinates]
    assert regions_of_mesh("w", layout.shape, layout.placements, layout.mesh_shape) == alone
    written = torch.zeros(layout.shape, dtype=torch.int64)
    for rank, offsets, sizes in layout.boxes(number):
        box = tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))
        written[box] += 1
        assert box in [in_full for in_full, _ in alone[rank].boxes()], "a rank writes a box that it does not hold"
    assert (written == 1).all()


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.tuples(shapes, st.integers(0, 1)), min_size=1, max_size=6))
def test_an_index_comes_back_from_its_manifest(entries: list[tuple[tuple[int, ...], int]]):
    found = []
    for number, (shape, dim) in enumerate(entries):
        place = Shard(dim) if dim < len(shape) else Replicate()
        found.append((number, Layout(("model", f"w{number}"), torch.bfloat16, shape, (place,), (3,), (0, 1, 2))))
    parts = []
    for rank in range(3):
        pieces = [
            Piece(layout.path, layout.dtype, layout.shape, offsets, sizes)
            for number, layout in found
            for writer, offsets, sizes in layout.boxes(number)
            if writer == rank
        ]
        _, end = chunks_after(0, "", pieces)
        parts.append(Part(end, ("0" * 32,) * -(-end // BLOCK_BYTES), (), (), ()))
    index = build_index(Header(3, 3, {"a": [1]}), found, parts)
    assert unpack(pack(index, "now"), "manifest") == index
    check_metadata(index)


def check_metadata(index: Index) -> None:
    """The metadata that we write byte by byte unpickles to stock's own objects."""
    described: dict[str, object] = {}
    stored = {}
    for name, entry in index.tensors.items():
        chunks = [stock.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = stock.TensorProperties(dtype=entry.dtype)
        described[name] = stock.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for number, one in enumerate(entry.chunks):
            stored[stock.MetadataIndex(name, torch.Size(one.offsets), number)] = (one.file, one.offset, one.length)
    described |= {name: stock.BytesStorageMetadata() for name in index.objects}
    stored |= {stock.MetadataIndex(name): (one.file, one.offset, one.length) for name, one in index.objects.items()}
    data = stock_metadata(index)
    metadata = pickle.loads(data)
    ours = unpickle_metadata(data)
    assert [vars(one) for one in ours.storage_data] == [vars(one) for one in metadata.storage_data]
    assert ours.planner_data == metadata.planner_data
    assert isinstance(metadata, stock.Metadata) and vars(metadata).keys() == vars(stock.Metadata({})).keys()
    assert metadata.state_dict_metadata == described
    seen = {where: (one.relative_path, one.offset, one.length) for where, one in metadata.storage_data.items()}
    assert seen == stored and [where.index for where in seen] == [where.index for where in stored]
    assert metadata.planner_data == {name: stock_path(path) for name, path in index.paths.items()}
    tensors = [metadata.state_dict_metadata[name] for name in index.tensors]
    assert all(type(one.size) is torch.Size for one in tensors)
    assert all(type(chunk.sizes) is type(chunk.offsets) is torch.Size for one in tensors for chunk in one.chunks)


def test_metadata_of_all_kinds():
    """Large numbers, no dims, many dims, odd names, objects."""
    entries = {}
    sizes = [(), (2**33,), (2, 3), (1, 255, 256), (1, 1, 2**31 - 1, 1), (2**31, 1), (1,) * 5, (1,) * 7]
    for number, shape in enumerate(sizes):
        path = ("model", f"\u00fc {number}\n", At(3), 5)
        at = (0, 200, 255, 256, 70_000, 2**31 - 1 - 100, 2**31, 2**40)[number]
        length = max(1, math.prod(shape)) * 4 + 100
        chunk = Chunk(f"__{number}_0.distcp", at, length, (0,) * len(shape), shape, at + 100)
        entries[".".join(str(getattr(p, "at", p)) for p in path)] = TensorEntry(path, torch.float32, shape, (chunk,))
    files = {f"__{number}_0.distcp": File(f"__{number}_0.distcp", 2**50, None) for number in range(len(sizes))}
    objects = {"lr": ObjectEntry(("lr",), "__0_0.distcp", 500, 7)}
    check_metadata(Index(entries, objects, files))
    check_metadata(Index({}, {}, {}))


keys = st.one_of(st.text(st.characters(codec="ascii", exclude_characters="."), min_size=1, max_size=3), st.integers())
leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.tuples(st.integers()), st.just([]))


def dicts(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[object, object]]:
    """Not with two keys of one name, such as 1 and "1", which are refused."""
    return st.lists(st.tuples(keys, values), unique_by=lambda item: str(item[0])).map(dict)


trees = st.recursive(leaves, lambda inner: st.one_of(dicts(inner), st.lists(inner)), max_leaves=12)


@settings(max_examples=30, derandomize=True)
@given(dicts(trees))
def test_nested_state_comes_back(tree: dict[object, object]):
    flat = flatten(tree)
    assert unflatten(flat.values, flat.empties) == tree


VALUES: list[Any] = [
    *(None, True, 3, 2**40, -(2**70), 1.5, float("inf"), -0.0, 1 + 2j, "", "é", b"ab", set(), {1, 2}),
    *((), [], [[], [1]], {1: "a", (1, 2): 3}, OrderedDict(a=1), list(range(999))),
    *(torch.float8_e4m3fn, torch.device("cpu"), torch.Size([1, 2])),
    (torch.eye(2), {"x": (nn.Parameter(torch.ones(1)),)}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_what_is_saved_can_be_read(value: Any):
    assert differences(load_torch_bytes(object_bytes("value", value), "value"), value) == []


class Labelled(torch.Tensor):
    """A tensor that torch.load does not know."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", "bytes of length 0, which torch.load refuses to read"),
        ((torch.ones(2).as_subclass(Labelled),), "Labelled in the state, expected tensors, numbers"),
        ((torch.ones(2, device="meta"),), "is on the meta device and has no values"),
    ],
    ids=str,
)
def test_what_could_not_be_read_is_not_saved(value: Any, text: str):
    with pytest.raises(TypeError, match=f"value: .*{text}"):
        object_bytes("value", value)


def test_what_is_empty_on_one_rank_only():
    leaves = flatten({"state": {"a": 1}, "other": {}})
    assert unflatten(leaves.values, [*leaves.empties, ("state",)]) == {"state": {"a": 1}, "other": {}}


@pytest.mark.parametrize(
    "state", [{1: 0, "1": 0}, {"a": {"b": 0}, "a.b": 0}, {"a": [{}, {"b": 0}], "a.1.b": 0}], ids=str
)
def test_two_values_of_one_name_are_refused(state: Any):
    """One of the two values would be lost on disk."""
    with pytest.raises(ValueError, match="two values have this name"):
        flatten(state)
