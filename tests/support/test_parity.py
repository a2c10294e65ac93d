"""The parity harness itself: stock equals stock, and an engine that does otherwise is caught, with the place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.fsdp as stock
from torch import nn

from tests.support import RankFailure, run_ranks
from tests.support.comms import RankOrderReduceScatter
from tests.support.parity import STOCK, Case, compare_training


class _OneElementOff(RankOrderReduceScatter):
    def __call__(self, output_tensor: Any, *others: Any, **options: Any) -> None:
        super().__call__(output_tensor, *others, **options)
        output_tensor.view(-1)[:1] += 1e-3


def _reduces_wrongly(module: nn.Module, **options: Any) -> nn.Module:
    stock.fully_shard(module, **options)
    module.set_custom_reduce_scatter(_OneElementOff())
    return module


def _computes_wrongly(module: nn.Module, **options: Any) -> nn.Module:
    """Multiplies the output of every block, not of the root, by a little more than one."""
    stock.fully_shard(module, **options)
    if not any(isinstance(child, nn.ModuleList) for child in module.children()):
        module.register_forward_hook(lambda module, inputs, output: output * (1 + 2**-20))
    return module


reduces_wrongly, computes_wrongly = (
    SimpleNamespace(**{**vars(stock), "fully_shard": one}) for one in (_reduces_wrongly, _computes_wrongly)
)


@pytest.mark.parametrize(("features", "world_size"), [(("bfloat16", "no_reshard"), 2), (("accumulate_no_sync",), 3)])
def test_stock_equals_stock(features: tuple[str, ...], world_size: int) -> None:
    run_ranks(world_size, compare_training, Case("mlp", features, candidate=STOCK))


def test_stock_with_its_own_sums_is_within_tolerance() -> None:
    run_ranks(3, compare_training, Case("mlp", candidate=STOCK, oracle_sums="gloo"))


@pytest.mark.parametrize(
    ("engine", "symptom"),
    [
        ("reduces_wrongly", r"gradient of .*: 1 of .* elements differ, at most by 0\.001"),
        ("computes_wrongly", r"step 0\.0: output"),
    ],
)
def test_an_engine_that_does_otherwise_is_caught(engine: str, symptom: str) -> None:
    with pytest.raises(RankFailure, match=symptom):
        run_ranks(2, compare_training, Case("mlp", candidate=f"{__name__}:{engine}"))
