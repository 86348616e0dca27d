"""A function that can be invoked, and what is known of its calls."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from services.reward.call import FunctionCall
from services.reward.sandbox import (
    BUBBLEWRAP,
    CONTAINER,
    LEVELS,
    PROCESS,
    SandboxProfile,
    find_bubblewrap,
    unprivileged,
)
from services.reward.sandboxes import landlock
from services.reward.sandboxes.container import find_engine
from services.reward.stock import needs_of
from troupe.outcomes import NotJsonError, parse_json
from troupe.rpc import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound
from troupe.scheduling.elastic import Discipline, SpeedUp
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from services.reward.dispatch import InvocationChunk

# Of one function, so much is kept; a longer line is cut into pieces of this length.
_KEPT_BYTES: Final = 256 * 2**10
_LINE_BYTES: Final = 4 * 2**10
# Of what is read at once, so many lines are kept.
_LINES: Final = 200
# A listener that is slower than its function misses lines, and nobody waits for it.
_AHEAD: Final = 1000


class Lines:
    """Cuts what comes in parts into lines."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with each line, without its end."""
        self._tell = tell
        self._rest = b""

    def add(self, part: bytes) -> None:
        """More was printed."""
        *whole, self._rest = (self._rest + part).split(b"\n")
        if len(whole) > _LINES:
            # Nobody reads so fast, and everybody else would wait.
            self._tell(f"({len(whole) - _LINES:,} lines left out)")
        for line in whole[-_LINES:]:
            self._cut(line)
        while len(self._rest) >= _LINE_BYTES:
            self._tell(_text(self._rest[:_LINE_BYTES]))
            self._rest = self._rest[_LINE_BYTES:]

    def end(self) -> None:
        """There will be no more: the last line need not be whole."""
        if self._rest:
            self._tell(_text(self._rest))
            self._rest = b""

    def _cut(self, line: bytes) -> None:
        for start in range(0, max(1, len(line)), _LINE_BYTES):
            self._tell(_text(line[start : start + _LINE_BYTES]))


@dataclass
class Logs:
    """The last lines of one function."""

    kept: deque[pb.LogLine] = field(default_factory=deque)
    size: int = 0
    listeners: set[asyncio.Queue[pb.LogLine | None]] = field(default_factory=set)

    def add(self, line: pb.LogLine) -> None:
        """Keep it, and let go of the oldest where there is too much."""
        line.seconds = time.time()
        self.kept.append(line)
        self.size += len(line.text)
        while self.size > _KEPT_BYTES:
            self.size -= len(self.kept.popleft().text)
        for queue in self.listeners:
            if not queue.full():
                queue.put_nowait(line)

    def close(self) -> None:
        """There will be no more lines."""
        for queue in self.listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(None)


@contextmanager
def listening(
    functions: Iterable[RegisteredFunction],
) -> Iterator[asyncio.Queue[pb.LogLine | None]]:
    """All lines of `functions` from now on; None when there will be no more."""
    queue: asyncio.Queue[pb.LogLine | None] = asyncio.Queue(_AHEAD)
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


REWARD: Final = "reward"
KINDS: Final = ("", REWARD, "tool")
# Cold starts that percentiles are of.
_COLD_STARTS: Final = 1000


