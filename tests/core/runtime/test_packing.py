"""The packed buffer for many ranks, in one process: the contents of each rank's row, and the unpacked tensors."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardkit.core.runtime import plan as module
from shardkit.core.runtime.plan import Packing, as_dtype, pack
from shardkit.core.runtime.sharding import ChunkLayout
from tests.core.runtime.cases import chunk_of, whole

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
WORLD_SIZES = st.integers(1, 17)


@st.composite
def layouts(draw: st.DrawFn) -> list[ChunkLayout]:
    world_size = draw(WORLD_SIZES)
    only_rows = draw(st.booleans())
    shapes = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4))
    shapes = [(shape[0] * draw(st.integers(1, 9)), *shape[1:]) for shape in shapes]
    return [
        ChunkLayout(shape, 0 if only_rows else draw(st.integers(0, len(shape) - 1)), world_size) for shape in shapes
    ]


def _rows(packing: Packing, buffer: Tensor) -> Sequence[Tensor]:
    return list(buffer.view(packing.world_size, packing.row_numel))


def _strided_whole(layout: ChunkLayout, dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor whose dims lie in memory in reverse, behind others."""
    base = whole((3, *reversed(layout.shape)), dtype, seed)[2]
    return base.permute(*reversed(range(base.ndim)))


def _check_filled(packing: Packing, given: Sequence[ChunkLayout], wholes: list[Tensor]) -> None:
    backing = torch.full((5 + packing.numel,), torch.nan)
    packing.fill(backing[5:], wholes)  # a buffer that a user's allocation hands out may begin anywhere
    assert backing[:5].isnan().all()
    for rank, row in enumerate(_rows(packing, backing[5:])):
        expected = []
        for layout, tensor in zip(given, wholes, strict=True):
            chunk = chunk_of(tensor, layout, rank).float().reshape(-1)
            expected.append(torch.cat([chunk, torch.zeros(layout.padded_local_numel - chunk.numel())]))
        assert torch.equal(row, torch.cat(expected)), rank


def _check_copied_out(packing: Packing, given: Sequence[ChunkLayout], buffer: Tensor, wholes: list[Tensor]) -> None:
    numels = [layout.padded_numel if layout.dim == 0 else layout.numel for layout in given]
    flats = [torch.full((3 + n,), torch.nan, dtype=one.dtype)[3:] for n, one in zip(numels, wholes, strict=True)]
    packing.copy_out(buffer, flats)
    for layout, tensor, flat in zip(given, wholes, flats, strict=True):
        assert torch.equal(flat[: layout.numel].view(layout.shape), tensor)


@settings(deadline=None, max_examples=50)
@given(layouts(), st.sampled_from([F32, BF16]), st.booleans())
def test_a_gradient_s_chunks_lie_in_the_rows_of_their_owners(
    given: list[ChunkLayout], dtype: torch.dtype, dense: bool
) -> None:
    packing = pack(tuple(given), tuple(range(len(given))), (1,) * len(given), aligned=False)
    make = (lambda one, dtype, seed: whole(one.shape, dtype, seed)) if dense else _strided_whole
    wholes = [make(layout, dtype, seed) for seed, layout in enumerate(given)]
    if packing is None:
        assert not any(layout.numel for layout in given)
        return
    _check_filled(packing, given, wholes)


@settings(deadline=None, max_examples=50)
@given(layouts(), st.booleans())
def test_what_all_ranks_write_comes_out_as_the_whole_tensors(given: list[ChunkLayout], mixed: bool) -> None:
    dtypes = [(F32, BF16, F64)[seed % 3] if mixed else BF16 for seed in range(len(given))]
    widths = [dtype.itemsize if mixed else 1 for dtype in dtypes]
    packing = pack(tuple(given), tuple(range(len(given))), tuple(widths), aligned=mixed)
    if packing is None:
        return
    pairs = enumerate(zip(given, dtypes, strict=True))
    wholes = [whole(one.shape, dtype, seed).abs() + 1 for seed, (one, dtype) in pairs]
    buffer = torch.zeros(packing.numel, dtype=torch.uint8 if mixed else BF16)
    for rank in range(given[0].world_size):
        row = packing.row(rank)
        chunks = [place.item for place in row if place.item is not None]
        assert chunks == [i for i, one in enumerate(given) if one.local_numel(rank)]
        pieces = _rows(packing, buffer)[rank].split_with_sizes([place.numel for place in row])
        for (item, _, shape), piece in zip(row, pieces, strict=True):
            if item is not None:
                as_dtype(piece, dtypes[item]).view(shape).copy_(chunk_of(wholes[item], given[item], rank))
    _check_copied_out(packing, given, buffer, wholes)


@pytest.mark.parametrize("world_size", [2, 5, 16])
def test_torch_s_operators_and_strided_views_agree(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA columns with padding go through torch's operators; they give the same rows and the same tensors."""
    given = [ChunkLayout(shape, 0, world_size) for shape in ((7, 3), (32,), (1, 2), (16, 2), (0, 4))]
    packing = pack(tuple(given), tuple(range(len(given))), (1,) * len(given), aligned=False)
    assert packing is not None
    assert packing.columns
    assert packing.gaps
    monkeypatch.setattr(module.Packing, "_as_matrix", lambda self, buffer: True)
    for dtype in (F32, BF16):
        wholes = [whole(layout.shape, dtype, seed) for seed, layout in enumerate(given)]
        _check_filled(packing, given, wholes)
    buffer, wholes = torch.empty(packing.numel), [whole(layout.shape, F32, seed) for seed, layout in enumerate(given)]
    packing.fill(buffer, wholes)
    _check_copied_out(packing, given, buffer, wholes)
