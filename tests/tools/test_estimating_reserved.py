"""The simulated caching allocator, against what torch documents of CUDA's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.tools.estimating.reserved import CachingAllocator, Heap

MIB = 2**20


def reserved_after(*changes: tuple[int, int]) -> int:
    allocator = CachingAllocator()
    for key, nbytes in changes:
        allocator.changed(key, nbytes)
    return allocator.reserved


def test_segments_have_the_documented_sizes():
    assert reserved_after((1, 100)) == 2 * MIB
    assert reserved_after((1, MIB + 1)) == 20 * MIB
    assert reserved_after((1, 10 * MIB)) == 10 * MIB
    assert reserved_after((1, 11 * MIB)) == 12 * MIB


def test_small_and_large_requests_do_not_share_segments():
    assert reserved_after((1, 100), (2, 2 * MIB)) == 22 * MIB


def test_a_freed_block_is_used_again_and_joins_its_neighbours():
    halves = [(1, 9 * MIB), (2, 9 * MIB)]
    assert reserved_after(*halves) == 20 * MIB
    assert reserved_after(*halves, (1, 0), (3, 9 * MIB)) == 20 * MIB
    assert reserved_after(*halves, (1, 0), (2, 0), (3, 18 * MIB)) == 20 * MIB
    assert reserved_after(*halves, (1, 0), (3, 10 * MIB)) == 30 * MIB


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30 * MIB)), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(changes: list[tuple[int, int]]):
    allocator, live = CachingAllocator(), dict[int, int]()
    for key, nbytes in changes:
        allocator.changed(key, nbytes)
        live[key] = nbytes
        assert allocator.reserved >= sum(live.values())
    for key in live:
        allocator.changed(key, 0)
    free = sum(size for pool in allocator._free.values() for size, _, _ in pool._blocks)
    assert free == allocator.reserved


KIB = 1024


def heap_after(*changes: tuple[int, int]) -> int:
    """The peak, rounded to 4 KiB, after `start` and one more tiny change."""
    heap = Heap()
    for key, nbytes in changes:
        heap.changed(key, nbytes)
    heap.start()
    return heap.peak // 4096 * 4


def test_large_blocks_go_back_to_the_system():
    assert heap_after((1, 50 * MIB)) == 50 * KIB + 4
    assert heap_after((1, 50 * MIB), (1, 0)) == 0


def test_a_freed_large_block_teaches_what_is_large():
    assert heap_after((1, MIB), (1, 0)) == 0
    # From then on half a MiB comes from the heap, which keeps the hole below a block that is still used.
    assert heap_after((1, MIB), (1, 0), (2, MIB // 2), (3, 64), (2, 0)) == KIB // 2
    assert heap_after((2, MIB // 2), (3, 64), (2, 0)) == 0


def test_a_hole_is_used_by_what_fits():
    learnt = ((1, MIB), (1, 0), (2, MIB // 2), (3, 64), (2, 0))
    assert heap_after(*learnt, (4, MIB // 4), (5, MIB // 8)) == KIB // 2
    assert heap_after(*learnt, (4, 3 * MIB // 4)) == KIB // 2 + 3 * KIB // 4


def test_a_free_end_is_given_back_when_it_is_long():
    learnt = [(1, MIB), (1, 0)]
    blocks = [(key, MIB // 2) for key in range(2, 8)]
    freed = [(key, 0) for key, _ in blocks]
    assert heap_after(*learnt, *blocks, *freed) == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3 * MIB)), max_size=60))
def test_the_heap_holds_all_blocks_and_no_more_than_it_ever_held(changes: list[tuple[int, int]]):
    heap, live, most = Heap(), dict[int, int](), 0
    for key, nbytes in changes:
        heap.changed(key, nbytes)
        live[key] = nbytes
        most = max(most, sum(live.values()))
        free = sum(size for size, _, _ in heap._free._blocks)
        used = sum(block if isinstance(block, int) else block.size for block in heap._blocks.values())
        assert heap._size + heap._large == free + used
    assert heap.peak >= most
