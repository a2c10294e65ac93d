"""The trace of a training run, as labelled entries, and the comparison of two such traces."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

_SHOWN_DIFFERENCES = 12


@dataclass(frozen=True)
class Tolerance:
    """How far two values may be apart; both zero means bit for bit."""

    rtol: float = 0.0
    atol: float = 0.0


EXACT = Tolerance()
# The largest difference of float32 sums of a few ranks in different order.
SUMMATION_ORDER = Tolerance(rtol=1e-5, atol=1e-6)
# The same when a bfloat16 or float16 rounding of such a sum can fall to the other side.
LOW_PRECISION = Tolerance(rtol=2e-2, atol=2e-3)


@dataclass
class Trace:
    """Labelled observations in the order in which they were made, copied so that later steps do not change them."""

    entries: dict[str, Any] = field(default_factory=dict)

    def add(self, label: str, value: Any) -> None:
        """Record a tensor, a DTensor (its local tensor and everything about it), or anything comparable."""
        unique = label
        while unique in self.entries:
            unique += "'"
        self.entries[unique] = _snapshot(value)

    def add_tree(self, label: str, tree: Any) -> None:
        """Record every leaf of a pytree."""
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            self.add(f"{label}{pytree.keystr(path)}", leaf)

    def add_gradients(self, label: str, model: nn.Module, full: bool = False) -> None:
        """Record each parameter's gradient, sharded, and with ``full`` also gathered (collective)."""
        self._add_all(label, "gradient of", {fqn: one.grad for fqn, one in model.named_parameters()}, full)

    def add_parameters(self, label: str, model: nn.Module, full: bool = False) -> None:
        """Record each parameter, sharded, and with ``full`` also gathered (collective)."""
        self._add_all(label, "parameter", dict(model.named_parameters()), full)

    def _add_all(self, label: str, what: str, tensors: dict[str, Any], full: bool) -> None:
        for fqn, tensor in tensors.items():
            self.add(f"{label}: {what} {fqn}", tensor)
            if full and isinstance(tensor, DTensor):
                self.add(f"{label}: full {what} {fqn}", tensor.detach().full_tensor())


@dataclass(frozen=True)
class _TensorRecord:
    """Everything that a caller can see of a tensor; ``facts`` compare equal, ``values`` within tolerance."""

    facts: dict[str, Any]
    values: Tensor


def _snapshot(value: Any) -> Any:
    if isinstance(value, DTensor):
        local = value.to_local()
        facts = {
            "placements": value.placements,
            "shape": tuple(value.shape),
            "stride": value.stride(),
            "mesh": _describe_mesh(value.device_mesh),
        }
    elif isinstance(value, Tensor):
        local, facts = value, {}
    else:
        return value
    facts |= {
        "type": next(kind.__name__ for kind in (nn.Parameter, DTensor, Tensor) if isinstance(value, kind)),
        "local shape": tuple(local.shape),
        "dtype": local.dtype,
        "device": local.device.type,
        "requires_grad": value.requires_grad,
    }
    return _TensorRecord(facts, local.detach().clone())


@functools.cache
def _describe_mesh(mesh: DeviceMesh) -> str:
    """Describe a mesh; cached, as asking a mesh for its ranks takes longer than a training step of a small model."""
    return f"{mesh.mesh.tolist()} {mesh.mesh_dim_names}"


def assert_same(expected: Trace, seen: Trace, tolerance: Tolerance = EXACT) -> None:
    """Raise AssertionError with the first differences, in the order of the run: the first one is nearest the cause."""
    missing = [label for label in expected.entries if label not in seen.entries]
    extra = [label for label in seen.entries if label not in expected.entries]
    problems = [f"missing: {label}" for label in missing] + [f"unexpected: {label}" for label in extra]
    for label, value in expected.entries.items():
        if label in seen.entries:
            problems += [f"{label}: {problem}" for problem in _differences(value, seen.entries[label], tolerance)]
    if problems:
        left_out = len(problems) - _SHOWN_DIFFERENCES
        shown = problems[:_SHOWN_DIFFERENCES] + ([f"... and {left_out} more"] if left_out > 0 else [])
        raise AssertionError("\n  ".join([f"{len(problems)} differences of {len(expected.entries)} entries", *shown]))


def _differences(expected: Any, seen: Any, tolerance: Tolerance) -> Iterator[str]:
    if not isinstance(expected, _TensorRecord) or not isinstance(seen, _TensorRecord):
        if expected != seen:
            yield f"expected {_brief(expected)}, got {_brief(seen)}"
        return
    facts = {**expected.facts, **seen.facts}
    different = [fact for fact in facts if expected.facts.get(fact) != seen.facts.get(fact)]
    yield from (f"{fact}: expected {expected.facts.get(fact)}, got {seen.facts.get(fact)}" for fact in different)
    if expected.values.shape != seen.values.shape or expected.values.dtype != seen.values.dtype:
        return
    if not _close(expected.values, seen.values, tolerance):
        yield _describe_values(expected.values, seen.values)


def _close(expected: Tensor, seen: Tensor, tolerance: Tolerance) -> bool:
    if tolerance == EXACT or not expected.is_floating_point():
        return torch.equal(expected, seen) or (expected.isnan().any() and _same_bits(expected, seen))
    return torch.allclose(seen.double(), expected.double(), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)


def _same_bits(expected: Tensor, seen: Tensor) -> bool:
    return torch.equal(expected.contiguous().view(torch.uint8), seen.contiguous().view(torch.uint8))


def _describe_values(expected: Tensor, seen: Tensor) -> str:
    expected, seen = expected.flatten().double(), seen.flatten().double()
    apart = (expected - seen).abs()
    worst = int(apart.nan_to_num(nan=float("inf")).argmax())
    count = int((apart != 0).sum())
    return (
        f"{count} of {expected.numel()} elements differ, at most by {apart[worst]:.3g}: "
        f"element {worst} should be {expected[worst]:.9g}, is {seen[worst]:.9g}"
    )


def _brief(value: Any) -> str:
    return f"a tensor of {value.facts}" if isinstance(value, _TensorRecord) else repr(value)
