"""Training scripts of the kinds that people run give the same results on two ranks as in one process."""

import pytest
import torch
from torch import Tensor

from tests.core.engine.training_recipes import RECIPES, Session
from tests.support import on_ranks


def _run(name: str, ranks: int) -> list[tuple[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    session = Session(ranks)
    RECIPES[name](session)
    return session.seen


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_two_ranks_train_as_one_process_does(rank: int, world_size: int, name: str) -> None:
    expected, seen = _run(name, 1), _run(name, world_size)
    assert [what for what, _ in seen] == [what for what, _ in expected]
    for (what, one), (_, other) in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda text, what=what: f"{what}: {text}")
