"""Names and operators that torch before 2.13, or a machine for GPU runs, may lack; tests that need them are skipped."""

import re
from importlib.util import find_spec

_OF_STOCK = r"(?:'FSDP\w+' object|module 'torch\.distributed\.fsdp[\w.]*') has no attribute '(\w+)'"
_PRIVATE = ("ShardPlacementResult",)
"""Names of stock's that shardkit has not, and that tests use."""

_OF_TORCH = {
    "Unsupported global: GLOBAL torch.distributed.tensor.placement_types._StridedShard": "loads no strided placements",
    "is unable to be interpreted into a corresponding shard_order": "gathers no strided placements of fused weights",
}
"""Torch's own errors, and the lack behind each."""


def lacking(error: BaseException | str) -> str | None:
    """The name that is missing here, if an error tells nothing else; of ranks, all that failed must tell it."""
    ranks = getattr(error, "errors", None)
    reasons = [_reason(one.message) for one in ranks] if ranks else [_reason(str(error))]
    return None if None in reasons else reasons[0]


def _reason(message: str) -> str | None:
    # Imported late: pytest starts the server that ranks are forked from before it imports torch.
    import torch
    import torch.distributed.fsdp as stock

    import shardkit.core as ours

    if torch.__version__ >= (2, 13):  # type: ignore[operator]  # torch declares a str
        return None
    if refusal := re.search(r"needs torch [\d.]+ or later: torch .*", message):
        return refusal.group()
    for name in re.findall(_OF_STOCK, message):
        known = name in _PRIVATE or hasattr(ours, name) or hasattr(ours.FSDPModule, name)
        if known and not hasattr(stock, name) and not hasattr(stock.FSDPModule, name):
            return f"stock FSDP2 of torch {torch.__version__} has no {name}"
    for words, what in _OF_TORCH.items():
        if words in message:
            return f"torch {torch.__version__} {what}"
    for name in re.findall(r"No module named '(msgspec|libcst)'", message):
        if find_spec(name) is None:
            return f"{name} is not installed"
    return None
