"""Tools of a coding agent: write and read files, run Python, run pytest.

They work in the sandbox's working directory, which all calls of one trajectory share. Only the
sandbox confines model-written code: outside a sandbox, each call only has its own empty folder and
the limits of its process.

Files of earlier calls do not affect a test run, except as the code under test: `run_pytest` loads
the installed pytest and plugins, and takes fixtures and settings only from `files`, if given; with
`isolated`, only `files` exist. But the process that runs the code under test writes the report:
score with tests that the model has not written, and be aware that code can forge the report of its
own run.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from troupe.processes.ending import signal_group

# Limits: failures in a report, characters of each failure, and bytes of a report file.
_MOST_FAILURES: Final = 20
_MOST_TEXT: Final = 2000
_MOST_BYTES: Final = 16 << 20


class PytestReport(TypedDict):
    """Numbers of tests by outcome; `failures`: {test, message} of the first tests that did not
    pass."""

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: list[dict[str, str]]


def read_report(path: Path) -> PytestReport:
    """Return the report in a JUnit XML file of pytest; all zero if it is missing or unreadable."""
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
    """Return the sum of several reports."""
    return {
        "passed": sum(one["passed"] for one in reports),
        "failed": sum(one["failed"] for one in reports),
        "errors": sum(one["errors"] for one in reports),
        "skipped": sum(one["skipped"] for one in reports),
        "failures": [f for one in reports for f in one["failures"]][:_MOST_FAILURES],
    }


# Bytes that are kept of the beginning and of the end of a stream.
_KEPT: Final = 8 << 10
_READ: Final = 64 << 10
# How long pipes are read after the end of a program, whose children may hold them open.
_LINGER_SECONDS: Final = 0.2


@dataclass
class StreamText:
    """The beginning and the end of a stream."""

    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, part: bytes) -> None:
        """Append `part`."""
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
class ProgramResult:
    """The result of a program; `status`: exit status, or minus the signal that killed it."""

    status: int
    stdout: str
    stderr: str
    timed_out: bool


class Program:
    """A running program, with its process group."""

    def __init__(
        self, command: Sequence[str], *, stdin: str = "", environment: Mapping[str, str]
    ) -> None:
        self.stdout, self.stderr = StreamText(), StreamText()
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
        """Register its pipes with `selector`; the data of each key is the function to call."""
        process = self.process
        assert process.stdin is not None
        for stream, text in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, lambda s=stream, t=text: _read(s, t))
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE, self._write)

    def kill(self) -> None:
        """Kill it and its process group."""
        signal_group(self.process.pid, signal.SIGKILL)

    def _write(self) -> bool:
        assert self.process.stdin is not None
        try:
            self._input = self._input[os.write(self.process.stdin.fileno(), self._input) :]
        except BlockingIOError:
            return True
        except OSError:  # the program does not read
            self._input = self._input[:0]
        if not self._input:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        return bool(self._input)


def run(programs: Sequence[Program], seconds: float) -> list[ProgramResult]:
    """Wait for `programs`, and kill those that still run after `seconds`."""
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


def _ended(program: Program, late: set[int]) -> ProgramResult:
    process = program.process
    program.kill()  # processes that it left in its group
    status = process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    return ProgramResult(status, str(program.stdout), str(program.stderr), process.pid in late)


def _read(stream: object, text: StreamText) -> bool:
    """Read what is available from `stream`; False at its end."""
    try:
        part = os.read(stream.fileno(), _READ)  # type: ignore[attr-defined]
    except BlockingIOError:
        return True
    text.add(part)
    return bool(part)


_MOST_READ: Final = 64 << 10
# Equal for all tools, which therefore share one sandbox.
_SANDBOX: Final[dict[str, Any]] = {
    "sandbox": "bubblewrap",
    "stateful": True,
    "memory_mib": 2048,
    "disk_mib": 512,
    "processes": 128,
}
# Imports pytest and its plugins before the working directory is added to the import path (as by
# `python -m pytest`), so that a file there cannot shadow one of them.
_STARTS_PYTEST: Final = """
import importlib, os, sys
import pytest
from _pytest.config import default_plugins
for name in default_plugins:
    importlib.import_module("_pytest." + name)
