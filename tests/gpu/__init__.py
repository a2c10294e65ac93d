"""All checks and figures of shardkit that need one GPU, in eight minutes, stock FSDP2 beside it wherever it can.

    python3 -m tests.gpu                       from the root of a clone; also: hatch run gpu
    python3 -m tests.gpu --minutes 5 --out DIR --commit HASH
    python3 -m tests.gpu --parts memory,speed
    SHARDKIT_GPU_TESTS=cpu python3 -m tests.gpu       the same checks, tiny, to see that they work

It needs torch, numpy and nothing of this project installed. DIR gets `results.json` (written after each check, so that
nothing is lost if the machine goes away), `table.txt`, `log.txt` with all tracebacks and stacks, `machine.json` and two
profiles. A machine without a GPU ends it with status 2, a check that fails with status 1.

    plan.py         all checks, in order of value, with their limits
    schedule.py     runs them in processes of their own, watches and kills them
    rank.py         such a process
    worlds.py       process groups on one GPU: several ranks over NCCL, or one that plays several
    training.py     networks, engines and measures that the parts share
    right.py memory.py speed.py graphs.py tools.py offload.py weights.py        the parts
"""
