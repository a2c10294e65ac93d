"""How programs are drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.core.random_programs.program import (
    Act,
    Block,
    Call,
    Micro,
    Op,
    Policy,
    Program,
    Side,
    Step,
    Wrap,
    blocks_of,
    is_below,
    parameter_names,
)

IN_PLACE_OPS = ("add_", "mul_", "tanh_", "zero_column_", "add_bias_")
VIEW_OPS = ("view", "slice", "transpose", "flat_view", "expand")
PLAIN_OPS = ("tanh", "square", "double", "hook", "detach_half", "clone")
PARAMETER_OPS = ("linear", "bias", "scale", "gain", "mlp", "table", "spare")
FORMS = ("tensor", "tuple", "list", "dict", "nested", "dataclass", "object", "closure", "attribute")
EXTRAS = ("mean", "input", "weight", "weight_view", "half", "int")
HOOKS = ("replace", "in_place", "pre", "full_backward", "full_backward_pre", "capture", "tensor_hook", "always")
USES = ("first", "both", "twice", "residual", "extra_in_place", "none")
# No English words: an error is searched for these names.
NAMES = ("alpha", "beta", "gamma", "delta")
FREE_ACTS = ("state_dict", "moved", "no_grad", "inference", "eval", "dropped")
SHARDED_ACTS = ("unshard", "unshard_async", "reshard")


class FromSeed:
    """Choices of a random number generator."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)


def _sometimes(draw: FromSeed, often: int = 4) -> bool:
    """True once in ``often`` draws."""
    return draw.number(0, often - 1) == often - 1


def _one_of(draw: FromSeed, *values: Any) -> Any:
    return values[draw.number(0, len(values) - 1)]


WORLDS = (2, 2, 2, 2, 2, 2, 1, 3, 3, 4)


def drawn_program(draw: FromSeed) -> Program:
    """One random program."""
    rich = _sometimes(draw, 3)
    root = _block(draw, "", 2, rich)
    paths = [path for path, _ in blocks_of(root)]
    dtype = _one_of(draw, "float64", "float64", "float64", "float32")
    names = parameter_names(Program(root))
    ties: tuple[tuple[str, str], ...] = ()
    if len(names) > 1 and _sometimes(draw, 4):
        linear = [name for name in names if name.endswith("linear_w")]
        pool = linear if len(linear) > 1 else names
        ties = ((_one_of(draw, *pool), _one_of(draw, *pool)),)
    program = Program(root, _policy(draw, paths), _steps(draw, paths, names, rich), ties, dtype)
    return _consistent(_without_what_torch_cannot(program))


def _consistent(program: Program) -> Program:
    """Every parameter is sharded, and nothing is set or done that another setting rules out."""
    names = set(parameter_names(program))
    policy = program.policy
    wraps = policy.wraps
    wrapped = {path for wrap in wraps for path in wrap.paths}
    owners = {name.rpartition(".")[0] for name in names}
    if not wrapped or not all(any(is_below(owner, path) for path in wrapped) for owner in owners):
        wraps, wrapped = (*wraps, Wrap(("",))), {*wrapped, ""}
    late = policy.late if policy.late is None else min(policy.late, policy.world - 1)
    policy = replace(policy, wraps=wraps, late=late, budget=policy.budget if policy.depth is None else None)
    if "" not in wrapped:
        policy = replace(policy, param_dtype=None, reduce_dtype=None)
    steps = tuple(_consistent_step(step, wrapped, names) for step in program.steps)
    ties = tuple(tie for tie in program.ties if tie[0] != tie[1] and names.issuperset(tie))
    return replace(program, policy=policy, steps=steps, ties=ties)


def _consistent_step(step: Step, wrapped: set[str], names: set[str]) -> Step:
    fails = any(micro.fail for micro in step.micros)
    synchronize = step.synchronize and not fails
    micros = []
    for index, micro in enumerate(step.micros):
        before, between = (
            tuple(act for act in acts if act.kind in FREE_ACTS or act.path in wrapped)
            for acts in (micro.before, micro.between)
        )
        sync = (micro.sync or fails or index == len(step.micros) - 1) and not synchronize
        micros.append(replace(micro, before=before, between=between, sync=sync))
    toggle = tuple(name for name in step.toggle if name in names)
    return replace(step, micros=tuple(micros), toggle=toggle, synchronize=synchronize)


