"""Which errors count as something that an older torch lacks."""

import pytest
import torch

from tests.support.failures import RankError, RankFailure
from tests.support.lacking import lacking

OWNED = (
    "shard_placement_fn returned Owned() for parameter 'w', which needs torch 2.12 or later: torch 2.11.0 never runs"
)


def _of_ranks(*messages: str) -> RankFailure:
    errors = [RankError(rank, "ValueError", message, OWNED, 0.0) for rank, message in enumerate(messages)]
    return RankFailure("body", len(messages), errors, {})


@pytest.fixture
def on_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))


@pytest.mark.usefixtures("on_2_11")
def test_what_is_lacking_and_what_is_a_fault() -> None:
    assert lacking(ValueError(OWNED)) == lacking(_of_ranks(OWNED, OWNED)) == OWNED[OWNED.index("needs") :]
    for fault in (
        _of_ranks(OWNED, "tensors differ"),
        AttributeError("'FSDPLinear' object has no attribute 'unshard'"),  # stock has it
        AttributeError("'FSDPLinear' object has no attribute 'unshrad'"),  # ours has not
        ModuleNotFoundError("No module named 'numpy'"),
    ):
        assert lacking(fault) is None, fault
    beyond_stock = AttributeError("'FSDPLinear' object has no attribute 'set_prefetch_depth'")
    assert "has no set_prefetch_depth" in str(lacking(beyond_stock))


def test_nothing_is_lacking_with_the_torch_of_ci() -> None:
    assert torch.__version__ < (2, 13) or lacking(ValueError(OWNED)) is None
