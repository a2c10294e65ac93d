"""The collective runtime: runs gathers and reductions of lists of tensors over a process group.

It knows tensors and process groups, nothing of modules or parameters; an FQN is a label here. A plan
(`shardkit.core.runtime.plan`) is made once and says which items travel in place and which share a packed buffer;
a program (`shardkit.core.runtime.gather`, `shardkit.core.runtime.reduce`) runs a plan on this step's tensors;
a lane (`shardkit.core.runtime.lanes`) runs a program beside the computation and answers with a ticket.
"""
