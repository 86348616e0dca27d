"""Registered functions: their declarations, counts, estimates and logs."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from services.reward.call import FunctionCall
from services.reward.resources import needs_of
from services.reward.sandboxes.kinds import PROVIDERS
from services.reward.sandboxes.profile import (
    BUBBLEWRAP,
    CONTAINER,
    OF_WORKERS,
    PROCESS,
    SandboxProfile,
)
from troupe.contracts import kinds
from troupe.functions.costs import costs_of
from troupe.functions.sources import SourceStore
from troupe.functions.validation import Refuse, check_costs
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc import AlreadyExists, InvalidArgument, NotFound
from troupe.scheduling.elastic import Discipline, SpeedUp
from troupe.v1 import reward_pb2 as reward_pb

REWARD: Final = "reward"
_KINDS: Final = ("", REWARD, "tool")
_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# JSON that the event loop parses: the schema of a function, and the arguments of a call whose size
# says how long it takes.
_SCHEMA_CHARACTERS: Final = 1 << 18
_MEASURED_CHARACTERS: Final = 1 << 22
# Cold starts that the percentiles are of.
_COLD_STARTS: Final = 1000
# A call is expected to take no less: run times are counted in multiples of that.
_LEAST_SECONDS: Final = 1e-6

# Of the logs of one function this much is kept; a longer line is cut into pieces of this length.
_KEPT_BYTES: Final = 256 * 2**10
_LINE_BYTES: Final = 4 * 2**10
# Lines kept of one output.
_LINES: Final = 200
# A listener that falls this many lines behind misses lines: functions do not wait for it.
_AHEAD: Final = 1000


class LineSplitter:
    """A splitter of printed output, which arrives in parts, into lines."""

    def __init__(self, line: Callable[[str], None]) -> None:
        """`line` is called with each line, without its end."""
        self._emit = line
        self._rest = b""

    def add(self, part: bytes) -> None:
        """Handle the printed `part`."""
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(whole) > _LINES:
            # Meanwhile other calls wait for the event loop.
            self._emit(f"({len(whole) - _LINES:,} lines left out)")
        for line in whole[-_LINES:]:
            self._cut(line)
        while len(self._rest) >= _LINE_BYTES:
            self._emit(_text(self._rest[:_LINE_BYTES]))
            self._rest = self._rest[_LINE_BYTES:]

    def end(self) -> None:
        """End the output: the rest is the last line."""
        if self._rest:
            self._emit(_text(self._rest))
            self._rest = b""

    def _cut(self, line: bytes) -> None:
        for start in range(0, max(1, len(line)), _LINE_BYTES):
            self._emit(_text(line[start : start + _LINE_BYTES]))


@dataclass
class Logs:
    """The last lines printed by one function's calls, and their listeners."""

    kept: deque[reward_pb.LogLine] = field(default_factory=deque)
    size: int = 0
    listeners: set[asyncio.Queue[reward_pb.LogLine | None]] = field(default_factory=set)

    def add(self, line: reward_pb.LogLine) -> None:
        """Keep `line`, drop the oldest beyond the limit, and pass it to the listeners."""
        line.seconds = time.time()
        self.kept.append(line)
        self.size += len(line.text)
        while self.size > _KEPT_BYTES:
            self.size -= len(self.kept.popleft().text)
        for queue in self.listeners:
            if not queue.full():
                queue.put_nowait(line)

    def close(self) -> None:
        """Tell the listeners that there will be no more lines."""
        for queue in self.listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)


@contextmanager
def listening(
    functions: Iterable[RegisteredFunction],
) -> Iterator[asyncio.Queue[reward_pb.LogLine | None]]:
    """Open a queue of all lines of `functions` from now on; None marks the end."""
    queue: asyncio.Queue[reward_pb.LogLine | None] = asyncio.Queue(_AHEAD)
    listened = [function.logs for function in functions]
    for logs in listened:
        logs.listeners.add(queue)
    try:
        yield queue
    finally:
        for logs in listened:
            logs.listeners.discard(queue)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")


