"""The collective runtime: runs gathers and reductions of lists of tensors over a process group.

It knows tensors and process groups, nothing of modules or parameters; an FQN is a label here. `sharding` has the
arithmetic of chunks, `storage` the memory that comes and goes. A plan (`plan`) is made
once and says which items travel in place and which share a packed buffer (`packing`). The transport that `choice` found
for the group (`collective`, `pairwise`, `custom`, `compressed`, `shared`) runs a plan on this step's tensors: its
`gather` and `reduce` make a program. A lane (`lanes`) runs it beside the computation and answers with a ticket.
"""
