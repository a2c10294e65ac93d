"""Compression: rounded shards and gradients, between ranks that do not share memory."""
