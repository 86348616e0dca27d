"""Turns the `module:attribute` entrypoints of a job into the objects they name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from troupe.outcomes import described
from troupe.workflow.agents import Agents
from troupe.workflow.errors import EntrypointError
from troupe.workflow.freshness import forget_edited, remember_files
from troupe.workflow.query import Query
from troupe.workflow.tools import Tools

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
