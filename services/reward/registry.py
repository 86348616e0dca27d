"""The functions that can be invoked, by name and version, and what became of their calls."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from troupe.rpc import AlreadyExists, InvalidArgument, NotFound
from troupe.v1 import reward_pb2 as pb

_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(eq=False)
class Function:
    """A registered function with its counts."""

    spec: pb.FunctionSpec
    # Times it was registered: with each, workers look anew whether its code was edited.
    registrations: int = 0
    invocations: int = 0
    errors: int = 0
    running: int = 0
    queued: int = 0
    run_seconds: float = 0.0

    @property
    def key(self) -> str:
        """Unique among functions."""
        return f"{self.spec.name}@{self.spec.version}"

    @property
    def label(self) -> str:
        """The name without its job: what metrics are grouped by."""
        return self.spec.name.rpartition("/")[2]

    @property
    def full(self) -> bool:
        """Whether as many of its calls run as may."""
        limit = self.spec.max_concurrency
        return limit > 0 and self.running >= limit

    def status(self) -> pb.FunctionStatus:
        """The counts as a message."""
        return pb.FunctionStatus(
            function=self.spec,
            invocations=self.invocations,
            errors=self.errors,
            running=self.running,
            queued=self.queued,
            mean_seconds=self.run_seconds / self.invocations if self.invocations else 0.0,
        )


class Registry:
    """All functions of this process; rollout workers register them anew after a restart."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], Function] = {}

    def __iter__(self) -> Iterator[Function]:
        return iter(self._functions.values())

    def register(self, spec: pb.FunctionSpec) -> Function:
        """Make `spec` known; repeating it changes nothing.

        Raises `InvalidArgument` for a field that cannot work and `AlreadyExists` when the name
        and version stand for something else.
        """
        _check(spec)
        known = self._functions.get((spec.name, spec.version))
        if known is None:
            kept = pb.FunctionSpec()
            kept.CopyFrom(spec)
            known = self._functions[spec.name, spec.version] = Function(kept)
        elif known.spec != spec:
            raise AlreadyExists(
                f"version {spec.version!r} of this function is {known.spec.entrypoint} with "
                "other settings",
                kind="function_differs",
                field="function.name",
                value=spec.name,
                remedy="Register changed functions under a new version.",
            )
        known.registrations += 1
        return known

    def find(self, name: str, version: str) -> Function:
        """The function; raises `NotFound` (kind "function_not_found") to be registered again."""
        function = self._functions.get((name, version))
        if function is None:
            raise NotFound(
                f"no function of version {version!r} is registered here",
                kind="function_not_found",
                field="name",
                value=name,
                remedy="Register it (again: this service forgets its functions in a restart).",
            )
        return function


def _check(spec: pb.FunctionSpec) -> None:
    def refuse(field: str, value: object, message: str, remedy: str) -> None:
        raise InvalidArgument(message, field=f"function.{field}", value=value, remedy=remedy)

    if not spec.name:
        refuse("name", "", "is empty", "Name the function.")
    if not _ENTRYPOINT.fullmatch(spec.entrypoint):
        refuse(
            "entrypoint",
            spec.entrypoint,
            "is not of the form package.module:attribute",
            "Write for example my_project.rewards:exact_match.",
        )
    if not (math.isfinite(spec.timeout_seconds) and spec.timeout_seconds > 0):
        refuse(
            "timeout_seconds",
            spec.timeout_seconds,
            "is not a positive number",
            "Give every function a timeout.",
        )
    for field in ("memory_mib", "max_concurrency"):
        if getattr(spec, field) < 0:
            refuse(field, getattr(spec, field), "is negative", "0 means no limit.")
