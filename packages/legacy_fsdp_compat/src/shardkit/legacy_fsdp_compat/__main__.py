"""`python -m shardkit.legacy_fsdp_compat migrate ...`: the commands of this package without shardkit-tools."""

from __future__ import annotations

import sys

from shardkit.legacy_fsdp_compat.migrate.command import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["migrate"]:
        sys.exit("usage: python -m shardkit.legacy_fsdp_compat migrate [--help | SOURCE... TARGET | script FILE]")
    sys.exit(main(sys.argv[2:]))
