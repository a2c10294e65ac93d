"""Takes out of a program the in-place changes that autograd refuses in one process: of values that are saved.

It follows one value through the model and asks of it at each place whether somebody has saved it.
"""

from __future__ import annotations

from dataclasses import replace

from tests.core.random_programs.program import IN_PLACE_OPS, Block, Call, Micro, Program, Side

_FRESH = {"linear", "bias", "scale", "gain", "mlp", "table", "square", "double", "detach_half", "clone", "trap", "hook"}
_SAVED = {"tanh", "tanh_"}
_WRAPPING_HOOKS = {"full_backward", "full_backward_pre"}


def without_forbidden_changes(program: Program) -> Program:
    """The program without in-place changes of tensors that are saved for backward."""
    walk = _Walk(program.root)
    saved = walk.run("", False)
    saved = walk.run("", False) or saved
    steps = tuple(
        replace(step, micros=tuple(_allowed_micro(micro, saved, walk.reentrant) for micro in step.micros))
        for step in program.steps
    )
    return replace(program, root=walk.rebuilt(program.root, ""), steps=steps)


def _allowed_micro(micro: Micro, saved: bool, reentrant: bool) -> Micro:
    change = []
    for op in micro.change:
        if op in IN_PLACE_OPS and saved:
            continue
        saved = _after(op, saved)
        change.append(op)
    by = "backward" if reentrant else micro.by
    return replace(micro, change=tuple(change), by=by)


def _after(op: str, saved: bool) -> bool:
    return op in _SAVED or (saved and op not in _FRESH)


class _Walk:
    """One way through the model, in order of execution."""

    def __init__(self, root: Block) -> None:
        self.blocks: dict[str, Block] = {}
        self.same: dict[str, str] = {}
        self.dropped: set[tuple[str, int]] = set()
        self.unhooked: set[str] = set()
        self.tame: set[tuple[str, int]] = set()
        self.plain: set[str] = set()
        self.reentrant = False
        self._note(root, "")

    def _note(self, block: Block, path: str) -> None:
        self.blocks[path] = block
        for child in block.blocks:
            below = _join(path, child.name)
            if child.same:
                self.same[below] = child.same
            else:
                self._note(child, below)

    def run(self, path: str, saved: bool) -> bool:
        """Whether the output is saved, if ``saved`` says it of the input."""
        block = self.blocks[path]
        wrapped = not _WRAPPING_HOOKS.isdisjoint(block.hooks)
        saved = saved or wrapped
        for index, op in enumerate(block.ops):
            if isinstance(op, Side):
                saved = saved or op.of != "weight"
            elif isinstance(op, Call):
                saved = self._call(path, index, op, saved)
            elif (path, index) not in self.dropped:
                if op in IN_PLACE_OPS and saved:
                    self.dropped.add((path, index))
                else:
                    saved = _after(op, saved)
        if block.extra == "half":
            saved = True
        if "in_place" in block.hooks and saved:
            self.unhooked.add(path)
        return wrapped or "capture" in block.hooks or (saved and "replace" not in block.hooks)

    def _call(self, path: str, index: int, op: Call, saved: bool) -> bool:
        below = _join(path, op.name)
        below = self.same.get(below, below)
        self.reentrant = self.reentrant or op.checkpoint == "reentrant"
        after = self.run(below, saved or op.checkpoint is not None) or op.checkpoint == "reentrant"
        child = self.blocks[below]
        if op.checkpoint == "reentrant" and child.extra in ("weight", "weight_view"):
            self.plain.add(below)  # torch hangs in backward on a parameter that comes out of such a checkpoint
        if op.use == "extra_in_place" and child.extra != "mean":
            self.tame.add((path, index))
        beside = child.extra not in (None, "int") and child.form != "tensor"
        if op.use == "none":
            return True
        return after and (op.use == "first" or (op.use in ("both", "extra_in_place") and not beside))

    def rebuilt(self, block: Block, path: str) -> Block:
        """The block without the dropped operations."""
        ops = tuple(
            replace(op, use="both") if isinstance(op, Call) and (path, index) in self.tame else op
            for index, op in enumerate(block.ops)
            if (path, index) not in self.dropped
        )
        hooks = tuple(hook for hook in block.hooks if hook != "in_place" or path not in self.unhooked)
        children = tuple(
            child if child.same else self.rebuilt(child, _join(path, child.name)) for child in block.blocks
        )
        extra = "mean" if path in self.plain else block.extra
        return replace(block, ops=ops, hooks=hooks, blocks=children, extra=extra)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
