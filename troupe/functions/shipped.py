"""Code that jobs ship (`code:`), imported so that different versions of a package can share a
process.

Module `team.flow` of the files with hash H is `troupe_code_H.team.flow` in `sys.modules`. An
`import team` in one of these files first searches the files of H: their builtins have their own
`__import__`, so this also holds for imports inside functions, in any thread. `qualified` finds code
that the job refers to by name while its job is `current`.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, all_suffixes
from pathlib import Path
from types import ModuleType
from typing import Any, Final

PREFIX: Final = "troupe_code_"
# Number of characters of the hash in module names.
_HASH_CHARS: Final = 16

_lock = threading.Lock()
_by_hash: dict[str, ShippedCode] = {}
_by_package: dict[str, ShippedCode] = {}
_current: ContextVar[ShippedCode | None] = ContextVar("shipped_code", default=None)


class ShippedCode:
    """The files of one hash in a folder, importable in this process (`open_shipped`)."""

    def __init__(self, sha256: str, folder: Path) -> None:
        self.folder = folder
        self.package = f"{PREFIX}{sha256[:_HASH_CHARS]}"
        """Name of the package in this process that contains all its modules."""
        self._names = frozenset(_top_level(folder))

    def qualified(self, module: str) -> str:
        """Return the name of a module in this process; its own name if the files do not contain
        it."""
        ours = module.partition(".")[0] in self._names
        return f"{self.package}.{module}" if ours else module

    def import_(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """Implement `__import__` for its modules."""
        top = name.partition(".")[0]
        if level or top not in self._names:
            return builtins.__import__(name, globals, locals, fromlist, level)
        found = builtins.__import__(f"{self.package}.{name}", globals, locals, fromlist or (), 0)
        # `import a.b` binds `a`, not the package that contains it here.
        return found if fromlist else sys.modules[f"{self.package}.{top}"]


def open_shipped(sha256: str, folder: Path) -> ShippedCode:
    """Return the code with this hash, whose files stay in `folder`. Repeatable."""
    with _lock:
        if not _by_hash:
            # Before the path finder, which also finds modules of a package by its `__path__`.
            sys.meta_path.insert(0, _Finder())
        if sha256 not in _by_hash:
            code = ShippedCode(sha256, folder)
            _by_hash[sha256] = _by_package[code.package] = code
        return _by_hash[sha256]


def opened(sha256: str | None) -> ShippedCode | None:
    """Return the code that `open_shipped` has opened here; None if it has not."""
    return _by_hash.get(sha256 or "")


def current() -> ShippedCode | None:
    """Return the code of the job for which the calling task or thread works, if the job ships
    code."""
    return _current.get()


@contextmanager
def using(code: ShippedCode | None) -> Iterator[None]:
    """Make `code` current, also in tasks and threads that are started inside."""
    token = _current.set(code)
    try:
        yield
    finally:
        _current.reset(token)


def _top_level(folder: Path) -> Iterator[str]:
    """Yield the names of the modules and packages in a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            if any(path.rglob("*.py")):
                yield path.name
        elif suffix := next((s for s in all_suffixes() if path.name.endswith(s)), None):
            yield path.name.removesuffix(suffix)


class _Finder(MetaPathFinder):
    """A finder of modules of shipped code by their names in this process."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if (code := _by_package.get(package)) is None:
            return None
        if not inner:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [str(code.folder)]
            return spec
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _ShippedLoader(fullname, found.loader.path, code)
        return found


class _ShippedLoader(SourceFileLoader):
    """A loader for a module of shipped code, which handles its `import` statements."""

    def __init__(self, fullname: str, path: str, code: ShippedCode) -> None:
        super().__init__(fullname, path)
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        own: dict[str, Any] = {**vars(builtins), "__import__": self._code.import_}
        module.__dict__["__builtins__"] = own
        super().exec_module(module)
