"""Loading of the `module:attribute` entrypoints of a job: workflows, tasks, functions,
environments.

User modules are imported again if one of their files was edited since the last import; modules that
a job ships (`troupe.functions.shipped`) never change.
"""

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

from troupe.functions import shipped
from troupe.outcomes import (
    NotFiniteError,
    described,
    finite_number,
    safe_text,
    shown,
    type_name,
    utf8_text,
)
from troupe.workflow.agent import Agents
from troupe.workflow.errors import EntrypointError, WorkflowError
from troupe.workflow.tools import Tools

# Modules of the service itself, which are never imported again.
_NOT_RELOADED: Final = frozenset({"troupe", "services", "testbed", "__main__", "__mp_main__"})
_INSTALLED: Final = ("site-packages", "dist-packages", sysconfig.get_paths()["stdlib"])

# Modification times of files, in nanoseconds, when their modules were imported.
_mtimes: dict[str, int] = {}
_NEVER: Final = -1
_lock = threading.Lock()
# When `_mtimes` was last complete, in nanoseconds of file times.
_complete_at = time.time_ns()


def forget_edited() -> list[str]:
    """Remove all user modules from `sys.modules` if one of their files was edited.

    All are removed, since any may have imported something from the edited module; modules that
    another thread is importing are removed next time. Return the names. Objects of the old modules
    that jobs hold stay valid.
    """
    with _lock:
        _look_again()  # a file may also be new
        users = dict(_users_modules())
        if not any(map(_edited, users.values())):
            return []
        _mtimes.clear()
        for name in _being_imported() & users.keys():
            _mtimes[users.pop(name)] = _NEVER
        for name in users:
            sys.modules.pop(name, None)
        return sorted(users)


def _look_again() -> None:
    """Make importlib list directories again, even while other threads import."""
    while True:
        try:
            importlib.invalidate_caches()
        except (RuntimeError, KeyError):
            continue  # a concurrent import changed importlib's table of directories
        return


def remember_files() -> None:
    """Record the modification times of the files of all imported user modules."""
    global _complete_at
    with _lock:
        _complete_at = time.time_ns()
        for _, path in _users_modules():
            _mtimes.setdefault(path, _mtime(path))


def _edited(path: str) -> bool:
    now = _mtime(path)
    known = _mtimes.get(path)
    # A module that was imported inside a function has no recorded time yet.
    return now > _complete_at if known is None else now != known


def _being_imported() -> set[str]:
    """Return the modules that are being imported, and their packages, which the imports need."""
    names: set[str] = set()
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            parts = name.split(".")
            names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return names


def _users_modules() -> Iterator[tuple[str, str]]:
    """Yield names and files of imported modules that are neither installed nor Troupe's own."""
    for name, module in sys.modules.copy().items():  # other threads may import meanwhile
        path = getattr(module, "__file__", None)
        if path and is_users_module(name, path):
            yield name, path


def is_users_module(name: str, path: str | None = None) -> bool:
    """Return whether the module is neither installed nor Troupe's own. `path`: its file; default:
    as it is imported."""
    path = path or getattr(sys.modules.get(name), "__file__", None)
    return (
        bool(path)
        and name.partition(".")[0] not in _NOT_RELOADED
        and not name.startswith(shipped.PREFIX)
        and not any(part in str(path) for part in _INSTALLED)
    )


def _mtime(path: str) -> int:
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0  # removed, which counts as an edit


class Query(Mapping[str, Any]):
    """One query of a job: a read-only mapping over the task's data, with id, split and index.

    The trajectories of a group share `data`: treat it as constant.
    """

    __slots__ = ("answer", "data", "id", "index", "metrics", "scores", "split")

    def __init__(self, id: str, split: str, index: int, data: Mapping[str, Any]) -> None:
        self.id = id
        """Name of the query within its step, such as `q17`."""
        self.split = split
        """`train` or `held_out`."""
        self.index = index
        """Index of the item in the split."""
        self.data = data
        """The task's data at this index."""
        self.metrics: dict[str, float] = {}
        """Values that this trajectory logged; see `log`."""
        self.answer: str | None = None
        """This trajectory's vote in evaluations (maj@k), if the workflow sets it."""
        self.scores: dict[str, float] = {}
        """Mean over the agents of each reward function's results, as `rewards.<name>`."""

    def log(self, **values: float) -> None:
        """Log numbers about this trajectory; the job reports their means as metrics.

        Raises `WorkflowError` for a value that is not a finite number.
        """
        self.metrics.update(_finite(values))

    def logged(self) -> dict[str, float]:
        """Return the logged values and the `scores`, checked again, since the workflow may have
        written into `metrics` itself. Raises `WorkflowError`."""
        return {**_finite(self.scores), **_finite(self.metrics)}

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


