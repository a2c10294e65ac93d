"""Optimizer steps on plain tensors of the parts that a rank holds, where DTensors would be wrong or slow."""
