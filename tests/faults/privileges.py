"""Root may write to directories whose permissions say no. Here it gives that up for a while, and stays who it is.

Another user could not even read Python's own files where they lie in root's home.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x20080522
_OVERRIDE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH; see capabilities(7)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


@contextlib.contextmanager
def permissions_hold() -> Iterator[None]:
    """For this thread, and those that it starts, permissions of files and directories are enforced."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    _check(libc.capget(ctypes.byref(header), sets))
    before = sets[0].effective
    sets[0].effective = before & ~_OVERRIDE
    _check(libc.capset(ctypes.byref(header), sets))
    try:
        yield
    finally:
        sets[0].effective = before
        _check(libc.capset(ctypes.byref(header), sets))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
