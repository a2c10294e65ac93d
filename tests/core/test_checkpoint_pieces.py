"""Who writes what, worked out by one rank for all: against each rank's own answer, and each element exactly once."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.core.checkpoint.commit import Header, build_index, pieces_by_rank
from shardkit.core.checkpoint.image import places
from shardkit.core.checkpoint.index import BLOCK_BYTES
from shardkit.core.checkpoint.leaves import flatten, unflatten
from shardkit.core.checkpoint.manifest import pack, unpack
from shardkit.core.checkpoint.parts import Part
from shardkit.core.checkpoint.pieces import Layout
from shardkit.core.region import region_at, regions_of_mesh

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
    return Layout(("weight",), torch.float32, shape, placements, mesh_shape, tuple(range(math.prod(mesh_shape))))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts(), st.integers(0, 7))
def test_each_element_is_written_once(layout: Layout, number: int):
    coordinates = list(itertools.product(*map(range, layout.mesh_shape)))
    alone = [region_at("w", layout.shape, layout.placements, layout.mesh_shape, at) for at in coordinates]
    assert regions_of_mesh("w", layout.shape, layout.placements, layout.mesh_shape) == alone
    written = torch.zeros(layout.shape, dtype=torch.int64)
    for rank, piece in layout.pieces(number):
        box = tuple(slice(low, low + size) for low, size in zip(piece.offsets, piece.sizes, strict=True))
        written[box] += 1
        assert box in [in_full for in_full, _ in alone[rank].boxes()], "a rank writes what it holds"
    assert (written == 1).all()


def test_replicas_take_turns():
    """On 4 replicas, of 8 tensors each writes two."""
    writers = []
    for number in range(8):
        layout = Layout(("w",), torch.float32, (6,), (Replicate(), Shard(0)), (4, 2), tuple(range(8)))
        writers.append([rank for rank, _ in layout.pieces(number)])
    assert sorted(itertools.chain(*writers)) == sorted([*range(8), *range(8)])
    assert writers[0] == [0, 1] and writers[1] == [2, 3]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(shapes, st.integers(0, 1)), min_size=1, max_size=6))
def test_an_index_comes_back_from_its_manifest(entries: list[tuple[tuple[int, ...], int]]):
    found = []
    for number, (shape, dim) in enumerate(entries):
        place = Shard(dim) if dim < len(shape) else Replicate()
        found.append((number, Layout(("model", f"w{number}"), torch.bfloat16, shape, (place,), (3,), (0, 1, 2))))
    parts = []
    pieces = pieces_by_rank(found)
    for rank in range(3):
        _, end = places(pieces.get(rank, []))
        parts.append(Part(end, ("0" * 32,) * -(-end // BLOCK_BYTES), (), (), ()))
    index = build_index(Header(3, 3, {"a": [1]}), found, parts)
    assert unpack(pack(index, "now"), "manifest") == index


keys = st.one_of(st.text(st.characters(codec="ascii", exclude_characters="."), min_size=1, max_size=3), st.integers())
leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.tuples(st.integers()), st.just([]))
trees = st.recursive(leaves, lambda inner: st.one_of(st.dictionaries(keys, inner), st.lists(inner)), max_leaves=12)


def paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in paths(below, (*path, key))]
    if isinstance(value, list):
        return [path, *(found for number, below in enumerate(value) for found in paths(below, (*path, number)))]
    return [path]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(keys, trees))
def test_nested_state_comes_back(tree: dict[object, object]):
    try:
        flat = flatten(tree)
    except ValueError:
        names = [".".join(str(one) for one in path) for path in paths(tree)]
        assert len(set(names)) < len(names), "only two values of one name, such as 1 and '1', are refused"
        return
    assert unflatten(flat.values, flat.empties) == tree
