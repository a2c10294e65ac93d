"""The parity harness itself: stock equals stock, and every fault of ``faulty_stock`` is caught and named."""

import pytest

from tests.support import RankFailure, run_ranks
from tests.support.parity import STOCK, Case, compare_training, compare_with_single_process

FAULTY = "tests.support.faulty_stock:"


@pytest.mark.parametrize(("features", "world_size"), [(("bfloat16", "no_reshard"), 2), (("accumulate_no_sync",), 3)])
def test_stock_equals_stock(features: tuple[str, ...], world_size: int) -> None:
    run_ranks(world_size, compare_training, Case("mlp", features, candidate=STOCK))


def test_stock_with_its_own_sums_is_within_tolerance() -> None:
    run_ranks(3, compare_training, Case("mlp", candidate=STOCK, oracle_sums="gloo"))


@pytest.mark.parametrize(
    ("fault", "symptom"),
    [
        ("doubled_gradients", r"step 0 after backward: gradient of inp\.weight: .* should be"),
        ("one_element_off", r"gradient of .*: 1 of .* elements differ, at most by 0\.001"),
        ("wrong_placement", r"placements: expected \(Shard\(dim=0\),\), got \(Shard\(dim=1\),\)"),
        ("slightly_wrong_output", r"step 0\.0: output"),
    ],
)
def test_fault_is_caught(fault: str, symptom: str) -> None:
    model = "transformer" if fault == "wrong_placement" else "mlp"
    with pytest.raises(RankFailure, match=symptom):
        run_ranks(2, compare_training, Case(model, candidate=FAULTY + fault))


def test_doubled_gradients_are_caught_without_an_oracle() -> None:
    case = Case("mlp", optimizer="adamw", candidate=FAULTY + "doubled_gradients")
    with pytest.raises(RankFailure, match=r"gradient of inp\.weight"):
        run_ranks(3, compare_with_single_process, case)