@dataclass(eq=False)
class RegisteredFunction:
    """A registered function with its counts."""

    spec: pb.FunctionSpec
    # The folder of its uploaded source; None: it is importable as the service is.
    source: Path | None = None
    # Times it was registered: with each, workers look anew whether its code was edited.
    registrations: int = 0
    # How many there had been when even a new worker could not import it.
    unimportable: int = -1
    invocations: int = 0
    errors: int = 0
    retried: int = 0
    # Calls that wait for a worker, and what workers run.
    queued: int = 0
    chunks: set[InvocationChunk] = field(default_factory=set)
    # Cores that its calls hold now.
    cores_held: int = 0
    run_seconds: float = 0.0
    cold_starts: int = 0
    logs: Logs = field(default_factory=Logs)
    # How long its calls take with how many cores, learned from those that ran.
    curve: SpeedUp = field(init=False)
    # What its workers are confined to.
    cage: SandboxProfile = field(init=False)
    # What a call takes beside a worker and cores.
    needs: Mapping[str, int] = field(init=False)
    _measured: tuple[SpeedUp | None, float] = (None, 0.0)
    _cold_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_COLD_STARTS))

    def __post_init__(self) -> None:
        fraction = self.spec.parallel_fraction
        self.curve = SpeedUp(fraction)
        if self.spec.expected_seconds:
            # However long its author takes it to be: a call is ended before.
            expected = min(self.spec.expected_seconds, self.spec.timeout_seconds)
            at_one = expected / self.curve.seconds((max(1, self.cores),))[0]
            self.curve = SpeedUp(fraction, at_one)
        self.cage = SandboxProfile.of(self.spec)
        if self.source is not None:
            # Workers of one source never see another's modules, whatever their names.
            self.cage = replace(self.cage, source=str(self.source))
        self.needs = needs_of(self.spec, self.cage.level)

    @cached_property
    def cores(self) -> int:
        """The fewest cores that a call takes."""
        return self.spec.cores if self.spec.HasField("cores") else 1

    @cached_property
    def elastic(self) -> bool:
        """Whether a call can make use of more cores than the fewest."""
        return self.spec.max_cores > max(1, self.cores)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Numbers of cores that a call of an elastic function may get."""
        return tuple(range(max(1, self.cores), self.spec.max_cores + 1))

    @property
    def running(self) -> int:
        """Workers that run calls of it."""
        return len(self.chunks)

    @property
    def room(self) -> int:
        """How many more of its calls may run at once."""
        limit = self.spec.max_concurrency
        return max(0, limit - self.running) if limit > 0 else sys.maxsize

    @property
    def seconds(self) -> float:
        """How long a call is expected to take with the fewest cores."""
        # Asked for with every decision, for all that wait.
        if self._measured[0] is not self.curve:
            self._measured = (self.curve, self.curve.seconds((max(1, self.cores),))[0])
        return self._measured[1]

    @property
    def repeatable(self) -> bool:
        """Whether a call may be begun twice: nothing but its result is wanted of it."""
        return self.spec.kind == REWARD or self.spec.retries > 0

    @property
    def stays_warm(self) -> bool:
        """Whether its workers are there for the next call, too."""
        return self.cage.level == PROCESS and not self.own_place

    @property
    def own_place(self) -> bool:
        """Whether its calls run in sandboxes that are opened for them, not in workers."""
        return self.spec.stateful or self.cage.level == "container"

    @cached_property
    def key(self) -> str:
        """Unique among functions."""
        return f"{self.spec.name}@{self.spec.version}"

    @cached_property
    def label(self) -> str:
        """The name without its job: what metrics are grouped by."""
        return self.spec.name.rpartition("/")[2]

    def started_cold(self, seconds: float) -> None:
        """One more call had to wait so long for a worker to start, or to import the code."""
        self.cold_starts += 1
        self._cold_seconds.append(seconds)

    def cold(self, share: float) -> float:
        """That quantile of the last cold starts, in seconds; 0 where there was none."""
        return quantile(self._cold_seconds, share)

    def status(self, warm_workers: int = 0, confinement: Sequence[str] = ()) -> pb.FunctionStatus:
        """The counts as a message."""
        serial, parallel = self.curve.line if self.invocations else (0.0, 0.0)
        return pb.FunctionStatus(
            function=self.spec,
            invocations=self.invocations,
            errors=self.errors,
            running=self.running,
            queued=self.queued + sum(chunk.behind for chunk in self.chunks),
            mean_seconds=self.run_seconds / self.invocations if self.invocations else 0.0,
            serial_seconds=serial,
            parallel_seconds=parallel,
            warm_workers=warm_workers,
            cold_starts=self.cold_starts,
            cold_start_p50_seconds=self.cold(0.5),
            cold_start_p99_seconds=self.cold(0.99),
            retried=self.retried,
            cores_held=self.cores_held,
            confinement=confinement,
        )


def quantile(values: Sequence[float] | deque[float], share: float) -> float:
    """The least of `values` that so many of them do not exceed (nearest rank); 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


