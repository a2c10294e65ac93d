"""How programs are drawn from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

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
    parameter_names,
)

IN_PLACE_OPS = ("add_", "mul_", "tanh_", "zero_column_", "add_bias_")
VIEW_OPS = ("view", "slice", "transpose", "flat_view", "expand")
PLAIN_OPS = ("tanh", "square", "double", "hook", "detach_half", "clone")
PARAMETER_OPS = ("linear", "linear", "linear", "bias", "scale", "gain", "mlp", "table", "spare")
SIDES = tuple(
    Side(of, place) for of in ("router", "router", "weight", "x") for place in ("attribute", "dict", "list", "closure")
)
# As often as they stand here.
OPS: list[tuple[Op, ...]] = [
    *[PARAMETER_OPS] * 5,
    PLAIN_OPS,
    PLAIN_OPS,
    VIEW_OPS,
    IN_PLACE_OPS,
    SIDES,
    SIDES,
    ("trap",),
]
FORMS = ("tensor", "tuple", "list", "dict", "nested", "dataclass", "object", "closure", "attribute")
EXTRAS = ("mean", "input", "half", "int")
HOOKS = ("replace", "in_place", "pre", "full_backward", "full_backward_pre", "capture", "tensor_hook", "always")
USES = ("first", "both", "twice", "residual", "extra_in_place", "none")
# No English words: an error is searched for these names.
NAMES = ("alpha", "beta", "gamma", "delta")
FREE_ACTS = ("state_dict", "moved", "no_grad", "inference", "eval", "dropped")
SHARDED_ACTS = ("unshard", "unshard_async", "reshard")
WORLDS = (2, 2, 2, 2, 2, 2, 1, 3, 3, 4)


class _Draw(Random):
    """Choices from a seed.

    Only a program that is ``reentrant`` has reentrant checkpoints, and then no parameter that comes out of a block, on
    which backward would hang around such a checkpoint, and no ``autograd.grad``, which torch refuses. Changes in place
    of a value that is saved for backward stay: they raise in one process, so nothing is compared.
    """

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.rich, self.reentrant = self.sometimes(3), self.sometimes(2)

    def sometimes(self, often: int = 4) -> bool:
        """True once in ``often`` draws."""
        return not self.randrange(often)


def drawn_program(seed: str) -> Program:
    """The random program of a seed."""
    draw = _Draw(seed)
    root = _block(draw, "", 2)
    names = parameter_names(root)
    ties: tuple[tuple[str, str], ...] = ()
    if len(names) > 1 and draw.sometimes():
        linear = [name for name in names if name.endswith("linear_w")]
        first, second = draw.sample(linear if len(linear) > 1 else names, 2)
        ties = ((first, second),)
    policy = _policy(draw, root, names)
    steps = tuple(_step(draw, policy, names) for _ in range(draw.randint(2, 3)))
    return Program(root, policy, steps, ties, draw.choice(("float64", "float64", "float64", "float32")))


def _block(draw: _Draw, name: str, levels: int) -> Block:
    children: list[Block] = []
    for child in NAMES[: (draw.randint(0, 2) if name else draw.randint(1, 3)) if levels else 0]:
        if children and draw.sometimes(10):
            children.append(Block(child, same=f"{name}.{NAMES[0]}" if name else NAMES[0]))
        else:
            children.append(_block(draw, child, levels - 1))
    ops = _ops(draw, children)
    extras = EXTRAS if draw.reentrant else (*EXTRAS, "weight", "weight_view")
    extra = draw.choice(extras) if draw.sometimes(5) else None
    form = draw.choice(FORMS) if extra or draw.sometimes(6) else "tensor"
    hooks = (draw.choice(HOOKS),) if draw.sometimes(9) else ()
    block = Block(name, ops, tuple(children), form, extra, hooks)
    frozen = tuple(one for one in block.parameters if draw.sometimes()) if draw.sometimes(6) else ()
    low = tuple(one for one in block.parameters if draw.sometimes(2)) if draw.sometimes(9) else ()
    return replace(block, frozen=block.parameters if draw.sometimes(12) else frozen, float32=low)


def _ops(draw: _Draw, children: list[Block]) -> tuple[Op, ...]:
    ops: list[Op] = []
    for child in children:
        ops += _some_ops(draw, 1)
        for _ in range(1 + draw.sometimes(6)):
            ops.append(_call(draw, child.name))
            if draw.sometimes():
                ops.append(draw.choice(IN_PLACE_OPS + VIEW_OPS + PLAIN_OPS))
    ops += _some_ops(draw, 0 if children else 1)
    if draw.sometimes(12):
        ops.append("detach" if children and draw.sometimes(6) else "detach_half")
    return tuple(ops)


def _some_ops(draw: _Draw, least: int) -> list[Op]:
    return [draw.choice(draw.choice(OPS)) for _ in range(draw.randint(least, 3 if draw.rich else 2))]


def _call(draw: _Draw, name: str) -> Call:
    use = draw.choice(USES) if draw.sometimes(3) else "first"
    kinds = ("reentrant", "reentrant", "plain") if draw.reentrant else ("plain",)
    kind = draw.choice(kinds) if draw.sometimes(4 if draw.reentrant else 6) else None
    return Call(name, use, kind, no_grad=draw.sometimes(20), keyword=kind is None and draw.sometimes(10))


def _policy(draw: _Draw, root: Block, names: list[str]) -> Policy:
    world = draw.choice(WORLDS)
    paths = [path for path, _ in blocks_of(root) if path and not draw.sometimes()]
    wraps = [Wrap((path,), _reshard(draw, world)) for path in paths]
    if len(wraps) > 1 and draw.sometimes(6):
        wraps[:2] = [Wrap((*wraps[0].paths, *wraps[1].paths), wraps[0].reshard)]
    covered = names and all(name.startswith(tuple(f"{path}." for path in paths)) for name in names)
    if whole := not covered or not draw.sometimes():
        wraps.append(Wrap(("",), _reshard(draw, world)))
    low = whole and draw.sometimes(8)
    depth = draw.choice((0, 1, 2, 3)) if draw.sometimes(2) else None
    return Policy(
        world=world,
        shared_memory=draw.sometimes(3),
        wraps=tuple(wraps),
        depth=depth,
        budget=draw.choice((100_000, 8_000, 4_000, 1_500)) if depth is None and draw.sometimes() else None,
        lists=draw.choice(("next", "all", "reversed")) if draw.sometimes(6) else None,
        late=draw.randrange(world) if draw.sometimes(2) else None,
        param_dtype=draw.choice(("float32", "bfloat16")) if low else None,
        reduce_dtype=draw.choice((None, "float32", "float64")) if low or (whole and draw.sometimes(12)) else None,
        reshard_after_backward=not draw.sometimes(12),
        dim_1=draw.sometimes(8),
        hsdp=world == 4 and draw.sometimes(3),
        hooks_first=draw.sometimes(2),
        buffers=draw.choice((2, 3)) if draw.sometimes(6) else 1,
        reset=not draw.sometimes(6),
    )


def _reshard(draw: _Draw, world: int) -> bool | int | None:
    sizes = (size for size in (1, 2) if world % size == 0)
    return draw.choice((True, False, False, *sizes)) if draw.sometimes(3) else None


def _step(draw: _Draw, policy: Policy, names: list[str]) -> Step:
    micros = [_micro(draw, policy) for _ in range(1 + draw.sometimes())]
    fails = any(micro.fail for micro in micros)
    synchronize = not fails and draw.sometimes(6)
    for index, micro in enumerate(micros):
        sync = fails or index == len(micros) - 1 or micro.sync
        micros[index] = replace(micro, sync=sync and not synchronize)
    zero = draw.choice(("zero", "keep")) if draw.sometimes() else "none"
    toggle = tuple(name for name in names if draw.sometimes(3)) if draw.sometimes(6) else ()
    return Step(tuple(micros), not draw.sometimes(), zero, toggle, draw.sometimes(5), synchronize)


def _micro(draw: _Draw, policy: Policy) -> Micro:
    if not draw.sometimes(2):
        return Micro(inputs=draw.sometimes(3))
    inputs = draw.sometimes(2)
    return Micro(
        forwards=draw.choice((2, 3)) if draw.sometimes() else 1,
        order=draw.choice(("each", "reversed", "together")),
        sides=draw.choice(("sum", "first", "last", "only", "drop")),
        twice=draw.sometimes(6),
        by=draw.choice(("inputs", "penalty")) if inputs and not draw.reentrant and draw.sometimes(2) else "backward",
        inputs=inputs,
        change=tuple(draw.choice((*IN_PLACE_OPS[:4], *VIEW_OPS, *PLAIN_OPS)) for _ in range(draw.randint(0, 2))),
        before=_acts(draw, policy),
        between=_acts(draw, policy),
        fail=draw.choice(("forward", "backward")) if draw.sometimes(5) else None,
        sync=not draw.sometimes(3),
    )


def _acts(draw: _Draw, policy: Policy) -> tuple[Act, ...]:
    if not draw.sometimes(3 if draw.rich else 6):
        return ()
    if draw.sometimes(2):
        return (Act(draw.choice(FREE_ACTS)),)
    return (Act(draw.choice(SHARDED_ACTS), draw.choice([path for wrap in policy.wraps for path in wrap.paths])),)
