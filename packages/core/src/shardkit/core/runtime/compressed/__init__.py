"""Compression: rounded shards and gradients, between ranks that do not share memory.

`wire` defines the format and position of an item in a row of bytes; `transport` makes and sends the rows.
"""
