"""Finds out from a pickle's opcodes how much memory it would take, before it is unpickled.

A few hundred kilobytes can make an unpickler allocate gigabytes: with numbers in the memo, containers that are copied
repeatedly, buffers of a given length, or tuples that contain each other and are hashed. Unpicklers that refuse to run
code do not refuse these.
"""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Sequence
from typing import Any

_FREE_BYTES = 40 * 2**20
_PER_BYTE = 30
"""A pickle of n bytes may make objects of about _FREE_BYTES + _PER_BYTE * n: usual ones make up to 15 for one."""

_NEW_BYTES = {
    "EMPTY_SET": 216,
    "EMPTY_DICT": 64,
    "EMPTY_LIST": 56,
    "BININT1": 8,
    "NONE": 0,
    "NEWTRUE": 0,
    "NEWFALSE": 0,
}
_ITEM_BYTES = {"APPEND": 8, "APPENDS": 8, "SETITEM": 50, "SETITEMS": 50, "ADDITEMS": 50, "BUILD": 50}
_CALLS = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ", "INST"}
_OPERANDS = {
    one.name: (one.stack_before.index(mark), True) if mark in one.stack_before else (len(one.stack_before), False)
    for one in pickletools.opcodes
    for mark in [pickletools.markobject]
}
"""The number of values that an opcode takes from the stack, and whether it also takes those above the last mark."""

_SIZED_MODULES = {"torch", "torch.storage", "torch._tensor", "torch.cuda", "torch.sparse", "torch.cuda.sparse"}
_MAX_UNFOLDED = 2**20


class _Value:
    """Something on the unpickler's stack.

    Attributes:
        nbytes: bytes of a copy of it, without copies of its contents.
        unfolded: for a tuple, the number of its elements and of theirs, each counted at every place.
        parts: for a tuple, its elements.
        name: for a global, "module name".
        is_number: whether it is an int.
    """

    __slots__ = ("is_number", "name", "nbytes", "parts", "unfolded")

    def __init__(self, nbytes: int, name: str = "", is_number: bool = False) -> None:
        self.nbytes, self.name, self.is_number = nbytes, name, is_number
        self.unfolded = 1
        self.parts: Sequence[_Value] = ()


def check_pickle(data: bytes) -> None:
    """Rejects pickles whose objects would take far more memory than the pickle, and opcodes that skip `find_class`.

    Raises:
        pickle.UnpicklingError: for these. A damaged pickle raises the errors of `pickletools.genops`, or others.
    """
    limit, taken = _FREE_BYTES + _PER_BYTE * len(data), 0
    stack: list[_Value] = []
    marks: list[int] = []  # how long the stack was
    memo: dict[int, _Value] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            number = len(memo) if name == "MEMOIZE" else int(argument or 0)
            if number > len(data):
                raise pickle.UnpicklingError(f"memo number {number} in a pickle of {len(data)} bytes")
            memo[number] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument or 0)])
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MARK":
            marks.append(len(stack))
        elif name.startswith("EXT"):
            raise pickle.UnpicklingError(f"{name} is not allowed in a checkpoint")
        else:
            taken += _run(name, opcode, argument, stack, marks)
            if taken > limit:
                raise pickle.UnpicklingError(
                    f"a pickle of {len(data)} bytes whose objects would take more than {limit} bytes"
                )


def _run(name: str, opcode: Any, argument: Any, stack: list[_Value], marks: list[int]) -> int:
    """Runs an opcode that neither marks nor memoizes; returns the bytes it takes."""
    below, has_mark = _OPERANDS[name]
    at = (marks.pop() if has_mark else len(stack)) - below
    popped = stack[at:]
    del stack[at:]
    if name in _ITEM_BYTES:
        growth = _ITEM_BYTES[name] * max(1, len(popped) - 1) + (popped[-1].nbytes if name == "BUILD" else 0)
        popped[0].nbytes += growth
        stack.append(popped[0])
        return growth
    if name in _CALLS:
        value = _called(name, str(argument), popped)
    elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        value = _Value(40 + 8 * len(popped))
        value.parts, value.unfolded = popped, 1 + sum([one.unfolded for one in popped])
        if value.unfolded > _MAX_UNFOLDED:  # hashing it would take that long
            raise pickle.UnpicklingError("tuples that contain each other too often")
    elif name == "STACK_GLOBAL":
        value = _Value(0, " ".join(one.name for one in popped))
    elif opcode.stack_after:
        text = argument if isinstance(argument, str) else ""
        nbytes = _NEW_BYTES.get(name)
        if nbytes is None:
            nbytes = 40 + 4 * len(argument) if isinstance(argument, str | bytes | bytearray) else 40
        value = _Value(nbytes, text, isinstance(argument, int))
    else:
        return 0
    stack.append(value)
    return value.nbytes


def _called(name: str, argument: str, popped: list[_Value]) -> _Value:
    """The result of calling a class or function: at most a copy of everything in its arguments.

    Functions that rebuild tensors call others, which are among their arguments.
    """
    callee = argument if name == "INST" else popped[0].name
    given = popped if name == "INST" else popped[1:]
    for one in given:  # grows during the loop, to at most _MAX_UNFOLDED
        given += one.parts
    called = {callee, *(one.name for one in given)}
    if "builtins bytearray" in called and any(one.is_number for one in given):
        raise pickle.UnpicklingError("a bytearray of a given length")
    module, _, kind = callee.rpartition(" ")
    if module in _SIZED_MODULES and kind.endswith(("Tensor", "Storage")):
        raise pickle.UnpicklingError(f"{module}.{kind} is called, which allocates memory that the file does not fill")
    return _Value(64 + sum(8 + one.nbytes for one in given))
