"""Tools of a coding agent: write files, run Python, run pytest.

They work in the sandbox's working directory, which is the same for all calls of one trajectory.
Nothing here is trusted with what a model wrote but the sandbox: outside of one each call has an
empty folder of its own, and its limits are those of the process.

What earlier calls left behind has no part in a test run beside the code under test: `run_pytest`
loads pytest and its plugins from where they are installed, and, where it is given `files`, takes
fixtures and settings from those only; with `isolated` there is nothing but `files`. But a test
report is written by the process in which the code under test runs: who scores with it should run
tests that the model has not written, and know that code which sets out to lie about its own run
can.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypedDict
from xml.etree import ElementTree

from troupe.functions.declaration import tool

_MOST_FAILURES: Final = 20
_MOST_TEXT: Final = 2000
_MOST_BYTES: Final = 16 << 20


class PytestReport(TypedDict):
    """Tests by how they ended; `failures` are {test, message} of the first that did not pass."""

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: list[dict[str, str]]


def read_report(path: Path) -> PytestReport:
    """A JUnit XML file of pytest; all zero where there is none, or none that can be read."""
    report: PytestReport = {"passed": 0, "failed": 0, "errors": 0, "skipped": 0, "failures": []}
    try:
        if path.stat().st_size > _MOST_BYTES:
            return report
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return report
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcomes = {child.tag: child for child in case}
        if (bad := outcomes.get("failure")) is not None:
            report["failed"] += 1
        elif (bad := outcomes.get("error")) is not None:
            report["errors"] += 1
        elif "skipped" in outcomes:
            report["skipped"] += 1
        else:
            report["passed"] += 1
        if bad is not None:
            text = (bad.text or bad.get("message") or "")[-_MOST_TEXT:]
            report["failures"].append({"test": name, "message": text})
    del report["failures"][_MOST_FAILURES:]
    return report


def merged(reports: Sequence[PytestReport]) -> PytestReport:
    """The sum of several."""
    return {
        "passed": sum(one["passed"] for one in reports),
        "failed": sum(one["failed"] for one in reports),
        "errors": sum(one["errors"] for one in reports),
        "skipped": sum(one["skipped"] for one in reports),
        "failures": [f for one in reports for f in one["failures"]][:_MOST_FAILURES],
    }


# Kept of each stream: so much of its beginning, and so much of its end.
_KEPT: Final = 8 << 10
_READ: Final = 64 << 10
# What is still in the pipes when a program has ended; a child of its own may hold them open.
_LINGER_SECONDS: Final = 0.2


@dataclass
class Text:
    """The beginning and the end of a stream."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, part: bytes) -> None:
        """What came next."""
        room = _KEPT - len(self.head)
        self.head += part[:room]
        self.tail += part[room:]
        over = len(self.tail) - _KEPT
        if over > 0:
            del self.tail[:over]
            self.dropped += over

    def __str__(self) -> str:
        head, tail = (part.decode(errors="replace") for part in (self.head, self.tail))
        return f"{head}\n... {self.dropped:,} bytes ...\n{tail}" if self.dropped else head + tail


@dataclass(frozen=True)
class Ended:
    """How a program ended: `status` is its exit status, negative for the signal that killed it."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool


class Program:
    """One that runs, with its process group."""

    def __init__(
        self, command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str]
    ) -> None:
        self.stdout, self.stderr = Text(), Text()
        self._input = memoryview(stdin.encode(errors="replace"))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )

    def pipes(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` tell when there is something to read or room to write."""
        process = self.process
        assert process.stdin is not None
        for stream, text in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, lambda s=stream, t=text: _read(s, t))
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE, self._write)

    def kill(self) -> None:
        """End it with all of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _write(self) -> bool:
        assert self.process.stdin is not None
        try:
            self._input = self._input[os.write(self.process.stdin.fileno(), self._input) :]
        except BlockingIOError:
            return True
        except OSError:  # it does not read
            self._input = self._input[:0]
        if not self._input:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        return bool(self._input)


def run(programs: Sequence[Program], seconds: float) -> list[Ended]:
    """Wait for all of them, `seconds` at most; then what still runs is killed."""
    deadline = time.monotonic() + seconds
    late: set[int] = set()
    linger = 0.0
    with selectors.DefaultSelector() as selector:
        for program in programs:
            program.pipes(selector)
        while selector.get_map():
            now = time.monotonic()
            running = [p for p in programs if p.process.poll() is None]
            if now >= deadline and running:
                late.update(p.process.pid for p in running)
                for program in running:
                    program.kill()
                deadline = now + _LINGER_SECONDS
            if not running:
                linger = linger or now + _LINGER_SECONDS
                if now >= linger:
                    break
            for key, _ in selector.select(min(0.05, max(0.0, deadline - now))):
                file = key.fileobj
                if not key.data():
                    selector.unregister(file)
    return [_ended(program, late) for program in programs]


def _ended(program: Program, late: set[int]) -> Ended:
    process = program.process
    program.kill()  # what it left behind in its group
    status = process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return Ended(status, str(program.stdout), str(program.stderr), process.pid in late)


def _read(stream: object, text: Text) -> bool:
    """Take what is there; False at the end."""
    try:
        part = os.read(stream.fileno(), _READ)  # type: ignore[attr-defined]
    except BlockingIOError:
        return True
    text.add(part)
    return bool(part)


_MOST_READ: Final = 64 << 10
# One sandbox for all of them: what confines them must be the same.
_CAGE: Final[dict[str, Any]] = {
    "sandbox": "bubblewrap",
    "stateful": True,
    "memory_mib": 2048,
    "disk_mib": 512,
    "processes": 128,
}
# pytest and its plugins first, then the working directory, as `python -m pytest` has it: a file
# there that is named like one of them is not taken for it.
_STARTS_PYTEST: Final = """
import importlib, os, sys
import pytest
from _pytest.config import default_plugins
for name in default_plugins:
    importlib.import_module("_pytest." + name)