sys.path[:0] = sys.argv[1].split(os.pathsep)
sys.exit(pytest.main(sys.argv[2:]))
"""
_PYTHON_OPTIONS: Final = ("-P", "-s", "-c", _STARTS_PYTEST)
# Several folders may contain test files of one name: pytest's default would import only one of
# them.
_PYTEST: Final = (
    *("-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"),
    "--import-mode=importlib",
    # If one file cannot be imported, tests of other files are still run.
    "--continue-on-collection-errors",
)
TEST_FILES: Final = ("test_*.py", "*_test.py")
"""Names of files in which pytest looks for tests."""
# Files in which pytest looks for its settings, in its order.
_SETTINGS: Final = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_FIXTURES: Final = "conftest.py"


class RunResult(TypedDict):
    """The result of a program. Long output is cut in the middle."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool


class PytestResult(RunResult):
    """The result of pytest, with numbers of tests by outcome, and failures."""

    passed: int
    failed: int
    errors: int
    skipped: int
    failures: list[dict[str, str]]
    cores: int


@tool(**_SANDBOX, cores=0, timeout_seconds=30)
def write_files(files: dict[str, str]) -> list[str]:
    """Write text files, given as {path: content}. Missing folders are created; paths are relative
    to the working directory. Returns the paths."""
    with _working_directory():
        return _write(files)


@tool(**_SANDBOX, cores=0, timeout_seconds=30)
def read_file(path: str, start_line: int = 1, lines: int = 400) -> str:
    """Read `lines` lines of a text file, beginning with `start_line`."""
    with _working_directory():
        text = _inside(path).read_text(errors="replace")
    shown = "".join(text.splitlines(keepends=True)[max(0, start_line - 1) :][: max(0, lines)])
    return shown[:_MOST_READ]


@tool(**_SANDBOX, cores=1, timeout_seconds=330)
def run_python(
    code: str = "", path: str = "", arguments: list[str] | None = None, seconds: float = 60.0
) -> RunResult:
    """Run Python: a text, or the file `path` with `arguments`. Ends after at most `seconds`."""
    if bool(code) == bool(path):
        raise ValueError("give either code or path")
    with _working_directory():
        what = [str(_inside(path))] if path else ["-"]
        began = time.perf_counter()
        program = _python([*what, *(arguments or ())], stdin=code)
        (ended,) = run([program], _limit(seconds))
        return _ran([ended], time.perf_counter() - began)


@tool(**_SANDBOX, cores=1, max_cores=16, timeout_seconds=330)
def run_pytest(
    paths: list[str] | None = None,
    files: dict[str, str] | None = None,
    keyword: str = "",
    plugins: list[str] | None = None,
    seconds: float = 120.0,
    isolated: bool = False,
) -> PytestResult:
    """Run pytest on files or folders (default: all), after writing `files`. With `files`, only
    their conftest.py and settings count; `isolated`: run in an empty folder that contains only
    `files`. `keyword` selects tests by name; `plugins` to load, for example
    "pytest_asyncio.plugin"."""
    with _working_directory(empty=isolated), tempfile.TemporaryDirectory() as reports:
        _write(files or {})
        governed = _governed(files)
        # Compiled modules may not match the sources.
        for folder in list(Path.cwd().rglob("__pycache__")):
            shutil.rmtree(folder, ignore_errors=True)
        # The cores of the call; 1 if the reward service does not assign cores.
        given = os.environ.get("TROUPE_REWARD_CORES", "0") != "0"
        cores = len(os.sched_getaffinity(0)) if given else 1
        targets = [str(_inside(path)) for path in paths or ["."]]
        imported = os.pathsep.join(_import_folders(targets))
        began = time.perf_counter()
        programs, places = [], []
        for number, (share, workers) in enumerate(_shares(targets, cores)):
            report = Path(reports) / f"{number}.xml"
            options = [
                *_PYTHON_OPTIONS,
                imported,
                *_PYTEST,
                *governed,
                f"--junitxml={report}",
                *workers,
            ]
            options += ["-k", keyword] if keyword else []
            options += [word for plugin in plugins or () for word in ("-p", plugin)]
            programs.append(_python([*options, "--", *share]))
            places.append(report)
        ended = run(programs, _limit(seconds))
        taken = time.perf_counter() - began
        report_of_all = merged([read_report(place) for place in places])
        return {**_ran(ended, taken), **report_of_all, "cores": cores}


