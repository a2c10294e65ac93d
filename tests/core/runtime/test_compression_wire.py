"""The arithmetic of compression on one process: how far an element may be off, and how many bytes it takes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardkit.core.runtime.compressed.wire import AsDtype, Int8Blocks, WireFormat, format_of
from shardkit.core.runtime.sharding import ChunkLayout

# Just below fp32's largest number, a block's largest element may round up to infinity.
FLOATS = st.floats(-(2.0**127), 2.0**127, width=32)
BLOCKS = st.integers(1, 9)


def _through(form: WireFormat, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    wire = torch.full((form.nbytes(values.numel()),), 0xA5, dtype=torch.uint8)
    form.write(values, wire)
    arrived = torch.full((values.numel(),), torch.nan, dtype=dtype)
    form.read(wire, arrived)
    return arrived


@given(st.lists(FLOATS, min_size=1, max_size=40), BLOCKS)
def test_int8_is_off_by_half_a_scale_at_most(numbers: list[float], block: int) -> None:
    values = torch.tensor(numbers)
    arrived = _through(Int8Blocks(block), values)
    for start in range(0, len(numbers), block):
        sent, seen = values[start : start + block].double(), arrived[start : start + block].double()
        scale = sent.abs().max() / 127
        # Half a scale and the rounding of fp32; below its normal numbers, everything becomes zero.
        assert ((sent - seen).abs() <= scale * (0.5 + 1e-4) + 1.5e-36).all()
        assert (seen.abs() <= sent.abs().max() * (1 + 1e-6)).all()


@given(st.lists(st.integers(-127, 127), min_size=1, max_size=40), st.integers(-30, 30))
def test_int8_keeps_whole_numbers_of_scales(codes: list[int], exponent: int) -> None:
    values = torch.tensor([127, *codes], dtype=torch.float32) * 2.0**exponent
    assert torch.equal(_through(Int8Blocks(len(codes) + 1), values), values)


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_bf16_is_torch_s_rounding(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    assert torch.equal(_through(AsDtype(torch.bfloat16, lossless=False), values), values.bfloat16().float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_does_not_arrive_finite(bad: float) -> None:
    values = torch.ones(12)
    values[5] = bad
    arrived = _through(Int8Blocks(4), values)
    assert not arrived[4:8].isfinite().any()
    assert torch.equal(arrived[:4], values[:4])
    assert torch.equal(arrived[8:], values[8:])


def test_which_items_are_compressed() -> None:
    matrix, vector = ChunkLayout((6, 4), 1, 2), ChunkLayout((24,), 0, 2)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert format_of("int8", 7, matrix, fp32) == Int8Blocks(7)
    assert format_of("int8", 7, matrix, bf16) == Int8Blocks(7)
    assert format_of("bf16", 7, matrix, fp32) == AsDtype(bf16, lossless=False)
    assert format_of("bf16", 7, matrix, bf16) == AsDtype(bf16, lossless=True)
    assert format_of("bf16", 7, matrix, torch.float16) == AsDtype(torch.float16, lossless=True)
    assert format_of("int8", 7, matrix, torch.int64) == AsDtype(torch.int64, lossless=True)
    assert format_of("int8", 7, vector, fp32) == AsDtype(fp32, lossless=True)
    assert format_of(None, 7, matrix, fp32) == AsDtype(fp32, lossless=True)
