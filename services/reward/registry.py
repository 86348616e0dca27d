"""The functions that can be invoked, by name and version, and what became of their calls."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from services.reward.sandbox import BUBBLEWRAP, LEVELS, Cage, find_bubblewrap
from troupe.rpc import AlreadyExists, InvalidArgument, NotFound
from troupe.scheduling.elastic import SpeedUp
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
    # How long its calls take with how many cores, learned from those that ran.
    curve: SpeedUp = field(init=False)

    # What its workers are confined to.
    cage: Cage = field(init=False)

    def __post_init__(self) -> None:
        self.curve = SpeedUp(self.spec.parallel_fraction)
        self.cage = Cage.of(self.spec)

    @property
    def cores(self) -> int:
        """The fewest cores that a call takes."""
        return self.spec.cores if self.spec.HasField("cores") else 1

    @property
    def elastic(self) -> bool:
        """Whether a call can make use of more cores than the fewest."""
        return self.spec.max_cores > max(1, self.cores)

    @property
    def levels(self) -> tuple[int, ...]:
        """Numbers of cores that a call of an elastic function may get."""
        return tuple(range(max(1, self.cores), self.spec.max_cores + 1))

    @property
    def room(self) -> int:
        """How many more of its calls may run at once."""
        limit = self.spec.max_concurrency
        return max(0, limit - self.running) if limit > 0 else sys.maxsize

    @property
    def key(self) -> str:
        """Unique among functions."""
        return f"{self.spec.name}@{self.spec.version}"

    @property
    def label(self) -> str:
        """The name without its job: what metrics are grouped by."""
        return self.spec.name.rpartition("/")[2]

    def status(self) -> pb.FunctionStatus:
        """The counts as a message."""
        serial, parallel = self.curve.line if self.invocations else (0.0, 0.0)
        return pb.FunctionStatus(
            function=self.spec,
            invocations=self.invocations,
            errors=self.errors,
            running=self.running,
            queued=self.queued,
            mean_seconds=self.run_seconds / self.invocations if self.invocations else 0.0,
            serial_seconds=serial,
            parallel_seconds=parallel,
        )


class Registry:
    """All functions of this process; rollout workers register them anew after a restart."""

    def __init__(self, cores: int = 0) -> None:
        """`cores`: as many as the host hands out; 0: it hands none out."""
        self._cores = cores
        self._functions: dict[tuple[str, str], Function] = {}

    def __iter__(self) -> Iterator[Function]:
        return iter(self._functions.values())

    def register(self, spec: pb.FunctionSpec) -> Function:
        """Make `spec` known; repeating it changes nothing.

        Raises `InvalidArgument` for a field that cannot work and `AlreadyExists` when the name
        and version stand for something else.
        """
        _check(spec, self._cores)
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


def _check(spec: pb.FunctionSpec, cores: int) -> None:
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
    if spec.sandbox and spec.sandbox not in LEVELS:
        refuse("sandbox", spec.sandbox, "is no sandbox", f"Known: {', '.join(LEVELS)}.")
    if spec.sandbox == BUBBLEWRAP:
        find_bubblewrap()
    if cores and spec.cores > cores:
        refuse(
            "cores",
            spec.cores,
            f"more than the {cores} cores of this host: no call could ever run",
            "Declare fewer, or start the reward service with a larger TROUPE_REWARD_CORES.",
        )
    if spec.max_cores and spec.max_cores < spec.cores:
        refuse("max_cores", spec.max_cores, f"less than cores ({spec.cores})", "0 means no more.")
    if not 0 <= spec.parallel_fraction <= 1:
        refuse(
            "parallel_fraction",
            spec.parallel_fraction,
            "is not within 0 .. 1",
            "It is the part of the time that more cores make shorter.",
        )
    for name in ("memory_mib", "max_concurrency", "cores", "max_cores", "processes", "disk_mib"):
        if getattr(spec, name) < 0:
            refuse(name, getattr(spec, name), "is negative", "0 means no limit.")
