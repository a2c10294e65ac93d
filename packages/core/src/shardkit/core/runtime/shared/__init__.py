"""Gathers and reductions between ranks of one host, through memory that they map from each other.

Ranks only send a few bytes about locations: peers read the data there, directly into their own tensors.
"""
