"""The version of every shardkit distribution: the one place where it is written.

Each package's build reads this file, siblings are pinned to it with ``==``, and tests hold CHANGELOG.md and
CITATION.cff to it.
"""

__version__ = "0.1.0"
