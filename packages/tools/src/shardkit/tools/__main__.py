"""`python -m shardkit.tools`: the `shardkit` command where its script is not on the path."""

from __future__ import annotations

import sys

from shardkit.tools.command import main

if __name__ == "__main__":
    sys.exit(main())
