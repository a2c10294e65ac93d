"""Weights out: from sharded training to inference in other processes, without a full tensor.

Each trainer rank sends boxes of its own shards, each inference rank receives the boxes that it wants. Nothing else of
shardkit imports this package. See docs/how-to/weights.md.
"""

from shardkit.weights.directory import DirectoryReceiver
from shardkit.weights.receiver import SendersClosed, WeightReceiver
from shardkit.weights.sender import Report, Sending, WeightSender
from shardkit.weights.targets import Cut, Experts, Part, Rule, Stack, Target, targets_for, targets_of

__all__ = [
    "Cut",
    "DirectoryReceiver",
    "Experts",
    "Part",
    "Report",
    "Rule",
    "SendersClosed",
    "Sending",
    "Stack",
    "Target",
    "WeightReceiver",
    "WeightSender",
    "targets_for",
    "targets_of",
]
