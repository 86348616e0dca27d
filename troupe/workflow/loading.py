"""Turns the `module:attribute` entrypoints of a job into the objects they name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from troupe.outcomes import NotFiniteError, described, finite_number, safe_text, utf8_text
from troupe.workflow.agent import Agents
from troupe.workflow.errors import EntrypointError, WorkflowError
from troupe.workflow.tools import Tools

# Our own code is the service's, which an edit does not change.
_OURS: Final = frozenset({"troupe", "services", "__main__", "__mp_main__"})
_INSTALLED: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])

# Modification times of files, in nanoseconds, when their modules were imported.
_mtimes: dict[str, int] = {}
_NEVER: Final = -1
_lock = threading.Lock()
# When `_mtimes` was last complete; in nanoseconds as files have them.
_complete_at = time.time_ns()


def forget_edited() -> list[str]:
    """Drop the users' modules from `sys.modules` if a file of theirs was edited; which ones.

    All of them go, since any may have imported something from the edited one: save for those that
    another thread is importing, which go next time. What jobs hold of the old modules stays as it
    is.
    """
    with _lock:
        importlib.invalidate_caches()  # a file may also be new
        users = dict(_users_modules())
        if not any(map(_edited, users.values())):
            return []
        _mtimes.clear()
        for name in _being_imported() & users.keys():
            _mtimes[users.pop(name)] = _NEVER
        for name in users:
            sys.modules.pop(name, None)
        return sorted(users)


def remember_files() -> None:
    """Note when the files of all imported users' modules were written."""
    global _complete_at
    with _lock:
        _complete_at = time.time_ns()
        for _, path in _users_modules():
            _mtimes.setdefault(path, _mtime(path))


def _edited(path: str) -> bool:
    now = _mtime(path)
    known = _mtimes.get(path)
    # A module that a function imported is not known yet: its file may be newer than the module.
    return now > _complete_at if known is None else now != known


def _being_imported() -> set[str]:
    """Modules of imports under way, with their packages: without them an import fails."""
    names: set[str] = set()
    for name, module in sys.modules.copy().items():  # others import meanwhile
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            parts = name.split(".")
            names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return names


def _users_modules() -> Iterator[tuple[str, str]]:
    """Names and files of modules that people edit: not installed ones, not ours."""
    for name, module in sys.modules.copy().items():  # others import meanwhile
        path = getattr(module, "__file__", None)
        if path and name.partition(".")[0] not in _OURS and not any(p in path for p in _INSTALLED):
            yield name, path


