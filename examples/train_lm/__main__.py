"""`python examples/train_lm [flags]`: start the training loop on two CPU processes, or on every GPU of this machine."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import checkpointing
from data import load_corpus
from errors import UserError
from processes import device_type, print_error
from settings import Settings, parse

CPU_PROCESSES = 2
INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """The exit code: 0, 2 for bad input, 130 after Ctrl-C, or that of the first rank that failed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import train

        train.main(argv)
        return 0
    try:
        settings = parse(argv)
        processes = check(settings)
    except UserError as error:
        print_error(error)
        return 2
    code = launch(processes, settings.restarts, argv)
    if code == INTERRUPTED:
        print(f"\ntrain_lm: {checkpointing.how_to_go_on(settings)}", file=sys.stderr)
    return code


def check(settings: Settings) -> int:
    """The number of processes to start. Raises `UserError` for bad input here, before any process waits for another."""
    kind = device_type(settings.device)
    available = torch.cuda.device_count() if kind == "cuda" else CPU_PROCESSES
    data_parallel = available // settings.tp if kind == "cuda" else CPU_PROCESSES
    processes = settings.nproc or settings.tp * max(1, min(data_parallel, settings.batch))
    if processes % settings.tp:
        raise UserError(f"--tp {settings.tp} must divide --nproc {processes}")
    if processes // settings.tp > settings.batch:
        raise UserError(f"--nproc {processes} with --batch {settings.batch} leaves processes without work")
    if kind == "cuda" and processes > available:
        raise UserError(f"--nproc {processes}, but there are {available} GPUs; use fewer processes, or --device cpu")
    load_corpus(settings.data, settings.model.context)
    checkpointing.to_go_on_from(settings)
    return processes


def launch(processes: int, restarts: int, argv: list[str]) -> int:
    """Run the loop on so many processes and wait for them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A rank that fails has said why on its own; torchrun's account of who was ended by which signal would bury that.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    loop = str(Path(__file__).with_name("train.py"))
    # As `torchrun --standalone --nproc-per-node=...`, but without its parser, which takes some of our flags for its
    # own. 127.0.0.1, because the name of a laptop or of a container often does not resolve.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-u", loop, *argv)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1
    except (KeyboardInterrupt, SignalException):
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
