"""Opens environments by name, and turns what their own code raises into faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from troupe.outcomes import Interruption, described, traceback_text
from troupe.workflow.environments.errors import EnvironmentFault
from troupe.workflow.environments.interface import Environment
from troupe.workflow.errors import EntrypointError, WorkflowError
from troupe.workflow.loading import load_attribute

T = TypeVar("T")


def open_environment(
    entrypoint: str, args: Mapping[str, Any], field: str = "environment"
) -> Environment:
    """A new environment: `package.module:attribute` called with `args`.

    Raises `EntrypointError`; `EnvironmentFault` when the environment's own code raises.
    """
    make = load_attribute(entrypoint, field)
    if not callable(make):
        raise EntrypointError(
            f"is a {type(make).__name__}, which makes no environments",
            field=field,
            value=entrypoint,
            remedy="Name a class or a function that returns an `Environment`.",
        )
    made = guarded(entrypoint, lambda: make(**args))
    if not isinstance(made, Environment):
        raise EntrypointError(
            f"made a {type(made).__name__}, not an `Environment`",
            field=field,
            value=entrypoint,
            remedy="Derive it from `troupe.workflow.environments.Environment`, or use an adapter.",
        )
    return made


def guarded(name: str, call: Callable[[], T]) -> T:
    """What an environment's own code returns. Whatever it raises, but for errors of a workflow,
    becomes an `EnvironmentFault` with the last lines of its traceback."""
    try:
        return call()
    except WorkflowError:
        raise
    except Interruption:
        raise
    except BaseException as error:
        raise raised_fault(name, error) from error


def raised_fault(name: str, error: BaseException) -> EnvironmentFault:
    """The fault of an environment whose code raised `error`."""
    return EnvironmentFault(
        f"environment {name} raised {described(error)}",
        reason="raised",
        environment=name,
        remedy="Mend the environment if it always does; `troupe environment check` tries it.",
        traceback=traceback_text(error),
    )