def _without_what_torch_cannot(program: Program) -> Program:
    """Around reentrant checkpoints: backward hangs on a parameter that comes out of one, autograd.grad is refused.

    Changes in place of a value that is saved for backward stay: they raise in one process, so nothing is compared.
    """
    calls = [op for _, block in blocks_of(program.root) for op in block.ops if isinstance(op, Call)]
    if not any(op.checkpoint == "reentrant" for op in calls):
        return program
    steps = tuple(replace(one, micros=tuple(replace(m, by="backward") for m in one.micros)) for one in program.steps)
    return replace(program, root=_without_weights(program.root), steps=steps)


def _without_weights(block: Block) -> Block:
    extra = "mean" if block.extra in ("weight", "weight_view") else block.extra
    block = replace(block, extra=extra, blocks=tuple(map(_without_weights, block.blocks)))
    frozen, low = (tuple(name for name in names if name in block.parameters) for names in (block.frozen, block.float32))
    return replace(block, frozen=frozen, float32=low)


def _block(draw: FromSeed, name: str, levels: int, rich: bool) -> Block:
    children: list[Block] = []
    if levels:
        many = draw.number(1, 3) if not name else draw.number(0, 2)
        for index in range(many):
            child = NAMES[index]
            if index and _sometimes(draw, 10):
                children.append(Block(child, same=f"{name}.{NAMES[0]}" if name else NAMES[0]))
            else:
                children.append(_block(draw, child, levels - 1, rich))
    ops = _ops(draw, children, rich)
    extra = _one_of(draw, *EXTRAS) if _sometimes(draw, 5) else None
    form = _one_of(draw, *FORMS) if extra or _sometimes(draw, 6) else "tensor"
    hooks = (_one_of(draw, *HOOKS),) if _sometimes(draw, 9) else ()
    block = Block(name, ops, tuple(children), form, extra, hooks)
    own = block.parameters
    frozen = tuple(p for p in own if _sometimes(draw, 4)) if _sometimes(draw, 6) else ()
    if own and _sometimes(draw, 12):
        frozen = own
    low = tuple(p for p in own if _sometimes(draw, 2)) if _sometimes(draw, 9) else ()
    return Block(name, ops, tuple(children), form, extra, hooks, frozen, low)


def _ops(draw: FromSeed, children: list[Block], rich: bool) -> tuple[Op, ...]:
    ops: list[Op] = []
    for child in children:
        ops += _some_ops(draw, 1, rich)
        for _ in range(2 if _sometimes(draw, 6) else 1):
            ops.append(_call(draw, child.name))
            if _sometimes(draw, 4):
                ops.append(_one_of(draw, *IN_PLACE_OPS, *VIEW_OPS, *PLAIN_OPS))
    ops += _some_ops(draw, 0 if children else 1, rich)
    if _sometimes(draw, 12):
        ops.append("detach" if children and _sometimes(draw, 6) else "detach_half")
    return tuple(ops)


def _some_ops(draw: FromSeed, least: int, rich: bool) -> list[Op]:
    ops: list[Op] = []
    for _ in range(draw.number(least, 3 if rich else 2)):
        kind = draw.number(0, 11)
        if kind < 5:
            ops.append(_one_of(draw, "linear", "linear", *PARAMETER_OPS))
        elif kind < 7:
            ops.append(_one_of(draw, *PLAIN_OPS))
        elif kind == 7:
            ops.append(_one_of(draw, *VIEW_OPS))
        elif kind == 8:
            ops.append(_one_of(draw, *IN_PLACE_OPS))
        elif kind < 11:
            place = _one_of(draw, "attribute", "dict", "list", "closure")
            ops.append(Side(_one_of(draw, "router", "router", "weight", "x"), place))
        else:
            ops.append("trap")
    return ops


def _call(draw: FromSeed, name: str) -> Call:
    use = _one_of(draw, *USES) if _sometimes(draw, 3) else "first"
    kind = _one_of(draw, "reentrant", "plain") if _sometimes(draw, 6) else None
    return Call(name, use, kind, no_grad=_sometimes(draw, 20), keyword=kind is None and _sometimes(draw, 10))