_ENTRYPOINT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_ARGUMENT: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_MOST_ARGUMENTS: Final = 16
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_MOST_RETRIES: Final = 100
# No machine has as many, and each is looked at for what it would be worth.
_MOST_CORES: Final = 4096
# What Linux has ids for.
_MOST_PROCESSES: Final = 1 << 22
_COUNTS: Final = (
    *("memory_mib", "max_concurrency", "max_queued", "min_workers", "retries"),
    *("cores", "max_cores", "gpus", "quota_units", "processes", "disk_mib"),
)


def check(spec: pb.FunctionSpec) -> None:
    """Raises `InvalidArgument` or `FailedPrecondition` for a field that cannot work anywhere."""

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
    try:
        schema = parse_json(spec.parameters_json or "{}")
    except NotJsonError as error:
        refuse("parameters_json", None, f"is not JSON: {error}", "Give a JSON schema, or nothing.")
    else:
        if not isinstance(schema, dict):
            refuse("parameters_json", None, "is no JSON object", "Give a JSON schema, or nothing.")
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
        unprivileged()
    if spec.sandbox == CONTAINER:
        if not spec.image:
            refuse("image", "", "is empty", "Name the image that its containers are made of.")
        find_engine()
    if spec.stateful and spec.sandbox in ("", PROCESS):
        refuse(
            "stateful",
            True,
            "is for sandboxes",
            f"Declare `sandbox: {BUBBLEWRAP}`, or `sandbox: {CONTAINER}` with an image.",
        )
    if (spec.reads or spec.writes) and spec.sandbox not in ("", PROCESS):
        refuse(
            "reads" if spec.reads else "writes",
            list(spec.reads or spec.writes),
            f"is for `sandbox: {PROCESS}`; a sandbox reaches no files of the host",
            "Leave it out.",
        )
    if (spec.reads or spec.writes) and not landlock.version():
        raise FailedPrecondition(
            "the kernel where the reward service runs has no landlock",
            kind="no_sandbox",
            field="function.reads" if spec.reads else "function.writes",
            remedy=f"Leave reads and writes out, or declare `sandbox: {BUBBLEWRAP}`.",
        )
    if spec.max_cores and spec.max_cores < spec.cores:
        refuse("max_cores", spec.max_cores, f"less than cores ({spec.cores})", "0 means no more.")
    if spec.max_cores > _MOST_CORES:
        refuse(
            "max_cores",
            spec.max_cores,
            f"is more than {_MOST_CORES:,}",
            "Say how many cores a call can make use of.",
        )
    if spec.processes > _MOST_PROCESSES:
        refuse(
            "processes",
            spec.processes,
            f"is more than {_MOST_PROCESSES:,}",
            "Say how many processes and threads a call needs at once.",
        )
    if not 0 <= spec.parallel_fraction <= 1:
        refuse(
            "parallel_fraction",
            spec.parallel_fraction,
            "is not within 0 .. 1",
            "It is the part of the time that more cores make shorter.",
        )
    if not (math.isfinite(spec.expected_seconds) and spec.expected_seconds >= 0):
        refuse(
            "expected_seconds",
            spec.expected_seconds,
            "is not a number of 0 or more",
            "Say how long a call takes with the fewest cores; 0 where nobody knows.",
        )
    if len(spec.seconds_per) > _MOST_ARGUMENTS:
        refuse(
            "seconds_per",
            sorted(spec.seconds_per),
            f"names more than {_MOST_ARGUMENTS} arguments",
            "Name those that decide how long a call takes.",
        )
    for name, seconds in spec.seconds_per.items():
        if not _ARGUMENT.fullmatch(name):
            refuse("seconds_per", name, "is no argument", 'Write "tests", or "query.data.tests".')
        if not (math.isfinite(seconds) and seconds >= 0):
            refuse(
                f"seconds_per.{name}",
                seconds,
                "is not a number of 0 or more",
                "Say how many seconds each one of it adds.",
            )
    if spec.kind not in KINDS:
        refuse("kind", spec.kind, "is no kind of function", 'Known: "reward" and "tool".')
    if spec.retries > _MOST_RETRIES:
        refuse(
            "retries",
            spec.retries,
            f"is more than {_MOST_RETRIES}",
            "A call that fails so often fails by itself.",
        )
    for name in ("idle_seconds", "sandbox_idle_seconds"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0):
            refuse(name, value, "is not a number of 0 or more", "Say how many seconds.")
    if spec.source_sha256 and not _SHA256.fullmatch(spec.source_sha256):
        refuse(
            "source_sha256",
            spec.source_sha256,
            "is no SHA-256 in hexadecimal",
            "Use what UploadSource returned.",
        )
    for name in _COUNTS:
        if getattr(spec, name) < 0:
            refuse(name, getattr(spec, name), "is negative", "0 means no limit.")