def _finite(values: Any) -> dict[str, float]:
    """Return named values as finite floats. Raises `WorkflowError`."""
    if not isinstance(values, Mapping):
        raise WorkflowError(
            f"query.metrics is a {type_name(values)}, not a dict",
            field="query.metrics",
            remedy="Log numbers with `query.log(name=number)`.",
        )
    found = {}
    for key, value in values.items():
        name = utf8_text(key if isinstance(key, str) else shown(key))
        try:
            found[name] = finite_number(value)
        except NotFiniteError as error:
            raise WorkflowError(
                f"query.log({safe_text(name)}=...) needs a finite number",
                field=name,
                value=value,
                remedy="Log numbers only.",
            ) from error
    return found


Workflow = Callable[[Query, Agents, Tools], Awaitable[Mapping[str, float] | None]]
"""A user's workflow: plays one query and returns rewards per agent, or None for no rewards of its
own."""


class Tasks(Protocol):
    """One split of a job's queries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


def add_working_directory() -> None:
    """Make modules of the working directory importable, as `python -m` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def load_module(name: str, field: str, value: str) -> Any:
    """Import a module from the files that the job ships, if they contain it. Import it again if
    user files were edited since the last import.

    Raises `EntrypointError` with `field` and `value`.
    """
    forget_edited()
    code = shipped.current()
    name_here = code.qualified(name) if code else name
    try:
        module = importlib.import_module(name_here)
        remember_files()
    except BaseException as error:  # user code
        missing = isinstance(error, ModuleNotFoundError) and (
            name_here == error.name or name_here.startswith(f"{error.name}.")
        )
        raise EntrypointError(
            f"module '{name}' does not exist here"
            if missing
            else f"importing '{name}' failed: {described(error)}",
            field=field,
            value=value,
            remedy="Add its directory to PYTHONPATH of the services, or send it with "
            "the job (`code.include`)."
            if missing
            else f"Make `python -c 'import {name}'` work where the services run.",
        ) from error
    return module


def load_attribute(entrypoint: str, field: str) -> Any:
    """Return the object that `package.module:attribute` names. Raises `EntrypointError` with
    `field`."""
    module_name, _, attribute = entrypoint.partition(":")
    if not module_name or not attribute:
        raise EntrypointError(
            "this names nothing to import",
            field=field,
            value=entrypoint,
            remedy="Write `package.module:attribute`.",
        )
    module = load_module(module_name, field, entrypoint)
    try:
        return getattr(module, attribute)
    except BaseException as error:  # a module may define `__getattr__`
        missing = isinstance(error, AttributeError)
        raise EntrypointError(
            f"module '{module_name}' has no attribute '{attribute}'"
            + ("" if missing else f": {described(error)}"),
            field=field,
            value=entrypoint,
            remedy="Name a function or class defined at the module's top level.",
        ) from (None if missing else error)


def load_workflow(entrypoint: str, field: str = "workflow") -> Workflow:
    """Return the workflow of a job: an async function of (query, agents, tools).

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
) -> tuple[Tasks, int]:
    """Return one split of a job's tasks, and their number. Raises `EntrypointError` unless it is a
    non-empty sequence."""
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
    except BaseException as error:  # also SystemExit: user code may parse a command line
        raise EntrypointError(
            f"{source}(split={split!r}, ...) failed: {described(error)}",
            field=field,
            value=source,
            remedy="Check `tasks.args`; the result must have `__len__` and `__getitem__(index)`.",
        ) from error
    if length < 1 or not indexed:
        raise EntrypointError(
            f"split '{split}' has {length} queries",
            field=field,
            value=source,
            remedy="Return an object with at least one item and `__getitem__(index) -> dict`.",
        )
    return tasks, length
