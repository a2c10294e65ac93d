"""The collective runtime: runs gathers and reductions of lists of tensors over a process group.

It handles tensors and process groups, not modules or parameters; an FQN is only a label here. `sharding` has the
arithmetic of chunks; `storage` allocates and frees memory. A plan (`plan`) is made once and says which items are sent
in place and which share a packed buffer (`packing`). The transport that `choice` selects for the group (`collective`,
`custom`, `compressed`, `shared`) runs a plan on this step's tensors: its `gather` and `reduce` make a
program. A lane (`lanes`) runs the program beside the computation and returns a ticket.
"""
