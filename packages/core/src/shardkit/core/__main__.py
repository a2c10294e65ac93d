"""`python -m shardkit.core checkpoint ...`: the commands of this package without shardkit-tools."""

from __future__ import annotations

import sys

from shardkit.core.checkpoint.command import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["checkpoint"]:
        sys.exit(
            "usage: python -m shardkit.core checkpoint inspect | verify | diff | export | import | reshard [--help]"
        )
    sys.exit(main(sys.argv[2:]))
