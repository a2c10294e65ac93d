"""Layouts of models over senders and receivers, computed without processes."""

from collections.abc import Iterator, Sequence

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from shardkit.core.parameters.placements import Blocks, Owned
from shardkit.core.parameters.region import regions_of_mesh
from shardkit.weights.boxes import Box, Held, Wanted

Shapes = dict[str, tuple[int, ...]]


def llama(hidden: int, inner: int, heads: int, vocabulary: int = 128256, head: int = 128) -> Shapes:
    """Shapes of a Llama 3 checkpoint with 8 key heads, and ten of its layers."""
    shapes: Shapes = {"embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "norm": (hidden,)}
    for layer in range(10):
        shapes |= {
            f"{layer}.q": (heads * head, hidden),
            f"{layer}.k": (8 * head, hidden),
            f"{layer}.v": (8 * head, hidden),
            f"{layer}.o": (hidden, heads * head),
            f"{layer}.gate": (inner, hidden),
            f"{layer}.up": (inner, hidden),
            f"{layer}.down": (hidden, inner),
            f"{layer}.norm1": (hidden,),
            f"{layer}.norm2": (hidden,),
        }
    return shapes


LLAMAS = {"8B": llama(4096, 14336, 32), "70B": llama(8192, 28672, 64)}


def boxes(shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int]) -> list[tuple[Box, ...]]:
    """The boxes that each rank of a mesh holds."""
    return [
        tuple(tuple((one.start, one.stop) for one in in_full) for in_full, _ in region.boxes()) if region.numel else ()
        for region in regions_of_mesh("a tensor", shape, placements, mesh)
    ]


def held(shapes: Shapes, placements: Sequence[Placement], mesh: Sequence[int]) -> dict[int, list[Held]]:
    """The boxes that each rank holds of tensors that are all placed alike; vectors are cut on dim 0 only."""
    senders: dict[int, list[Held]] = {}
    for name, shape in shapes.items():
        own = [Shard(0) if one.is_shard() and one.dim >= len(shape) else one for one in placements]
        for rank, mine in enumerate(boxes(shape, own, mesh)):
            senders.setdefault(rank, []).append(Held(name, torch.bfloat16, shape, mine))
    return senders


def tensor_parallel(shapes: Shapes, size: int) -> Iterator[list[Wanted]]:
    """The boxes that each of `size` tensor-parallel receivers wants: matrices cut by dim, vectors whole."""
    for rank in range(size):
        wants = []
        for name, shape in shapes.items():
            dim = 1 if name.endswith((".o", ".down")) else 0
            box = [(0, one) for one in shape]
            if len(shape) > 1:
                part = shape[dim] // size
                box[dim] = (rank * part, (rank + 1) * part)
            wants.append(Wanted(name, torch.bfloat16, tuple(box)))
        yield wants


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


@st.composite
def layouts(draw):
    """A tensor and its placements on a mesh: any that we write, strided ones too."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    special = st.sampled_from([Owned(0), Blocks(rows=2), Blocks(elements=4)])
    if draw(st.booleans()):
        axis = draw(st.integers(0, len(mesh) - 1))
        placements = [draw(special) if at == axis else Replicate() for at in range(len(mesh))]
    else:
        cuts = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
        placements = [draw(cuts) for _ in mesh]
    return shape, placements, mesh


REPLICATED = (Replicate(),)
SHARDED = (Shard(0),)
HYBRID = (Replicate(), Shard(0))
TWO_D = (Shard(0), Shard(1))
