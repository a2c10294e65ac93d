"""What a checkpoint is of: the parts of a training run, as leaves under names that do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from shardkit.core.checkpoint.fingerprints import Fingerprints, fingerprints
from shardkit.core.checkpoint.leaves import LeafPath, Leaves, flatten
from shardkit.core.checkpoint.optimizer_names import OptimizerNames
from shardkit.core.checkpoint.rng import get_rng_state

__all__ = ["Captured", "TrainingState"]

MODEL, OPTIMIZER, SCHEDULER, RNG = "model", "optimizer", "scheduler", "rng"


@dataclass(frozen=True)
class TrainingState:
    """A training run, for `CheckpointManager.save` and `restore`. The same on all ranks, but for `per_rank`.

    Attributes:
        model: sharded or not; its state dict goes under "model".
        optimizer: one, or several that share out the parameters; under "optimizer", by the names of parameters.
        scheduler: of the learning rate, or anything with `state_dict` and `load_state_dict`; under "scheduler".
        user: anything else with these two methods, under its key. Tensors in it may be DTensors. A value that is no
            tensor is stored once, as rank 0 has it.
        per_rank: the same for what differs from rank to rank, such as the position of a data loader; under
            "<key>.<rank>". It goes back to the same number of ranks only, unless the object has a method
            `load_state_dicts(states)`, which is then given the states of all ranks, by rank.
        rng: whether the random generators of each rank (torch's, Python's, numpy's) belong to it.

    Raises:
        ValueError: for a key that is one of the names above or no plain name.
    """

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer] = ()
    scheduler: Stateful | None = None
    user: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    rng: bool = True

    def __post_init__(self) -> None:
        taken = [MODEL, OPTIMIZER, SCHEDULER, RNG]
        for key in (*self.user, *self.per_rank):
            if key in taken or not key or "." in key:
                raise ValueError(f"key {key!r}: expected a name without dots that is not one of {', '.join(taken)}")
            taken.append(key)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All of them."""
        return (self.optimizer,) if isinstance(self.optimizer, Optimizer) else tuple(self.optimizer)

    def stateful(self) -> Iterator[tuple[str, Stateful]]:
        """Scheduler and user state, by key."""
        if self.scheduler is not None:
            yield SCHEDULER, self.scheduler
        yield from self.user.items()

    def capture(self, rank: int) -> Captured:
        """The leaves of everything as it is now; tensors are the live ones. Not collective.

        Raises:
            TypeError, ValueError: for state that cannot be stored, by name.
        """
        shared = flatten(get_model_state_dict(self.model), (MODEL,))
        if self.optimizers:
            names = OptimizerNames.of(self.model, self.optimizers)
            _add(shared, flatten(names.state_dict(), (OPTIMIZER,)))
        for key, one in self.stateful():
            _add(shared, flatten(one.state_dict(), (key,)))
        own = Leaves()
        for key, one in self.per_rank.items():
            _add(own, flatten(one.state_dict(), (key, str(rank))))
        if self.rng:
            _add(own, flatten(get_rng_state(), (RNG, str(rank))))
        parameters = tuple((MODEL, name) for name in OptimizerNames.of(self.model, ()).name_of.values())
        return Captured(shared, own, parameters)


@dataclass(frozen=True)
class Captured:
    """Leaves that all ranks have, and leaves of this rank alone; `parameters` are paths of the former."""

    shared: Leaves
    own: Leaves
    parameters: tuple[LeafPath, ...] = ()

    def fingerprints(self, *, sharded: bool) -> Fingerprints:
        """Of the parameters that are no DTensors, or of all that this rank holds. Not collective."""
        return fingerprints(self.shared.values, self.parameters, sharded=sharded)


def _add(to: Leaves, more: Leaves) -> None:
    to.values.update(more.values)
    to.empties.extend(more.empties)