@dataclass(eq=False)
class RegisteredFunction:
    """A registered function with its counts and estimates."""

    spec: reward_pb.FunctionSpec
    # Folder of its uploaded source; None: it is imported from the service's import path.
    source: Path | None = None
    # How often it was registered: each time, workers check again whether its code was edited.
    registrations: int = 0
    # `registrations` when a new worker could not import it.
    unimportable: int = -1
    invocations: int = 0
    errors: int = 0
    retried: int = 0
    queued: int = 0
    # Cores that its calls hold now.
    cores_held: int = 0
    run_seconds: float = 0.0
    cold_starts: int = 0
    logs: Logs = field(default_factory=Logs)
    # Run time by number of cores, learned from calls.
    curve: SpeedUp = field(init=False)
    # How its workers are confined.
    profile: SandboxProfile = field(init=False)
    # Resource -> amount that a call takes, in addition to a worker and cores.
    needs: Mapping[str, int] = field(init=False)
    _measured: tuple[SpeedUp | None, float] = (None, 0.0)
    _cold_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_COLD_STARTS))

    def __post_init__(self) -> None:
        fraction = self.spec.parallel_fraction
        self.curve = SpeedUp(fraction)
        if self.spec.expected_seconds:
            # A call that takes longer than its timeout is ended.
            expected = min(self.spec.expected_seconds, self.spec.timeout_seconds)
            at_one = expected / self.curve.seconds((max(1, self.cores),))[0]
            self.curve = SpeedUp(fraction, at_one)
        self.profile = SandboxProfile.of(self.spec)
        if self.source is not None:
            # Workers of one source never see the modules of another.
            self.profile = replace(self.profile, source=str(self.source))
        self.needs = needs_of(self.spec, self.profile.level)

    @cached_property
    def cores(self) -> int:
        """The fewest cores that a call takes."""
        return self.spec.cores if self.spec.HasField("cores") else 1

    @cached_property
    def elastic(self) -> bool:
        """Whether a call can use more than the fewest cores."""
        return self.spec.max_cores > max(1, self.cores)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Numbers of cores that a call may get."""
        return tuple(range(max(1, self.cores), self.spec.max_cores + 1))

    @property
    def seconds(self) -> float:
        """How long a call is expected to take with the fewest cores."""
        # Cached: every scheduling decision asks for all queued calls.
        if self._measured[0] is not self.curve:
            self._measured = (self.curve, self.curve.seconds((max(1, self.cores),))[0])
        return self._measured[1]

    @property
    def repeatable(self) -> bool:
        """Whether a call may run twice, because it has no effect but its result."""
        return self.spec.kind == REWARD or self.spec.retries > 0

    @property
    def stays_warm(self) -> bool:
        """Whether a worker serves another call after the first."""
        return self.profile.level == PROCESS and not self.own_sandbox

    @property
    def own_sandbox(self) -> bool:
        """Whether its calls run in a sandbox of their call or trajectory, not in a worker."""
        return self.spec.stateful or self.profile.level not in OF_WORKERS

    @cached_property
    def key(self) -> str:
        """Unique among functions."""
        return f"{self.spec.name}@{self.spec.version}"

    @cached_property
    def label(self) -> str:
        """The name without its job, as metrics have it."""
        return self.spec.name.rpartition("/")[2]

    def started_cold(self, seconds: float) -> None:
        """Record that a call waited `seconds` for a worker to start or to import the code."""
        self.cold_starts += 1
        self._cold_seconds.append(seconds)

    def status(
        self, *, running: int, behind: int, warm_workers: int, confinement: Sequence[str]
    ) -> reward_pb.FunctionStatus:
        """Return counts and estimates as a message. `running`: executors that run its calls;
        `behind`: calls that wait behind these."""
        serial, parallel = self.curve.line if self.invocations else (0.0, 0.0)
        return reward_pb.FunctionStatus(
            function=self.spec,
            invocations=self.invocations,
            errors=self.errors,
            running=running,
            queued=self.queued + behind,
            mean_seconds=self.run_seconds / self.invocations if self.invocations else 0.0,
            serial_seconds=serial,
            parallel_seconds=parallel,
            warm_workers=warm_workers,
            cold_starts=self.cold_starts,
            cold_start_p50_seconds=quantile(self._cold_seconds, 0.5),
            cold_start_p99_seconds=quantile(self._cold_seconds, 0.99),
            retried=self.retried,
            cores_held=self.cores_held,
            confinement=confinement,
        )


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """Return the quantile `share` of `values` by nearest rank; 0 if there are none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class FunctionRegistry:
    """The functions of this process, by name and version; rollout registers them again after a
    restart."""

    def __init__(
        self, sources: SourceStore, check_hosts: Callable[[reward_pb.FunctionSpec], None]
    ) -> None:
        """`check_hosts` raises `InvalidArgument` for functions that no host could ever run."""
        self._sources = sources
        self._check_hosts = check_hosts
        self._functions: dict[tuple[str, str], RegisteredFunction] = {}

    def __iter__(self) -> Iterator[RegisteredFunction]:
        return iter(self._functions.values())

    def register(self, spec: reward_pb.FunctionSpec) -> RegisteredFunction:
        """Register `spec`; repeating it changes nothing.

        Raises `InvalidArgument` for a field that cannot work, `NotFound` for a source that was not
        uploaded, and `AlreadyExists` when the name and version stand for something else.
        """
        check(spec)
        self._check_hosts(spec)
        source = self._sources.find(spec.source_sha256) if spec.source_sha256 else None
        known = self._functions.get((spec.name, spec.version))
        if known is None:
            kept = reward_pb.FunctionSpec()
            kept.CopyFrom(spec)
            known = self._functions[spec.name, spec.version] = RegisteredFunction(kept, source)
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

    def find(self, name: str, version: str) -> RegisteredFunction:
        """Return the function; raise `NotFound` (kind "function_not_found") to be registered
        again."""
        function = self._functions.get((name, version))
        if function is None:
            raise NotFound(
                f"no function of version {version!r} is registered here",
                kind=kinds.FUNCTION_NOT_FOUND,
                field="name",
                value=name,
                remedy="Register it. (This service forgets its functions in a restart.)",
            )
        return function

    def delete(self, name: str, version: str) -> RegisteredFunction | None:
        """Remove and return the function, if there is one."""
        return self._functions.pop((name, version), None)

    def versions(self, name: str, version: str = "") -> list[RegisteredFunction]:
        """Return all functions of that name, or the one of that version. Raises `NotFound`."""
        if version:
            return [self.find(name, version)]
        found = [f for f in self if f.spec.name == name]
        if not found:
            raise NotFound(
                "no function of that name is registered here",
                kind=kinds.FUNCTION_NOT_FOUND,
                field="name",
                value=name,
                remedy="ListFunctions lists the functions.",
            )
        return found


