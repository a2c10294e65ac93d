"""Tests that need a GPU: NCCL, real streams, the caching allocator. Stock is beside ours in each test that can have it.

    pytest tests/gpu                            on a machine with one GPU or several; skipped where there is none
    SHARDKIT_GPU_TESTS=cpu pytest tests/gpu     the same training over gloo, to see that the tests themselves work

With a GPU for each rank the ranks use NCCL. On fewer GPUs the tests of training, side streams and offload let several
ranks share one, over gloo; the others skip. `benchmarks/compare.py --device cuda` measures times and memory.
"""
