"""What only a GPU shows: NCCL, real streams, the caching allocator. Stock is beside ours in each test that can have it.

    pytest tests/gpu                            on a machine with one GPU or several; skipped where there is none
    SHARDKIT_GPU_TESTS=cpu pytest tests/gpu     the same training over gloo, to see that the tests themselves work

Each rank has a GPU of its own, so a machine with four runs world sizes 1, 2 and 4. Step times, host times and memory
beside stock's are what `benchmarks/compare.py --device cuda` measures.
"""
