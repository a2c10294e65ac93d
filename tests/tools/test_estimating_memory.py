"""Estimated against measured memory and communication, on jobs of ten kinds."""

import pytest

from shardkit.tools import estimate_job
from shardkit.tools.machine import preset
from tests.support import run_ranks
from tests.tools.jobs import JOBS, mesh_of
from tests.tools.measured import run_job


def cpu(transport: str):
    return preset("h100").replace(device="cpu", transport=transport, flops={"float32": 1e11, "bfloat16": 1e11})


# Every job on two ranks, and on one, three or four.
CASES = [(name, size) for i, name in enumerate(JOBS) for size in (2, (4, 3, 1)[i % 3])]


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(case for case in CASES if case != ("moe", 4)),
        pytest.param(
            "moe", 4, marks=pytest.mark.xfail(reason="the estimate is about 2 % too low; why is not known yet")
        ),
        ("replicas", 4),
    ],
)
def test_peak_of_tensor_bytes_and_communication(name: str, world_size: int):
    shared = world_size != 3 and name != "compressed"  # shared memory leaves nothing to compress
    measured = run_ranks(world_size, run_job, name, shared)
    machine = cpu("shared" if shared else "pairwise")
    for rank in {0, world_size - 1}:
        estimated = estimate_job(JOBS[name], mesh_of(name, world_size), machine, rank=rank)
        counted = [
            (one.collective, one.fqn, one.bytes, one.wire_bytes, str(one.dtype))
            for one in estimated.recording.trace.transfers
            if one.of_core
        ]
        assert counted == measured[rank].communication
        # How much the outbox holds depends on which rank was ahead; all else does not.
        recorded, outbox = estimated.recording, measured[rank].outbox
        assert outbox <= recorded.outbox_bytes + 64
        predicted = recorded.peak.bytes - recorded.outbox_bytes
        assert predicted == pytest.approx(measured[rank].peak - outbox, rel=0.001), (recorded.peak, measured[rank].at)
