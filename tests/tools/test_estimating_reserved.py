"""The simulated caching allocator, against torch's documentation of CUDA's."""

from shardkit.tools.estimating.memory import CachingAllocator

MIB = 2**20


def reserved_after(*changes: tuple[int, int], expandable: bool = False) -> int:
    allocator = CachingAllocator(expandable)
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


def test_expandable_segments_grow_at_their_end_by_pages():
    assert reserved_after((1, 100), expandable=True) == 2 * MIB
    assert reserved_after((1, 11 * MIB), expandable=True) == 20 * MIB
    assert reserved_after((1, 11 * MIB), (2, 9 * MIB), expandable=True) == 20 * MIB
    assert reserved_after((1, 11 * MIB), (2, 10 * MIB), expandable=True) == 40 * MIB
    assert reserved_after((1, 30 * MIB), (1, 0), (2, 50 * MIB), expandable=True) == 60 * MIB  # segments: 80


def test_holes_are_filled_before_the_end_is_used():
    kept = [(1, 30 * MIB), (2, 10 * MIB), (3, 5 * MIB), (1, 0)]  # a hole of 30, and 15 free behind the third
    assert reserved_after(*kept, (4, 14 * MIB), (5, 15 * MIB), expandable=True) == 60 * MIB
    assert reserved_after(*kept, (4, 31 * MIB), expandable=True) == 80 * MIB