def _ran(ended: Sequence[ProgramResult], seconds: float) -> RunResult:
    return {
        "exit_code": _status([one.status for one in ended]),
        "stdout": "".join(one.stdout for one in ended),
        "stderr": "".join(one.stderr for one in ended),
        "seconds": round(seconds, 3),
        "timed_out": any(one.timed_out for one in ended),
    }


def _status(statuses: Sequence[int]) -> int:
    """Combine exit statuses: a failure if any failed; pytest's 5 (no tests) if all are 5."""
    failed = [status for status in statuses if status not in (0, 5)]
    if failed:
        return max(failed, key=abs)
    return 5 if statuses and all(status == 5 for status in statuses) else 0


def _shares(targets: list[str], cores: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield targets and options of each pytest process: with pytest-xdist, one process with a
    worker per core; without it, one process per core for a share of the test files."""
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
    return importlib.util.find_spec("xdist") is not None


def _test_files(targets: list[str]) -> set[Path]:
    found: set[Path] = set()
    for target in map(Path, targets):
        if target.is_dir():
            for pattern in TEST_FILES:
                found.update(target.rglob(pattern))
        else:
            found.add(target)
    return found


def _import_folders(targets: list[str]) -> list[str]:
    """Return folders from which tests import: the working directory, and the folders above the
    packages of test files, which pytest by default puts on the import path."""
    folders = [Path.cwd()]
    for path in sorted(_test_files(targets)):
        folder = path.parent
        while (folder / "__init__.py").is_file() and folder != folders[0]:
            folder = folder.parent
        folders.append(folder)
    return list(dict.fromkeys(map(str, folders)))


def _governed(files: Mapping[str, str] | None) -> list[str]:
    """Return pytest options that take fixtures and settings from the working directory, not from
    folders above it, or, if there are `files`, only from these. Raises ValueError."""
    here = Path.cwd()
    options = [f"--rootdir={here}", f"--confcutdir={here}"]
    own = None if files is None or not files else {_inside(path) for path in files}
    if own is not None and not any(path.name == _FIXTURES for path in own):
        options.append("--noconftest")
    elif own is not None:
        for path in here.rglob(_FIXTURES):
            if path.resolve() not in own:
                raise ValueError(
                    f"{path.relative_to(here)} is not one of `files`, but would change their tests"
                )
    settings = (path for name in _SETTINGS if (path := here / name).is_file())
    chosen = (path for path in settings if own is None or path.resolve() in own)
    return [*options, "-c", str(next(chosen, os.devnull))]


def _python(arguments: Sequence[str], *, stdin: str = "") -> Program:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # Loading all installed plugins would take seconds in every call.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return Program([sys.executable, *arguments], stdin=stdin, environment=environment)


def _write(files: dict[str, str]) -> list[str]:
    for path, content in files.items():
        target = _inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    return sorted(files)


def _inside(path: str) -> Path:
    """Return the absolute `path`. Raises ValueError if it is outside the working directory."""
    here = Path.cwd().resolve()
    target = (here / path).resolve()
    if target != here and here not in target.parents:
        raise ValueError(f"{path!r} leads out of the working directory")
    return target


def _limit(seconds: float) -> float:
    """Return `seconds` if they leave the tool time to report within its timeout. Raises
    ValueError."""
    if not 0 < seconds <= 300:
        raise ValueError(f"seconds must be within 0 .. 300, not {seconds:g}")
    return seconds


@contextlib.contextmanager
def _working_directory(*, empty: bool = False) -> Iterator[None]:
    """Run inside the sandbox's working directory, or, without a sandbox, in an empty folder."""
    if Path.cwd().is_relative_to("/tmp") and not empty:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        yield
