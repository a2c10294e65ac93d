"""Plans of which rank owns which parameter. They balance the work of an optimizer step and need no communication.

Note [Balance]
Parameters are assigned in order of falling cost, each to the rank with the least work so far; ties go to the rank with
the fewest bytes, then to the lowest rank. Every rank computes the same plan from shapes alone. A whole model at once
(`plan_owners`) is balanced better than one `fully_shard` call after the other.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit.core.mesh import DataParallelMesh
from shardkit.core.parameters.placements import Blocks, Owned

Cost = Callable[[torch.Tensor], float]
"""Cost of one step for the owner of a parameter, in any unit. It may depend on shape and dtype only."""


def newton_schulz_flops(parameter: torch.Tensor) -> float:
    """Floating-point operations of one iteration of Muon's Newton-Schulz on a matrix `(..., rows, columns)`.

    With sides `m <= n`: `2 m^2 n` for the Gram matrix, `2 m^3` for its square, `2 m^2 n` for the update; else numel.
    """
    shape = parameter.shape
    if len(shape) < 2:
        return float(math.prod(shape))
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * (4.0 * short * short * long + 2.0 * short**3)


Weight = tuple[float, int]
"""(cost, bytes) of one parameter, or of all that a rank owns."""


def _give_out(weights: Sequence[Weight], loads: list[Weight]) -> list[int]:
    """The owner of each parameter, added to the ranks' `loads`; see Note [Balance]."""
    ranks = [(*load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(ranks)
    owners = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i][0], -weights[i][1], i)):
        cost, nbytes, rank = heapq.heappop(ranks)
        loads[rank] = cost + weights[index][0], nbytes + weights[index][1]
        heapq.heappush(ranks, (*loads[rank], rank))
        owners[index] = rank
    return owners