def _mtime(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0  # removed, which is an edit too


class Query(Mapping[str, Any]):
    """A read-only mapping over the task's data, with its identity beside it.

    The trajectories of a group share `data`: treat it as constant.
    """

    __slots__ = ("data", "id", "index", "metrics", "split")

    def __init__(self, id: str, split: str, index: int, data: Mapping[str, Any]) -> None:
        self.id = id
        """Name of the query inside its step, e.g. `q17`."""
        self.split = split
        """`train` or `held_out`."""
        self.index = index
        """Which item of the split."""
        self.data = data
        """What the job's tasks returned for this index."""
        self.metrics: dict[str, float] = {}
        """What this trajectory logged; see `log`."""

    def log(self, **values: float) -> None:
        """Note numbers about this trajectory; the job reports their means as metrics.

        Raises `WorkflowError` for a value that is not a finite number.
        """
        for name, value in values.items():
            try:
                self.metrics[utf8_text(name)] = finite_number(value)
            except NotFiniteError as error:
                raise WorkflowError(
                    f"query.log({safe_text(name)}=...) needs a finite number",
                    field=name,
                    value=value,
                    remedy="Log numbers only.",
                ) from error

    def __getitem__(self, key: str) -> Any:
        try:
            return self.data[key]
        except KeyError:
            known = ", ".join(sorted(map(str, self.data)))
            raise KeyError(f"query {self.id} has no {key!r}; it has: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"Query({self.id}, {self.split}[{self.index}])"


Workflow = Callable[[Query, Agents, Tools], Awaitable[Mapping[str, float] | None]]
"""What users write: plays one query and returns rewards per agent (or None: others do)."""


class Tasks(Protocol):
    """One split of a job's queries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def look_here() -> None:
    """Look for modules in the working directory, too, as `python -m` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def load_module(name: str, field: str, value: str) -> Any:
    """Import a module, anew if its files were edited since they were imported.

    Raises `EntrypointError` that names `field` and the `value` that it has.
    """
    forget_edited()
    try:
        module = importlib.import_module(name)
        remember_files()
    except BaseException as error:  # a module may raise anything while it is imported
        missing = isinstance(error, ModuleNotFoundError) and (
            name == error.name or name.startswith(f"{error.name}.")
        )
        raise EntrypointError(
            f"module '{name}' does not exist here"
            if missing
            else f"importing '{name}' failed: {described(error)}",
            field=field,
            value=value,
            remedy="Put the directory that holds it on PYTHONPATH of the services."
            if missing
            else f"Make `python -c 'import {name}'` work where the services run.",
        ) from error
    return module


def load_attribute(entrypoint: str, field: str) -> Any:
    """What `package.module:attribute` names. Raises `EntrypointError` that names `field`."""
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise EntrypointError(
            "names nothing to import",
            field=field,
            value=entrypoint,
            remedy="Write `package.module:attribute`.",
        )
    module = load_module(module_name, field, entrypoint)
    try:
        return getattr(module, attribute)
    except BaseException as error:  # a module's own `__getattr__` may raise anything
        missing = isinstance(error, AttributeError)
        raise EntrypointError(
            f"module '{module_name}' has no attribute '{attribute}'"
            + ("" if missing else f": {described(error)}"),
            field=field,
            value=entrypoint,
            remedy="Name a function or class defined at the module's top level.",
        ) from (None if missing else error)


def load_workflow(entrypoint: str, field: str = "workflow") -> Workflow:
    """The workflow of a job: an async function of (query, agents, tools).

    Raises `EntrypointError` when it is not async or does not take these three arguments.
    """
    function = load_attribute(entrypoint, field)
    called = function if inspect.isroutine(function) else type(function).__call__
    if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)):
        raise EntrypointError(
            "a workflow must be an async function",
            field=field,
            value=entrypoint,
            remedy="Write `async def workflow(query, agents, tools): ...`.",
        )
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise EntrypointError(
            f"a workflow takes three arguments: {error}",
            field=field,
            value=entrypoint,
            remedy="Write `async def workflow(query, agents, tools): ...`.",
        ) from error
    workflow: Workflow = function
    return workflow


def load_tasks(
    source: str, split: str, args: Mapping[str, Any], field: str = "tasks.source"
) -> Tasks:
    """One split of a job's tasks. Raises `EntrypointError` when it is not a non-empty sequence."""
    return load_counted_tasks(source, split, args, field)[0]


def load_counted_tasks(
    source: str, split: str, args: Mapping[str, Any], field: str = "tasks.source"
) -> tuple[Tasks, int]:
    """As `load_tasks`, and how many they are."""
    factory = load_attribute(source, field)
    if not callable(factory):
        raise EntrypointError(
            f"is a {type(factory).__name__}, which cannot be called",
            field=field,
            value=source,
            remedy="Name a class or function that takes `split` and the fields of `tasks.args`.",
        )
    try:
        tasks = factory(split=split, **args)
        length = len(tasks)
        indexed = hasattr(tasks, "__getitem__")
    except BaseException as error:  # one that reads the command line exits
        raise EntrypointError(
            f"{source}(split={split!r}, ...) failed: {described(error)}",
            field=field,
            value=source,
            remedy="Check `tasks.args`; the result must have `__len__` and `__getitem__(index)`.",
        ) from error
    if length < 1 or not indexed:
        raise EntrypointError(
            f"split '{split}' has {length} queries to index",
            field=field,
            value=source,
            remedy="Return an object with at least one item and `__getitem__(index) -> dict`.",
        )
    return tasks, length
