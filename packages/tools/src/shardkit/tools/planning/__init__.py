"""How to shard a model so that it fits and is fast: proposals, each checked by an estimate."""
