"""One parameter: how it is cut, its sharded and unsharded tensors, and the places in modules where they stand.

`param` has the life of one parameter, `adapters` its form around plain tensors, `placements` the cuts of our own.
"""