def _policy(draw: FromSeed, paths: list[str]) -> Policy:
    world = _one_of(draw, *WORLDS)
    wraps: list[Wrap] = []
    for path in paths:
        if path and not _sometimes(draw, 4):
            wraps.append(Wrap((path,), _reshard(draw, world)))
    if len(wraps) > 1 and _sometimes(draw, 6):
        wraps[:2] = [Wrap(wraps[0].paths + wraps[1].paths, wraps[0].reshard)]
    if not _sometimes(draw, 12):
        wraps.append(Wrap(("",), _reshard(draw, world)))
    low = _sometimes(draw, 8)
    return Policy(
        world=world,
        shared_memory=_sometimes(draw, 3),
        wraps=tuple(wraps),
        depth=_one_of(draw, 0, 1, 2, 3) if _sometimes(draw, 2) else None,
        budget=_one_of(draw, 100_000, 8_000, 4_000, 1_500) if _sometimes(draw, 8) else None,
        lists=_one_of(draw, "next", "all", "reversed") if _sometimes(draw, 6) else None,
        late=_one_of(draw, 1, 0, 2) if _sometimes(draw, 2) else None,
        param_dtype=_one_of(draw, "float32", "bfloat16") if low else None,
        reduce_dtype=_one_of(draw, None, "float32", "float64") if low or _sometimes(draw, 12) else None,
        reshard_after_backward=not _sometimes(draw, 12),
        dim_1=_sometimes(draw, 8),
        hsdp=world == 4 and _sometimes(draw, 3),
        hooks_first=_sometimes(draw, 2),
        buffers=_one_of(draw, 2, 3) if _sometimes(draw, 6) else 1,
        reset=not _sometimes(draw, 6),
    )


def _reshard(draw: FromSeed, world: int) -> bool | int | None:
    if not _sometimes(draw, 3):
        return None
    return _one_of(draw, True, False, False, *(size for size in (1, 2) if world % size == 0))  # type: ignore[no-any-return]


def _steps(draw: FromSeed, paths: list[str], names: list[str], rich: bool) -> tuple[Step, ...]:
    steps = []
    for _ in range(draw.number(2, 3)):
        micros = tuple(_micro(draw, paths, rich) for _ in range(2 if _sometimes(draw, 4) else 1))
        zero = _one_of(draw, "zero", "keep") if _sometimes(draw, 4) else "none"
        toggle = tuple(name for name in names if _sometimes(draw, 3)) if _sometimes(draw, 6) else ()
        clip, synchronize = _sometimes(draw, 5), _sometimes(draw, 6)
        steps.append(Step(micros, not _sometimes(draw, 4), zero, toggle, clip, synchronize))
    return tuple(steps)


def _micro(draw: FromSeed, paths: list[str], rich: bool) -> Micro:
    if not _sometimes(draw, 2):
        return Micro(inputs=_sometimes(draw, 3))
    inputs = _sometimes(draw, 2)
    return Micro(
        forwards=_one_of(draw, 2, 3) if _sometimes(draw, 4) else 1,
        order=_one_of(draw, "each", "reversed", "together"),
        sides=_one_of(draw, "sum", "first", "last", "only", "drop"),
        twice=_sometimes(draw, 6),
        by=_one_of(draw, "inputs", "penalty") if inputs and _sometimes(draw, 3) else "backward",
        inputs=inputs,
        change=tuple(_one_of(draw, *IN_PLACE_OPS[:4], *VIEW_OPS, *PLAIN_OPS) for _ in range(draw.number(0, 2))),
        before=_acts(draw, paths, rich),
        between=_acts(draw, paths, rich),
        fail=_one_of(draw, "forward", "backward") if _sometimes(draw, 5) else None,
        sync=not _sometimes(draw, 3),
    )


def _acts(draw: FromSeed, paths: list[str], rich: bool) -> tuple[Act, ...]:
    if not _sometimes(draw, 3 if rich else 6):
        return ()
    if _sometimes(draw, 2):
        return (Act(_one_of(draw, *FREE_ACTS)),)
    return (Act(_one_of(draw, *SHARDED_ACTS), _one_of(draw, *paths)),)
