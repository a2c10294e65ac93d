"""The simulated heap of glibc, against its rules and against glibc itself."""

import ctypes
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.tools.estimating.heap import MAPPED_FROM, Heap, keeps_holes, threshold_of
from shardkit.tools.estimating.measured_costs import MeasuredCosts
from shardkit.tools.machine import MachineError, preset
from tests.tools.measured import HUGE_PAGES

MIB = 2**20
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


def test_a_fixed_threshold_learns_nothing():
    heap = Heap(MAPPED_FROM)
    for key, nbytes in ((1, MIB), (1, 0), (2, MIB // 2), (3, 64), (2, 0)):
        heap.changed(key, nbytes)
    heap.start()
    assert heap.peak // 4096 == 0


# What real memory of a process is: changes come as [key, bytes] by stdin, as `Heap.changed` gets them.
GLIBC = """
import ctypes, json, sys
glibc = ctypes.CDLL(None)
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
glibc.mallinfo2.restype = Info
glibc.free.argtypes = [ctypes.c_void_p]
def held():
    info = glibc.mallinfo2()
    return info.arena + info.hblkhd
if len(sys.argv) > 1:
    assert glibc.mallopt(-3, int(sys.argv[1]))
changes, blocks = json.load(sys.stdin), {}
before, mapped = held(), glibc.mallinfo2().hblks
peak = before
for key, nbytes in changes:
    if key in blocks:
        glibc.free(blocks.pop(key))
    if nbytes:
        blocks[key] = ctypes.c_void_p()
        assert glibc.posix_memalign(ctypes.byref(blocks[key]), 64, nbytes) == 0
    peak = max(peak, held())
print(peak - before, glibc.mallinfo2().hblks - mapped)
"""


def real_heap(changes: list[tuple[int, int]], environment: dict[str, str], *arguments: str) -> tuple[int, int]:
    """What a fresh process takes for these changes at most, and how many of the blocks are mapped at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", GLIBC, *arguments]
    found = subprocess.run(
        command, input=json.dumps(changes), env=clean | environment, text=True, capture_output=True, check=True
    )
    peak, mapped = map(int, found.stdout.split())
    return peak, mapped


def random_changes(seed: int) -> list[tuple[int, int]]:
    dice = random.Random(seed)
    return [(dice.randrange(60), 0 if dice.random() < 0.35 else int(2 ** dice.uniform(8, 23))) for _ in range(600)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("threshold", "error"), [(MAPPED_FROM, 0.02), (MIB, 0.04)])
def test_it_takes_what_glibc_takes(threshold: int, error: float, seed: int):
    changes = random_changes(seed)
    heap = Heap(threshold)
    heap.start()
    for key, nbytes in changes:
        heap.changed(key, nbytes)
    assert not keeps_holes(threshold)
    by_environment = real_heap(changes, {"MALLOC_MMAP_THRESHOLD_": str(threshold)})
    by_mallopt = real_heap(changes, {}, str(threshold))  # as the code of a plan does
    assert (by_environment[0], by_mallopt[0]) == pytest.approx((heap.peak, heap.peak), rel=error)


@pytest.mark.parametrize(
    ("environment", "threshold"),
    [
        ({}, None),
        ({"MALLOC_MMAP_THRESHOLD_": "262144"}, 262144),
        ({"MALLOC_MMAP_THRESHOLD_": "0x80000"}, 524288),
        ({"MALLOC_MMAP_THRESHOLD_": "many"}, 1),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.mmap_threshold=524288"}, 524288),
    ],
)
def test_the_threshold_of_an_environment_is_what_glibc_reads(environment: dict[str, str], threshold: int | None):
    assert threshold_of(environment) == threshold
    # A large block that was freed teaches, unless the threshold is fixed; then come blocks on both sides of it.
    border = threshold or MIB
    changes = [(0, 4 * MIB), (0, 0), (1, max(1, border - 4096)), (2, border + 4096)]
    assert real_heap(changes, environment)[1] == {None: 0, 1: 2}.get(threshold, 1)


# Faults of the kernel while an operator makes blocks: before, while, and after operators are timed.
TIMED = """
import resource, torch
from shardkit.tools.estimating.measured_costs import MeasuredCosts
from shardkit.tools.machine import preset
torch.set_num_threads(1)
small = torch.ones(16 * 2**20 // 4)
def faults():
    out = small + 1
    del out
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        out = small + 1
        del out
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
found = [faults()]
with MeasuredCosts(preset("h100").replace(device="cpu", ranks_per_host=1, mmap_threshold=262144)):
    found.append(faults())
print(*found, faults())
"""


@pytest.mark.skipif(HUGE_PAGES, reason="transparent_hugepage is 'always': a fault is not a page of 4 KiB")
def test_operators_are_timed_in_memory_that_is_there_as_estimates_charge_mapped_blocks_by_themselves():
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MAPPED_FROM)}
    command = [sys.executable, "-c", TIMED]
    found = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    before, within, after = map(int, found.stdout.split())
    pages = 4 * 16 * MIB // 4096
    assert before == pytest.approx(pages, rel=0.02)
    assert within < 0.02 * pages
    assert after > 0.5 * pages  # what was kept goes back, but for what a small block may hold


def test_a_c_library_that_cannot_keep_blocks_is_refused_before_any_process_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    costs = MeasuredCosts(preset("h100").replace(device="cpu", ranks_per_host=2, mmap_threshold=MAPPED_FROM))
    with pytest.raises(MachineError, match="the C library of this process has no mallopt"), costs:
        raise AssertionError("it was entered")
    assert costs._company == []
