"""`python -m shardkit.core checkpoint | run ...`: the commands of this package without shardkit-tools."""

from __future__ import annotations

import sys

from shardkit.autoinstall import run
from shardkit.core.checkpoint import command

_COMMANDS = {"checkpoint": command.main, "run": run.main}

if __name__ == "__main__":
    chosen = _COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if chosen is None:
        sys.exit(
            "usage: python -m shardkit.core checkpoint inspect | verify | diff | export | import | reshard [--help]\n"
            "       python -m shardkit.core run [--fsdp1] [--] script.py | torchrun | accelerate ... [--help]"
        )
    sys.exit(chosen(sys.argv[2:]))
