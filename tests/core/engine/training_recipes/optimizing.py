"""Optimizers, and operations around their steps."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.core.engine.training_recipes.session import Net, Session, recipe, sgd


@recipe
def sharpness(session: Session) -> None:
    model = session.shard(net := Net(), *net.blocks)
    optimizer = sgd(model)
    for _ in range(3):
        x = session.batch()
        model(x).square().mean().backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        moves = [parameter.grad * 0.05 / norm for parameter in model.parameters()]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        model(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        session.step(optimizer, model)


@recipe
def line_search(session: Session) -> None:
    model = session.shard(net := Net(1), *net.blocks)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    for _ in range(2):
        x = session.batch()

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss

        session.note("loss", optimizer.step(closure))  # type: ignore[arg-type]
        session.step(sgd(model), model)
