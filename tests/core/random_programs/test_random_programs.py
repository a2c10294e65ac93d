"""Random training programs on ranks have the gradients of a single process, or raise an error that names a module.

``python -m tests.core.random_programs --count 20000 --seed 1`` runs more of them.
"""

from typing import Any

from tests.core.random_programs.program import Act, Block, Call, Micro, Op, Policy, Program, Side, Step, Wrap
from tests.core.random_programs.ranks import run_programs
from tests.core.random_programs.strategies import drawn_program


def _assert_good(named: dict[str, Program], kinds: tuple[str, ...]) -> None:
    names = {program: name for name, program in named.items()}
    bad = [
        f"{names[program]}: {outcome.kind}: {outcome.message}\n{program!r}"
        for program, outcome in run_programs([*names])
        if outcome.kind not in kinds
    ]
    assert not bad, f"{len(bad)} programs, the shortest is\n{min(bad, key=len)}"


def test_programs_drawn_from_a_seed() -> None:
    """90 different ones, of which a third raises in one process, too; a campaign at night runs more."""
    seeds = [f"suite/{number}" for number in range(90)]
    _assert_good({seed: drawn_program(seed) for seed in seeds}, ("equal", "refused", "unusable"))


# -- findings of the campaigns, one of each kind: reduced, and named after the program ---------------------------------

LINEAR = Block("beta", ops=("linear",))
ALPHA = (Wrap(("alpha",)), Wrap(("",)))
BOTH = (Wrap(("alpha",)), Wrap(("beta",)), Wrap(("",)))


def _root(*ops: Op, policy: Policy = Program.policy, steps: tuple[Step, ...] = Program.steps, **fields: Any) -> Program:
    """``fields`` are those of the root; ``blocks`` are its children."""
    return Program(Block(ops=ops, **fields), policy, steps)


def _chain(first: Block, *between: str, **fields: Any) -> Program:
    """Two sharded blocks, one after the other; rank 1 sends its shards late."""
    ops = ("linear", Call("alpha"), *between, Call("beta"), "linear")
    return _root(*ops, blocks=(first, LINEAR), **{"policy": Policy(wraps=BOTH, late=1), **fields})


def _only(**fields: Any) -> tuple[Step, ...]:
    """A step of one micro-batch."""
    return (Step((Micro(**fields),)),)


def _once(**fields: Any) -> tuple[Step, ...]:
    return (*_only(**fields), Step())


SIDE_OUTPUT = (Block("alpha", ops=("linear", Side(), "tanh")),)