sys.path.insert(0, os.getcwd())
sys.exit(pytest.main(sys.argv[1:]))
"""
_PYTEST: Final = (
    *("-P", "-s", "-c", _STARTS_PYTEST),
    *("-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"),
)
# Files in which pytest looks for its settings, in its order.
_SETTINGS: Final = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_FIXTURES: Final = "conftest.py"


class Ran(TypedDict):
    """How a program ended. Long output lacks its middle."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool


class Tested(Ran):
    """The same of pytest, with the number of tests by how they ended, and why some failed."""

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: list[dict[str, str]]
    cores: int


@tool(**_CAGE, cores=0, timeout_seconds=30)
def write_files(files: dict[str, str]) -> list[str]:
    """Write text files, given as {path: content}. Folders are made; paths are relative to the
    working directory. Returns the paths."""
    with _place():
        return _write(files)


@tool(**_CAGE, cores=0, timeout_seconds=30)
def read_file(path: str, start_line: int = 1, lines: int = 400) -> str:
    """Read a text file, `lines` lines from `start_line` on."""
    with _place():
        text = _inside(path).read_text(errors="replace")
    shown = "".join(text.splitlines(keepends=True)[max(0, start_line - 1) :][: max(0, lines)])
    return shown[:_MOST_READ]


@tool(**_CAGE, cores=1, timeout_seconds=330)
def run_python(
    code: str = "", path: str = "", arguments: list[str] | None = None, seconds: float = 60.0
) -> Ran:
    """Run Python: a text, or the file `path` with `arguments`. Ends after `seconds` at the
    latest."""
    if bool(code) == bool(path):
        raise ValueError("give either code or path")
    with _place():
        what = [str(_inside(path))] if path else ["-"]
        began = time.perf_counter()
        program = _python([*what, *(arguments or ())], stdin=code)
        (ended,) = run([program], _limit(seconds))
        return _ran([ended], time.perf_counter() - began)


@tool(**_CAGE, cores=1, max_cores=16, timeout_seconds=330)
def run_pytest(
    paths: list[str] | None = None,
    files: dict[str, str] | None = None,
    keyword: str = "",
    plugins: list[str] | None = None,
    seconds: float = 120.0,
    isolated: bool = False,
) -> Tested:
    """Run pytest on files or folders (default: all), after writing `files`. With `files`, no other
    conftest.py and settings count than those among them; `isolated`: in an empty folder that holds
    `files` and nothing else. `keyword` picks tests by name; `plugins` are those to load, for
    example "pytest_asyncio.plugin"."""
    with _place(empty=isolated), tempfile.TemporaryDirectory() as reports:
        _write(files or {})
        governed = _governed(files)
        _forget_compiled()
        cores = _cores()
        targets = [str(_inside(path)) for path in paths or ["."]]
        began = time.perf_counter()
        programs, places = [], []
        for number, (share, workers) in enumerate(_shares(targets, cores)):
            report = Path(reports) / f"{number}.xml"
            options = [*_PYTEST, *governed, f"--junitxml={report}", *workers]
            options += ["-k", keyword] if keyword else []
            options += [word for plugin in plugins or () for word in ("-p", plugin)]
            programs.append(_python([*options, "--", *share]))
            places.append(report)
        ended = run(programs, _limit(seconds))
        taken = time.perf_counter() - began
        report_of_all = merged([read_report(place) for place in places])
        return _tested(_ran(ended, taken), report_of_all, cores)


