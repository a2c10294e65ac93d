"""Differential training: the same run with stock ``fully_shard`` and with another one, compared entry by entry.

A :class:`Case` names a model, an optimizer and any number of features (``tests/support/features.py``); names, so that
cases travel to the ranks and make readable test ids::

    run_ranks(world_size, compare_training, Case("mlp", ("no_reshard", "bfloat16"), "sgd"))

Both runs start from identical weights (seeded per run) and get the same data, which differs per rank, step and
micro-batch. They use the same process group, one after the other. Compared are: losses, every gradient after every
backward (local shard and everything about its DTensor), parameters after every step, the state dict and the
optimizer's state: bit for bit. ``Case(gather=True)`` gathers the gradients and parameters of the last step as well.

Bit for bit holds on any world size because stock's reduction is told to add in rank order
(:class:`tests.support.comms.RankOrderReduceScatter`): gloo's own order differs from it as soon as three ranks add.
``Case(oracle_sums="gloo")`` compares with gloo's own sums instead, within the tolerance that is stated.

``SHARDKIT_PARITY_CANDIDATE=torch.distributed.fsdp`` in the environment compares stock with itself. This has to pass
before a difference is blamed on an engine.
"""

import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tests.support.comms import RankOrderReduceScatter
from tests.support.features import FEATURES, Feature
from tests.support.models import MODELS, ModelSpec
from tests.support.schedules import Run, plain
from tests.support.sharding import shard_each
from tests.support.trace import EXACT, LOW_PRECISION, SUMMATION_ORDER, Tolerance, Trace, assert_same

STOCK = "torch.distributed.fsdp"
CANDIDATE = os.environ.get("SHARDKIT_PARITY_CANDIDATE", "shardkit.core")


# A large eps keeps the sign of a tiny gradient from deciding a whole step: no tolerance tells that from a bug.
_adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(_adamw, foreach=True),
    "adamw_fused": partial(_adamw, fused=True),
}


@dataclass(frozen=True)
class Case:
    """One differential training run. ``candidate``: a module, or ``module:attribute``, that has ``fully_shard``."""

    model: str = "mlp"
    features: tuple[str, ...] = ()
    optimizer: str = "sgd"
    steps: int = 3
    candidate: str = CANDIDATE
    oracle_sums: Literal["rank order", "gloo"] = "rank order"
    gather: bool = False

    @property
    def spec(self) -> ModelSpec:
        return MODELS[self.model]

    @property
    def chosen(self) -> list[Feature]:
        return [FEATURES[name] for name in self.features]

    @property
    def tolerance(self) -> Tolerance:
        """Bit for bit unless gloo chose the order of sums."""
        if self.oracle_sums == "rank order":
            return EXACT
        return LOW_PRECISION if any(feature.low_precision for feature in self.chosen) else SUMMATION_ORDER


def compare_training(rank: int, world_size: int, case: Case) -> None:
    """Train with stock and with the candidate, and raise AssertionError where they differ. A body for run_ranks."""
    expected = train(rank, world_size, case, STOCK)
    seen = train(rank, world_size, case, case.candidate)
    assert_same(expected, seen, case.tolerance)


def train(rank: int, world_size: int, case: Case, engine: str) -> Trace:
    """Train ``case`` with the ``fully_shard`` of ``engine`` and return the trace. Collective."""
    api = load_api(engine)
    model = build(case)
    shard(model, case, api, world_size)
    owns_reduction = any(feature.owns_reduction for feature in case.chosen)
    if engine == STOCK and case.oracle_sums == "rank order" and not owns_reduction:
        sum_in_rank_order(model)
    for feature in case.chosen:
        feature.prepare(model, api, case.spec)
    optimizer = OPTIMIZERS[case.optimizer](p for p in model.parameters() if p.requires_grad)
    run = Run(rank, api, case.spec, model, optimizer, Trace(), gathered_step=case.steps - 1 if case.gather else None)
    run.reshard_before_update = any(feature.reshard_before_update for feature in case.chosen)
    schedule = next((feature.schedule for feature in case.chosen if feature.schedule), plain)
    for step in range(case.steps):
        schedule(run, step)
        run.trace.add_parameters(f"step {step}", model, full=step == run.gathered_step)
    run.trace.add_tree("state dict", dict(model.state_dict()))
    run.trace.add("order of the state dict", list(model.state_dict()))
    run.trace.add_tree("optimizer state", optimizer.state_dict())
    return run.trace


def build(case: Case) -> nn.Module:
    """Build the model with the weights that every rank and every engine starts from."""
    torch.manual_seed(1234)
    return case.spec.build()


def shard(model: nn.Module, case: Case, api: Any, world_size: int) -> None:
    """Apply ``fully_shard`` to the blocks of the model and then to the model, with the features' arguments."""
    options: dict[str, Any] = {}
    for feature in case.chosen:
        options |= feature.options(api, model, world_size)
    if apply := next((feature.apply for feature in case.chosen if feature.apply), None):
        apply(model, api, case.spec, options)
    else:
        shard_each(*case.spec.blocks(model), model, api=api, **options)


def load_api(name: str) -> Any:
    """Import ``module`` or ``module:attribute``: anything with fully_shard and the policies as attributes."""
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def sum_in_rank_order(model: nn.Module) -> None:
    """Give every sharded module of a stock model the reduction that adds in rank order."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(RankOrderReduceScatter())