_MOST_FILES: Final = 1000
_MOST_BYTES: Final = 16 * 2**20
# Of one file or folder, as file systems have them, and of a whole path.
_NAME_BYTES: Final = 255
_PATH_BYTES: Final = 1024


class Sources:
    """A private folder with one folder for each source; nothing in there is ever changed."""

    def __init__(self, root: Path | None = None) -> None:
        """`root` is made when it is needed; by default a new one, removed at the end."""
        self._root = root
        self._own = root is None

    def put(self, files: Sequence[pb.SourceFile]) -> str:
        """Keep `files`; returns their hash. Raises `InvalidArgument`."""
        _check(files)
        name = digest(files)
        target = self._folder() / name
        if not target.is_dir():
            draft = target.with_name(f".{name}.{secrets.token_hex(4)}")
            try:
                for file in files:
                    path = draft / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(file.content)
                # The folder around it is private; a sandbox, of another user, is shown this one.
                for path in (draft, *draft.rglob("*")):
                    path.chmod(0o755 if path.is_dir() else 0o644)
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # else somebody was quicker
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return name

    def find(self, sha256: str) -> Path:
        """The folder of a source. Raises `NotFound` (kind "source_not_found")."""
        path = self._folder() / sha256
        if not path.is_dir():
            raise NotFound(
                "no such source was uploaded here",
                kind="source_not_found",
                field="function.source_sha256",
                value=sha256,
                remedy="Upload it (again: this service forgets sources in a restart).",
            )
        return path

    def files(self, sha256: str) -> list[pb.SourceFile]:
        """What a source consists of, for hosts that have not got it. Raises `NotFound`."""
        root = self.find(sha256)
        return [
            pb.SourceFile(path=path.relative_to(root).as_posix(), content=path.read_bytes())
            for path in sorted(root.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]

    def close(self) -> None:
        """Remove what is only this service's."""
        if self._own and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None

    def _folder(self) -> Path:
        if self._root is None:
            self._root = Path(tempfile.mkdtemp(prefix="troupe-sources-"))
        self._root.mkdir(parents=True, exist_ok=True)
        return self._root


def digest(files: Sequence[pb.SourceFile]) -> str:
    """SHA-256 of paths and contents, each with its length before it, in the order of the paths."""
    sha = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        for part in (file.path.encode(), file.content):
            sha.update(len(part).to_bytes(8, "big"))
            sha.update(part)
    return sha.hexdigest()


def _check(files: Sequence[pb.SourceFile]) -> None:
    def refuse(value: object, message: str, remedy: str) -> None:
        raise InvalidArgument(message, field="files", value=value, remedy=remedy)

    if not files:
        refuse(0, "there is no file", "Upload at least the module of the entrypoint.")
    if len(files) > _MOST_FILES:
        refuse(
            len(files), f"more than {_MOST_FILES:,} files", "Install what is large as a package."
        )
    size = sum(len(file.content) for file in files)
    if size > _MOST_BYTES:
        refuse(
            f"{size:,} bytes",
            f"more than {_MOST_BYTES:,} bytes",
            "Upload code only; install what is large as a package, or mount it.",
        )
    seen: set[str] = set()
    for file in files:
        path = PurePosixPath(file.path)
        parts = file.path.split("/")
        if path.is_absolute() or not set(parts).isdisjoint({"", ".", ".."}) or "\0" in file.path:
            refuse(file.path, "leads out of the folder, or to no file", 'Name it like "a/b.py".')
        longest = max(len(part.encode()) for part in parts)
        if longest > _NAME_BYTES or len(file.path.encode()) > _PATH_BYTES:
            refuse(file.path[:80], "is too long a path", "Give files and folders shorter names.")
        if "__pycache__" in parts:
            refuse(file.path, "is what an interpreter made", "Upload the module itself.")
        if file.path in seen:
            refuse(file.path, "is there twice", "Name every file once.")
        seen.add(file.path)
    for file in files:
        if any(str(parent) in seen for parent in PurePosixPath(file.path).parents):
            refuse(file.path, "is inside a file", "A path is a file or a folder.")


# Less is declared of no call: what it took is counted in multiples of that.
_LEAST_SECONDS: Final = 1e-6


def expect(function: RegisteredFunction, call: FunctionCall, discipline: Discipline) -> None:
    """Set what `call` is expected to take, unless its caller has said so, and what calls like it
    say of that."""
    if not call.expected_seconds and function.spec.seconds_per:
        call.expected_seconds = declared_seconds(function.spec, call.arguments_json)
    if call.expected_seconds:
        # Whoever said so: it takes no longer than it may.
        most = min(call.expected_seconds, function.spec.timeout_seconds)
        call.expected_seconds = max(_LEAST_SECONDS, most)
    seconds = discipline.expected(
        function.key, call.kin, function.seconds, declared=call.expected_seconds
    )
    # What is as the others are stays so when more is known of them.
    call.estimated_seconds = seconds if seconds != function.seconds else 0.0


def learn(
    function: RegisteredFunction,
    call: FunctionCall,
    seconds: float,
    cores: int,
    discipline: Discipline,
) -> SpeedUp:
    """A call took `seconds` with so many `cores`; returns the function's curve with it."""
    lowest = max(1, function.cores)
    alone, given = function.curve.seconds((lowest, cores))
    took = seconds * alone / given
    discipline.took(function.key, call.kin, took, declared=call.expected_seconds)
    return function.curve.observed(cores, seconds)


def declared_seconds(spec: pb.FunctionSpec, arguments_json: str) -> float:
    """What the function declares of a call with these arguments: no more than it may take.

    An argument that is not there, or has no size, adds nothing, nor does one of 0 s for each.
    """
    try:
        arguments = json.loads(arguments_json or "{}")
    except (ValueError, RecursionError):  # its worker says what is wrong with them
        return spec.expected_seconds
    # A size may be infinite, and 0 times that is no number.
    more = sum(each * _size(arguments, path) for path, each in spec.seconds_per.items() if each)
    return min(spec.expected_seconds + more, spec.timeout_seconds)


def _size(arguments: Any, path: str) -> float:
    """A number itself, else how many items or characters there are."""
    value = arguments
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:  # whole numbers have no bound in JSON
            return math.inf if value > 0 else 0.0
        return 0.0 if math.isnan(number) else max(0.0, number)
    return float(len(value)) if isinstance(value, Sized) else 0.0


class Registry:
    """All functions of this process; rollout workers register them anew after a restart."""

    def __init__(self, sources: Sources, place: Callable[[pb.FunctionSpec], None]) -> None:
        """`place` raises `InvalidArgument` for what no host could ever run."""
        self._sources = sources
        self._place = place
        self._functions: dict[tuple[str, str], RegisteredFunction] = {}

    def __iter__(self) -> Iterator[RegisteredFunction]:
        return iter(self._functions.values())

    def register(self, spec: pb.FunctionSpec) -> RegisteredFunction:
        """Make `spec` known; repeating it changes nothing.

        Raises `InvalidArgument` for a field that cannot work, `NotFound` for a source that was not
        uploaded, and `AlreadyExists` when the name and version stand for something else.
        """
        check(spec)
        self._place(spec)
        source = self._sources.find(spec.source_sha256) if spec.source_sha256 else None
        known = self._functions.get((spec.name, spec.version))
        if known is None:
            kept = pb.FunctionSpec()
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

    def delete(self, name: str, version: str) -> RegisteredFunction | None:
        """Forget it; the function, if there was one."""
        return self._functions.pop((name, version), None)

    def versions(self, name: str, version: str = "") -> list[RegisteredFunction]:
        """All functions of that name, or the one of that version. Raises `NotFound`."""
        if version:
            return [self.find(name, version)]
        found = [f for f in self if f.spec.name == name]
        if not found:
            raise NotFound(
                "no function of that name is registered here",
                kind="function_not_found",
                field="name",
                value=name,
                remedy="ListFunctions tells which there are.",
            )
        return found
