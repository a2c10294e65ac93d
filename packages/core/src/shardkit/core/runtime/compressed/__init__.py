"""Fewer bytes than there are: rounded shards and gradients, between ranks that share no memory.

`wire` says what an item looks like in a row of bytes, and where it lies there; `transport` makes and sends the rows.
"""