FOUND = {
    "a view, changed in place by the caller": _chain(Block("alpha", ops=("linear", "view")), "add_"),
    "a view, changed in place by a hook": _chain(
        Block("alpha", ops=("linear", "view"), hooks=("in_place",)),
        policy=Policy(wraps=BOTH, late=1, hooks_first=False),
    ),
    "a recomputation with explicit lists, whose output is detached, within a budget": _root(
        *("table", Call("beta", checkpoint="plain")),
        blocks=(
            Block(
                "beta",
                ops=("trap", Call("alpha"), Call("beta", no_grad=True), "linear", "detach"),
                blocks=(Block("alpha", ops=(Side(),)), Block("beta")),
            ),
        ),
        policy=Policy(
            world=4, wraps=(Wrap(("beta",)), Wrap(("beta.beta",)), Wrap(("",))), budget=8000, lists="reversed"
        ),
    ),
    "a view from the root, changed in place": _root("linear", "expand", steps=_once(change=("add_",))),
    "the side output of a root whose output has no parameter": _root(Side()),
    "the output of the root kept on the module": _root("linear", form="attribute"),
    "backward of a side output of the root's group, then of its output": _root(
        *("linear", Call("alpha")),
        blocks=(Block("alpha", ops=(Side(), "trap")),),
        steps=(Step((Micro(), Micro(sides="first"))),),
    ),
    "a side output that is read while its gather is under way": _root(
        *("bias", Call("alpha")),
        blocks=(Block("alpha", ops=("view", Call("beta"), "table", "double"), blocks=(Block("beta", ops=(Side(),)),)),),
        policy=Policy(wraps=(Wrap(("alpha.beta",)), Wrap(("",))), late=1),
    ),
    "backward of a side output alone": _root(
        *("linear", Call("alpha")), blocks=SIDE_OUTPUT, policy=Policy(wraps=ALPHA, late=1), steps=_only(sides="only")
    ),
    "backward of a side output first": _root(
        *("linear", Call("alpha")), blocks=SIDE_OUTPUT, policy=Policy(wraps=ALPHA), steps=_only(sides="first")
    ),
    "a side output under a checkpoint": _chain(
        Block(
            "alpha", ops=(Call("beta", checkpoint="plain"),), blocks=(Block("beta", ops=("linear", "tanh", Side())),)
        ),
        policy=Policy(wraps=(Wrap(("alpha.beta",)), Wrap(("",)))),
    ),
    "the penalty of a weight, backward of it last": _root(Side("weight"), steps=_once(sides="last", inputs=True)),
    "the penalty of a weight, backward of it twice": _root("gain", Side("weight"), steps=_once(twice=True)),
    "the penalty of a gradient, elementwise": _root(
        Call("alpha"), blocks=(Block("alpha", ops=("scale",)),), steps=_once(by="penalty", inputs=True)
    ),
    "the penalty of a gradient": _root(*("linear", "tanh"), steps=(Step((Micro(), Micro(by="penalty", inputs=True))),)),
    **{
        f"several forwards with side outputs, then their backwards, {order}": _root(
            *ops, steps=_only(forwards=3, order=order, inputs=True)
        )
        for order, ops in (("each", ("linear", Side())), ("reversed", (Side(place="closure"),)))
    },
    "backward of a side output that reads no parameter": _root(
        *("table", "linear", Call("alpha"), "spare"),
        blocks=(Block("alpha", ops=(Side(of="x", place="closure"), "mlp", "mlp")),),
        steps=(Step((Micro(order="each", sides="first"),), zero="keep"),),
    ),
    "a side output of a block without parameters, over several forwards": _root(
        *("linear", Call("alpha", use="twice")),
        blocks=(Block("alpha", ops=("trap", Side(of="x"))),),
        policy=Policy(wraps=ALPHA, late=1),
        steps=_only(forwards=3, sides="only", inputs=True),
    ),
    **{
        f"a {extra} kept on the module, read by the caller": _root(
            *("linear", Call("alpha", use="both", no_grad=True), Call("beta"), "linear"),
            blocks=(Block("alpha", ops=("linear",), form="attribute", extra=extra), LINEAR),
            policy=Policy(wraps=BOTH, depth=0, late=1),
        )
        for extra in ("weight", "weight_view")
    },
    "a view of the root's weight kept on it, read by the loop": _root(
        "linear", form="attribute", extra="weight_view", policy=Policy(wraps=(Wrap(("",), reshard=True),))
    ),
    "a view of a weight out of a block without grad, recomputed": _root(
        *("tanh", Call("alpha", checkpoint="plain")),
        blocks=(
            Block(
                "alpha",
                ops=("linear", Call("alpha"), Call("alpha", use="both", no_grad=True), "scale"),
                blocks=(Block("alpha", ops=("linear",), form="tuple", extra="weight_view"),),
            ),
        ),
        policy=Policy(wraps=(Wrap(("alpha",)), Wrap(("alpha.alpha",)))),
    ),
    "a side output in a closure": _root(Side(place="closure")),
    "a side output in a closure, of a module with two names": _root(
        *(Call("beta"), "bias"),
        blocks=(Block("alpha", ops=("transpose", Side(place="closure"))), Block("beta", same="alpha")),
        steps=_once(sides="first", inputs=True, between=(Act("no_grad"),)),
    ),
    "a parameter that comes out of a block without grad": _root(
        *("scale", Call("alpha", use="both", no_grad=True)),
        blocks=(Block("alpha", form="dataclass", extra="weight"),),
        policy=Policy(wraps=ALPHA),
    ),
    "a side output of a block, behind a root that keeps its parameters, backward of it last": _root(
        *("tanh", "linear", Call("alpha"), "scale"),
        blocks=(Block("alpha", ops=(Side(place="dict"),)),),
        policy=Policy(world=3, wraps=(Wrap(("alpha",), reshard=False), Wrap(("",), reshard=False)), depth=0),
        steps=(Step(), Step((Micro(order="reversed", sides="last", inputs=True),), update=False)),
    ),
    "a group of modules of which one never runs, in a reentrant checkpoint, backward twice": _root(
        Call("alpha", checkpoint="reentrant"),
        blocks=(Block("alpha", ops=("mlp",)), Block("gamma", form="list", extra="weight_view")),
        policy=Policy(wraps=(Wrap(("alpha", "gamma")), Wrap(("",)))),
        steps=_only(order="each", sides="only", twice=True, inputs=True),
    ),
    "a recomputation that ends inside of a wrapped module without parameters": _root(
        *("linear", Call("alpha"), Call("alpha", checkpoint="reentrant"), "trap"),
        blocks=(
            Block(
                "alpha",
                ops=(Call("first"), Call("second")),
                blocks=(Block("first"), Block("second", ops=("trap", Side("weight")))),
            ),
        ),
        policy=Policy(wraps=(Wrap(("alpha",)), Wrap(("alpha.first",)), Wrap(("alpha.second",)), Wrap(("",))), depth=0),
        steps=_once(forwards=2, order="reversed"),
    ),
    "side outputs of two forwards, whose recomputations read the root": _root(
        *(Call("alpha", checkpoint="plain"), "detach"),
        blocks=(Block("alpha", ops=("bias", Call("alpha")), blocks=(Block("alpha", ops=("mlp", Side())),)),),
        policy=Policy(wraps=(Wrap(("alpha.alpha",)), Wrap(("",)))),
        steps=_only(forwards=2, inputs=True),
    ),
    "half of an output that a hook changes in place": _chain(
        Block("alpha", ops=("linear",), form="tuple", extra="half", hooks=("in_place",))
    ),
    "all tensors moved while gradients wait": _chain(
        Block("alpha", ops=("linear", "bias")),
        steps=(Step((Micro(sync=False), Micro(before=(Act("moved"),)))), Step()),
    ),
    "an output in an object": _chain(Block("alpha", ops=("linear",), form="object")),
    "an output kept on the module": _chain(Block("alpha", ops=("linear",), form="attribute")),
    "an output kept on the module, with prefetch lists": _root(
        *("linear", Call("alpha")),
        blocks=(Block("alpha", ops=("scale",), form="attribute"),),
        policy=Policy(wraps=ALPHA, lists="reversed"),
    ),
    "an input changed in place": _chain(Block("alpha", ops=("add_", "linear"))),
    "a view of an input changed in place": _chain(Block("alpha", ops=("transpose", "tanh_", "linear"))),
    "an element of an input changed in place": _chain(Block("alpha", ops=("zero_column_", "linear"))),
    **{
        f"a parameter beside the output, in a {form}": _root(
            *("linear", Call("alpha", use="both"), Call("beta")),
            blocks=(Block("alpha", ops=("linear",), form=form, extra="weight"), LINEAR),
            policy=Policy(wraps=BOTH),
        )
        for form in ("tuple", "object", "closure", "attribute")
    },
}


def test_found_before() -> None:
    _assert_good(FOUND, ("equal", "refused"))