def _cores() -> int:
    """Cores that the call has to itself: one where the reward service hands none out."""
    if os.environ.get("TROUPE_REWARD_CORES", "0") == "0":
        return 1
    return len(os.sched_getaffinity(0))


def _ran(ended: Sequence[Ended], seconds: float) -> Ran:
    return {
        "exit_code": _status([one.status for one in ended]),
        "stdout": "".join(one.stdout for one in ended),
        "stderr": "".join(one.stderr for one in ended),
        "seconds": round(seconds, 3),
        "timed_out": any(one.timed_out for one in ended),
    }


def _tested(ran: Ran, report: PytestReport, cores: int) -> Tested:
    return {**ran, **report, "cores": cores}


def _status(statuses: Sequence[int]) -> int:
    """One exit status for several: a failure if any failed; pytest's 5 (no tests) if all say so."""
    failed = [status for status in statuses if status not in (0, 5)]
    if failed:
        return max(failed, key=abs)
    return 5 if statuses and all(status == 5 for status in statuses) else 0


def _shares(targets: list[str], cores: int) -> Iterator[tuple[list[str], list[str]]]:
    """Targets and options of each pytest to start: with pytest-xdist one that has as many workers
    as cores; without it one for a share of the test files each."""
    if cores < 2:
        yield targets, []
        return
    if _has_xdist():
        yield targets, ["-p", "xdist", "-n", str(cores)]
        return
    files = sorted(_test_files(targets), key=lambda path: -path.stat().st_size)
    if len(files) < 2:
        yield targets, []
        return
    for first in range(min(cores, len(files))):
        yield [str(path) for path in files[first::cores]], []


def _has_xdist() -> bool:
    import importlib.util

    return importlib.util.find_spec("xdist") is not None


def _test_files(targets: list[str]) -> set[Path]:
    found: set[Path] = set()
    for target in map(Path, targets):
        if target.is_dir():
            for pattern in ("test_*.py", "*_test.py"):
                found.update(target.rglob(pattern))
        else:
            found.add(target)
    return found


def _governed(files: Mapping[str, str] | None) -> list[str]:
    """Options that say where fixtures and settings come from: of the working directory, and not of
    what is above it; of `files` only, where there are any. Raises ValueError."""
    here = Path.cwd()
    options = [f"--rootdir={here}", f"--confcutdir={here}"]
    own = None if files is None or not files else {_inside(path) for path in files}
    if own is not None and not any(path.name == _FIXTURES for path in own):
        options.append("--noconftest")
    elif own is not None:
        for path in here.rglob(_FIXTURES):
            if path.resolve() not in own:
                raise ValueError(
                    f"{path.relative_to(here)} is none of `files`, and would change their tests"
                )
    settings = (path for name in _SETTINGS if (path := here / name).is_file())
    chosen = (path for path in settings if own is None or path.resolve() in own)
    return [*options, "-c", str(next(chosen, os.devnull))]


def _forget_compiled() -> None:
    """Remove compiled modules from the working directory: they need not be of the sources there."""
    for folder in list(Path.cwd().rglob("__pycache__")):
        shutil.rmtree(folder, ignore_errors=True)


def _python(arguments: Sequence[str], *, stdin: str = "") -> Program:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # Whatever is installed here would be loaded: seconds for every call.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return Program([sys.executable, *arguments], stdin=stdin, environment=environment)


def _write(files: dict[str, str]) -> list[str]:
    for path, content in files.items():
        target = _inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    return sorted(files)


def _inside(path: str) -> Path:
    """`path`, if it is in the working directory. Raises ValueError."""
    here = Path.cwd().resolve()
    target = (here / path).resolve()
    if target != here and here not in target.parents:
        raise ValueError(f"{path!r} leads out of the working directory")
    return target


def _limit(seconds: float) -> float:
    """A deadline that leaves the tool time to tell of it."""
    if not 0 < seconds <= 300:
        raise ValueError(f"seconds must be within 0 .. 300, not {seconds:g}")
    return seconds


@contextlib.contextmanager
def _place(*, empty: bool = False) -> Iterator[None]:
    """Go where files may be written: the sandbox's working directory, else an empty one."""
    if Path.cwd().is_relative_to("/tmp") and not empty:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield
