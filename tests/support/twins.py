"""A sharded model beside the same model in one process, which gets the batches of all ranks.

`tests/support/parity.py` compares with stock's engine; these serve where stock refuses, or does otherwise.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardkit.core.parameters.region import region_of

Loss = Callable[[nn.Module, int], Tensor]


@dataclass
class Twins:
    """A sharded model and its whole twin, trained side by side; ``loss(model, rank)`` is one rank's loss."""

    sharded: Any
    whole: nn.Module
    rank: int
    world_size: int

    @classmethod
    def of(cls, rank: int, world_size: int, build: Callable[[], nn.Module], shard: Callable[[Any], object]) -> "Twins":
        """Build the model once, copy it, shard the original."""
        torch.manual_seed(7)
        model = build()
        whole = copy.deepcopy(model)
        shard(model)
        return cls(model, whole, rank, world_size)

    def backward(self, loss: Loss) -> None:
        """One backward of each: this rank's loss of the sharded model, the mean over ranks of the whole one."""
        loss(self.sharded, self.rank).backward()
        self.reference_backward(loss)

    def reference_backward(self, loss: Loss) -> None:
        """The whole model's part of ``backward``."""
        for rank in range(self.world_size):
            (loss(self.whole, rank) / self.world_size).backward()

    @property
    def both(self) -> tuple[Any, Any]:
        """The sharded model and the whole one."""
        return self.sharded, self.whole

    def step(self, loss: Loss, times: int = 1, lr: float = 0.1) -> None:
        """Backward, compare gradients, step with SGD, compare parameters; so many times."""
        for _ in range(times):
            self.backward(loss)
            self.check_gradients()
            self.update(lr)
            self.check_parameters()

    def update(self, lr: float = 0.1) -> None:
        """One step of plain SGD on both, with the parameters that each has now."""
        for model in self.both:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            optimizer.step()
            optimizer.zero_grad()

    def align(self) -> None:
        """Give the whole model exactly the sharded one's parameters (collective)."""
        with torch.no_grad():
            for mine, theirs in zip(self.whole.parameters(), self.sharded.parameters(), strict=True):
                mine.copy_(theirs.full_tensor())

    def check_gradients(self) -> None:
        """Every gradient is the reference's; absent where that one is absent."""
        expected = dict(self.whole.named_parameters())
        seen = dict(self.sharded.named_parameters())
        assert seen.keys() == expected.keys()
        for fqn, parameter in seen.items():
            assert isinstance(parameter, DTensor), f"{fqn} is not sharded after backward"
            assert (parameter.grad is None) == (expected[fqn].grad is None), f"gradient of {fqn}: {parameter.grad}"
            if parameter.grad is not None:
                assert_close(parameter.grad, expected[fqn].grad, f"gradient of {fqn}")

    def check_parameters(self) -> None:
        """Every parameter is the reference's."""
        expected = dict(self.whole.named_parameters())
        for fqn, parameter in self.sharded.named_parameters():
            assert_close(parameter, expected[fqn], fqn)


def assert_close(seen: Tensor, expected: Tensor, what: str) -> None:
    """The values agree within a few roundings of their dtype. Of a DTensor, this rank compares its own shard.

    Nothing is gathered: that every rank holds its part says as much, and takes a tenth of the time.
    """
    if isinstance(seen, DTensor):
        assert seen.shape == expected.shape, f"{what}: {seen.shape}, expected {expected.shape}"
        seen, expected = seen.to_local(), region_of(what, seen).take(expected.detach())
    assert seen.dtype == expected.dtype, f"{what}: {seen.dtype}, expected {expected.dtype}"
    rtol, atol = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-5, 1e-6)}.get(seen.dtype, (3e-2, 3e-3))
    torch.testing.assert_close(seen, expected, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_equal(seen: Any, expected: Any, where: object = "") -> None:
    """There are no `differences`."""
    found = differences(seen, expected, str(where))
    assert not found, found


def differences(seen: Any, expected: Any, where: str = "") -> list[str]:
    """The places where two nested values differ: in a type, a key, a placement, or a bit of a tensor."""
    if type(seen) is not type(expected):
        return [f"{where}: {type(seen).__name__}, expected {type(expected).__name__}"]
    if isinstance(expected, dict):
        if seen.keys() != expected.keys():
            return [f"{where}: keys {list(seen)}, expected {list(expected)}"]
        return [found for key in expected for found in differences(seen[key], expected[key], f"{where}.{key}")]
    if isinstance(expected, list | tuple):
        if len(seen) != len(expected):
            return [f"{where}: {len(seen)} items, expected {len(expected)}"]
        pairs = enumerate(zip(seen, expected, strict=True))
        return [found for number, (a, b) in pairs for found in differences(a, b, f"{where}.{number}")]
    if isinstance(expected, Tensor):
        (of_seen, one), (of_expected, other) = _facts(seen), _facts(expected)
        return [] if of_seen == of_expected and torch.equal(_bits(one), _bits(other)) else [where]
    return [] if seen == expected else [f"{where}: {seen!r}, expected {expected!r}"]


def _facts(tensor: Tensor) -> tuple[Any, Tensor]:
    if isinstance(tensor, DTensor):
        return (tensor.placements, tensor.shape, tensor.dtype), tensor.detach().to_local()
    return (tensor.shape, tensor.dtype), tensor.detach()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Copies of this rank's parts of the gradients of a sharded model."""
    return [parameter.grad.to_local().clone() for parameter in model.parameters() if parameter.grad is not None]


def batch(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers that differ between ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def square_loss(*shape: int, seed: int = 0) -> Loss:
    """The mean square of the output for a batch of that shape, which differs between ranks."""
    return lambda model, rank: model(batch(rank, *shape, seed=seed)).square().mean()