class OwnerPlan:
    """Owners for the parameters of one model, which are held weakly, for any number of ranks."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], cost: Cost) -> None:
        self.names = tuple(name for name, _ in named)
        self.weights: tuple[Weight, ...] = tuple(_weigh(one, cost) for _, one in named)
        self._numbers = WeakTensorKeyDictionary()
        for number, (_, one) in enumerate(named):
            self._numbers[one] = number
        self._plans: dict[int, tuple[list[int], list[Weight]]] = {}

    def owners(self, world_size: int) -> list[int]:
        return self._planned(world_size)[0]

    def owner(self, parameter: torch.Tensor, world_size: int) -> int | None:
        number = self._numbers.get(parameter)
        return None if number is None else self.owners(world_size)[number]

    def loads(self, world_size: int) -> list[Weight]:
        """The load of each rank: (cost, bytes)."""
        return self._planned(world_size)[1]

    def _planned(self, world_size: int) -> tuple[list[int], list[Weight]]:
        if world_size not in self._plans:
            loads = [(0.0, 0)] * world_size
            self._plans[world_size] = _give_out(self.weights, loads), loads
        return self._plans[world_size]

    def imbalance(self, world_size: int) -> float:
        """Largest over mean cost of a rank: 1 is perfect. Computed, not measured."""
        costs = [cost for cost, _ in self.loads(world_size)]
        return max(costs) * world_size / sum(costs) if sum(costs) else 1.0


def _weigh(parameter: torch.Tensor, cost: Cost) -> Weight:
    return float(cost(parameter)), parameter.nbytes


class PlannedPlacements:
    """A `shard_placement_fn` with a plan of owners for a whole model; `plan.imbalance(world_size)` says how even."""

    def __init__(self, model: nn.Module, choose: Callable[[nn.Parameter], Placement | None], cost: Cost) -> None:
        self._choose = choose
        named = [(name, one) for name, one in model.named_parameters() if one.ndim]
        self.plan = OwnerPlan([(name, one) for name, one in named if choose(one) == Owned()], cost)

    def __call__(self, parameter: nn.Parameter) -> Placement | None:
        placement = self._choose(parameter)
        return Owned(plan=self.plan) if placement == Owned() else placement


def _owned_matrix(parameter: nn.Parameter) -> Placement | None:
    return Owned() if parameter.ndim == 2 and not isinstance(parameter, DTensor) else None


def plan_owners(
    model: nn.Module,
    choose: Callable[[nn.Parameter], Placement | None] = _owned_matrix,
    *,
    cost: Cost = newton_schulz_flops,
) -> PlannedPlacements:
    """A `shard_placement_fn` whose owners are balanced over a whole model. Not collective; needs no mesh.

    Call it before the first `fully_shard`, and pass its result to every call. All ranks must make the same calls.

    Args:
        model: the whole model; it may be on the meta device.
        choose: the placement of each parameter; by default matrices are owned and everything else is `Shard(0)`.
        cost: cost of stepping a parameter for its owner, from its shape and dtype, in any unit.
    """
    return PlannedPlacements(model, choose, cost)


# Optimizers that step on whole matrices, by class name: torch's, and those of widely used packages.
_MATRIX_OPTIMIZERS = (
    *("muon", "shampoo", "soap", "psgd", "kron", "scion", "solp", "ortho", "adafactor", "came", "galore", "splus"),
    *("spectralsphere", "lather"),
)
# Optimizers whose state is quantized in blocks of consecutive elements.
_BLOCK_OPTIMIZERS = ("8bit", "4bit", "fp8")
# Those among them that also need a norm of the whole parameter, or keep state of another shape.
_WHOLE_BLOCK_OPTIMIZERS = ("lamb", "lars", "ademamix")
_BLOCK = 4096
"""Elements: a multiple of every block size, and the least that torchao and bitsandbytes quantize at all."""


def placements_for(model: nn.Module, optimizer_class: type[torch.optim.Optimizer]) -> PlannedPlacements:
    """A `shard_placement_fn` that suits an optimizer, for all `fully_shard` calls of a model. Not collective.

    - Optimizers that need whole matrices (Muon, Shampoo, SOAP and similar, by class name): weights of two dims are
      owned, except those of `nn.Embedding` and of linear layers of the same shape (the head). These and vectors are
      `Shard(0)`, for a separate optimizer.
    - Optimizers with 8-bit or 4-bit state (torchao's, bitsandbytes'): `Blocks(elements=4096)` if the parameter has a
      multiple of 4,096 elements, else `Owned()`, as a part may be quantized where the whole would not. For LAMB, LARS
      and AdEMAMix, which read whole parameters, all are owned.
    - Optimizers that update each element by itself, and unknown ones: `Shard(0)`.

    Call it before the first `fully_shard`. Parameters that are DTensors already get `Shard(0)`.

    Raises:
        TypeError: if `optimizer_class` is not a class.
    """
    if not isinstance(optimizer_class, type):
        raise TypeError(f"placements_for takes the class of an optimizer, got {optimizer_class!r}")
    name = optimizer_class.__name__.lower()
    if any(part in name for part in _BLOCK_OPTIMIZERS):
        whole = any(part in name for part in _WHOLE_BLOCK_OPTIMIZERS)
        return plan_owners(model, functools.partial(_in_blocks, whole=whole), cost=torch.Tensor.numel)
    if not any(part in name for part in _MATRIX_OPTIMIZERS):
        return plan_owners(model, lambda parameter: None)
    tables = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Embedding)}
    ends = WeakTensorKeyDictionary()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear) and tuple(module.weight.shape) in tables:
            ends[module.weight] = True
    return plan_owners(model, lambda parameter: None if parameter in ends else _owned_matrix(parameter))


def _in_blocks(parameter: nn.Parameter, *, whole: bool) -> Placement | None:
    if isinstance(parameter, DTensor):
        return None
    return Owned() if whole or parameter.numel() % _BLOCK else Blocks(elements=_BLOCK)


# The load of each rank of a shard group, from parameters whose owner was not chosen by a plan.
_loads: WeakKeyDictionary[dist.ProcessGroup, list[Weight]] = WeakKeyDictionary()


def owners_for(parameters: Sequence[tuple[torch.Tensor, OwnerPlan | None]], mesh: DataParallelMesh) -> list[int]:
    """The owner of each parameter within the shard group: from its plan, or else the least loaded rank."""
    group, world = mesh.shard_group, mesh.shard_size
    planned = [None if plan is None else plan.owner(one, world) for one, plan in parameters]
    loads = [(0.0, 0)] * world if group is None else _loads.setdefault(group, [(0.0, 0)] * world)
    unplanned = [one for (one, _), rank in zip(parameters, planned, strict=True) if rank is None]
    chosen = iter(_give_out([_weigh(one, newton_schulz_flops) for one in unplanned], loads))
    return [next(chosen) if rank is None else rank for rank in planned]
