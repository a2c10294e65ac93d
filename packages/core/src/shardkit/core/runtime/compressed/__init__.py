"""Programs that send fewer bytes than there are: rounded shards and gradients, between ranks that share no memory.

`wire` says what one item looks like on the wire, `rows` where each item lies in a rank's row of bytes; `gather` and
`reduce` are the programs. `shardkit.core.runtime.transport.compressed` moves the rows.
"""