def check(spec: reward_pb.FunctionSpec) -> None:
    """Raise `InvalidArgument` or `FailedPrecondition` for a declaration that cannot work on this
    host."""

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
    if (size := len(spec.parameters_json)) > _SCHEMA_CHARACTERS:
        refuse(
            "parameters_json",
            f"{size:,} characters",
            f"is longer than {_SCHEMA_CHARACTERS:,}",
            "Describe the arguments in fewer words.",
        )
    try:
        schema = parse_json(spec.parameters_json or "{}")
    except NotJsonError as error:
        refuse("parameters_json", None, f"is not JSON: {error}", "Give a JSON schema, or nothing.")
    else:
        if not isinstance(schema, dict):
            refuse(
                "parameters_json", None, "is not a JSON object", "Give a JSON schema, or nothing."
            )
    check_costs({"timeout_seconds": spec.timeout_seconds, **costs_of(spec)}, refuse)
    _check_sandbox(spec, refuse)
    if spec.kind not in _KINDS:
        refuse("kind", spec.kind, "is not a kind of function", 'Known: "reward" and "tool".')
    if spec.source_sha256 and not _SHA256.fullmatch(spec.source_sha256):
        refuse(
            "source_sha256",
            spec.source_sha256,
            "is not a hexadecimal SHA-256",
            "Use what UploadSource returned.",
        )


def _check_sandbox(spec: reward_pb.FunctionSpec, refuse: Refuse) -> None:
    level = spec.sandbox or PROCESS
    if spec.stateful and level == PROCESS:
        refuse(
            "stateful",
            True,
            "is only for sandboxes",
            f"Declare `sandbox: {BUBBLEWRAP}`, or `sandbox: {CONTAINER}` with an image.",
        )
    if level != PROCESS and (spec.reads or spec.writes):
        refuse(
            "reads" if spec.reads else "writes",
            list(spec.reads or spec.writes),
            f"is for `sandbox: {PROCESS}`; a sandbox reaches no files of the host",
            "Leave it out.",
        )
    PROVIDERS[level].check(spec, refuse)


def expect(function: RegisteredFunction, call: FunctionCall, discipline: Discipline) -> None:
    """Set `call.expected_seconds`, unless its caller has, and the estimate from similar calls."""
    if not call.expected_seconds and function.spec.seconds_per:
        call.expected_seconds = declared_seconds(function.spec, call.arguments_json)
    if call.expected_seconds:
        # Longer than its timeout it cannot take.
        most = min(call.expected_seconds, function.spec.timeout_seconds)
        call.expected_seconds = max(_LEAST_SECONDS, most)
    seconds = discipline.expected(
        function.key, call.kin, function.seconds, declared=call.expected_seconds
    )
    # 0 lets the call follow the function's estimate, also when it changes.
    call.estimated_seconds = seconds if seconds != function.seconds else 0.0


def learn(
    function: RegisteredFunction,
    call: FunctionCall,
    seconds: float,
    cores: int,
    discipline: Discipline,
) -> SpeedUp:
    """Learn from a call that took `seconds` with `cores`; return the function's new curve."""
    lowest = max(1, function.cores)
    alone, given = function.curve.seconds((lowest, cores))
    took = seconds * alone / given
    discipline.took(function.key, call.kin, took, declared=call.expected_seconds)
    return function.curve.observed(cores, seconds)


def declared_seconds(spec: reward_pb.FunctionSpec, arguments_json: str) -> float:
    """Return the seconds that the function declares for a call with these arguments
    (`expected_seconds` and `seconds_per`), at most its timeout. An argument that is missing, or has
    no size, adds none, and so does each of more than 4 MiB of arguments, which would take too long
    to parse."""
    if len(arguments_json) > _MEASURED_CHARACTERS:
        return spec.expected_seconds
    try:
        arguments = json.loads(arguments_json or "{}")
    except (ValueError, RecursionError):  # the worker refuses them
        return spec.expected_seconds
    # A size may be infinite; 0 times infinity is not a number.
    more = sum(each * _size(arguments, path) for path, each in spec.seconds_per.items() if each)
    return min(spec.expected_seconds + more, spec.timeout_seconds)


def _size(arguments: Any, path: str) -> float:
    """Return the argument at `path` if it is a number, else its number of items or characters."""
    value = arguments
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # integers have no bound in JSON
            return math.inf if value > 0 else 0.0
        return 0.0 if math.isnan(number) else max(0.0, number)
    return float(len(value)) if isinstance(value, Sized) else 0.0
