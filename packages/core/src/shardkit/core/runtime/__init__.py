"""The collective runtime: runs gathers and reductions of lists of tensors over a process group.

It handles tensors and process groups, not modules or parameters; an FQN is only a label here. A plan (`plan`) is made
once. The transport that `choice` selects for the group (`collective`, `compressed`, `shared`) runs a plan on this
step's tensors: its `gather` and `reduce` make a program. A lane (`lanes`) runs the program and returns a ticket.
"""
