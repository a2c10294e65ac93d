"""Gathers and reductions between ranks of one host, through memory that they map from each other."""
