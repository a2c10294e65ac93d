"""The engine: when parameter groups are gathered, released and reduced while a module runs.

Each call of `fully_shard` has one `FSDPState` (`step`), each root one `Schedule` (`schedule`), and each set of
parameters that are gathered together one `FSDPParamGroup` (`group`).
"""
