"""Memory beyond the device: activations that wait on the host, and when a step on the host has updated a group."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, field

from shardkit.tools.estimating.trace import Awaited, Changed, Copied, Held, Ran, Step, Trace

MIN_BYTES = 2**20
"""Smaller activations stay, as by default in `offload_activations`."""

_BLOCK = re.compile(r"(?:[^\d.][^.]*\.)*\d+")  # an entry of the outermost list


def _block(fqn: str) -> str:
    found = _BLOCK.match(fqn)
    return found[0] if found else ""


@dataclass
class _Pass:
    """Of one forward and its backward: where forward leaves each block, and backward enters it, in forward's order."""

    left: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)


def _passes(steps: list[Step]) -> list[_Pass]:
    found, last = [_Pass()], "forward"
    for index, step in enumerate(steps):
        if not isinstance(step, Ran) or step.phase not in ("forward", "backward"):
            continue
        if (last, step.phase) == ("backward", "forward"):
            found.append(_Pass())
        last = step.phase
        if (block := _block(step.fqn)) and step.phase == "forward":
            found[-1].left[block] = index
        elif block:
            found[-1].entered.setdefault(block, index)
    return found


def activations_on_host(trace: Trace) -> Trace:
    """The trace with `offload_activations`: blocks' activations leave, and come back one block ahead of backward.

    As there, a block's activations are copied while the next one runs, and leave the device at its end; those of the
    last block stay.
    """
    saved: dict[str, list[tuple[int, Changed]]] = defaultdict(list)
    freed: dict[Held, int] = {}
    for index, step in enumerate(trace.steps):
        if isinstance(step, Changed) and step.about.category == "activations":
            if not step.nbytes:
                freed[step.about] = index
            elif step.phase == "forward" and step.nbytes >= MIN_BYTES:
                saved[_block(step.fqn)].append((index, step))
    before: dict[int, list[Step]] = defaultdict(list)  # steps to insert, by the index of the step that follows
    number = -1  # those of communications are above zero
    for one in _passes(trace.steps):
        blocks = [block for block in one.left if block in one.entered]
        for block, following in itertools.pairwise(blocks):
            leaves, gone = one.left[block] + 1, one.left[following] + 1
            asked, needed = one.entered[following], one.entered[block]
            moved = [step for index, step in saved[block] if index < leaves and freed.get(step.about, 0) > needed]
            saved[block] = [pair for pair in saved[block] if pair[0] >= leaves]
            if not moved:
                continue
            nbytes, host = sum(step.nbytes for step in moved), Held("activations", host=True)
            before[leaves] += [Changed(host, nbytes, block, "forward"), Copied(True, nbytes, block, "forward", number)]
            before[gone] += [Awaited(number, block, "forward")]
            before[gone] += [Changed(step.about, 0, block, "forward") for step in moved]
            before[asked] += [Changed(step.about, step.nbytes, block, "backward") for step in moved]
            before[asked] += [Copied(False, nbytes, block, "backward", number - 1)]
            before[needed] += [Awaited(number - 1, block, "backward"), Changed(host, 0, block, "backward")]
            number -= 2
    steps: list[Step] = []
    for index, step in enumerate(trace.steps):
        steps += before.get(index, ())
        steps.append(step)
    return Trace(steps, trace.held)
