"""Installs shardkit in a process whose environment has SHARDKIT_INSTALL set, when the program imports torch's FSDP.

`arm` is called at the start of Python by `shardkit_autoinstall.pth`, which an installation of shardkit-core puts into
site-packages. With `python -S`, and where shardkit is only on PYTHONPATH, nothing runs.

Nothing here imports torch: a process that does not use it only pays for this file. `shardkit.core` is imported after
the program has imported `torch.distributed.fsdp`, at the end of the outermost import of torch that led there. Earlier,
parts of torch that shardkit imports may be half-initialised (`torch.distributed.checkpoint` and `torch._dynamo` import
FSDP during their own import).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

VARIABLE = "SHARDKIT_INSTALL"
FSDP2 = "1"
FSDP1 = "fsdp1"
NAMES_GROUP = "shardkit.stock_names"
"""Entry points of packages that have names of torch's FSDP to put in place."""
NEEDS_FSDP1 = (
    "needs the package shardkit-legacy-fsdp-compat, which is not installed; run: pip install "
    "./packages/legacy_fsdp_compat in a clone of shardkit"
)
_RECORDS = "SHARDKIT_RUN_RECORDS"
_FSDP = "torch.distributed.fsdp"
_CORE = "shardkit.core"


def arm() -> None:
    """Makes this process install shardkit as soon as it has imported `torch.distributed.fsdp`. Idempotent."""
    if _FSDP in sys.modules:
        _install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of each outermost import of torch or `shardkit.core`, to see when it ends."""

    def __init__(self) -> None:
        self.importing = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders find. None for modules inside another import of torch, and for all others."""
        if getattr(self.importing, "name", None) or not (fullname == _CORE or fullname.partition(".")[0] == "torch"):
            return None
        for finder in list(sys.meta_path):
            find: Callable[..., importlib.machinery.ModuleSpec | None] | None = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """The loader of one module; the module gets its own loader back when it begins to run."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module; at its end, installs shardkit if torch's FSDP has been imported."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._finder.importing.name = module.__name__
        try:
            self._loader.exec_module(module)
        finally:
            self._finder.importing.name = None
        if _FSDP in sys.modules and self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            try:
                _install()
            except BaseException:
                sys.meta_path.insert(0, self._finder)  # the program must not continue with torch's engine
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _install() -> None:
    value = os.environ.get(VARIABLE, "")
    if value not in (FSDP1, FSDP2):
        raise RuntimeError(f"{VARIABLE} is {value!r}; expected 1, fsdp1 (FSDP1's names as well), or 0")
    try:
        install = importlib.import_module(f"{_CORE}.install").install
    except ImportError as error:  # not an ImportError here: many programs take that to mean that torch has no FSDP
        raise RuntimeError(
            f"{VARIABLE}={value} asks for shardkit, but {sys.executable} cannot import it ({error}); install "
            "shardkit-core there, or unset the variable"
        ) from error
    install(fsdp1=value == FSDP1)
