"""Records for the next landing of a change: known flaky tests, and when slow tests ran.

    python -m scripts.landing order SECONDS     # files of slow tests, in the order to run them in
    python -m scripts.landing ran REPORT...     # says which files of slow tests ran, and which not
    python -m scripts.landing flaky REPORT...   # FLAKY lines; 1 if a test is in .ci/flaky.txt
    python -m scripts.landing note LOG          # records in .ci/slow.json what `ran` said in a log

REPORT is pytest's `--junitxml` with `junit_family=xunit1`. CI cannot commit: whoever begins the
next change notes the log of the last landing's run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parent.parent
FLAKY: Final = Path(".ci/flaky.txt")
SLOW: Final = Path(".ci/slow.json")
# Every slow test runs at least once in this number of landings.
LANDINGS: Final = 4
# Assumed seconds of a test file without a record.
_UNKNOWN_SECONDS: Final = 60.0
# conftest.py's text for a test that is left out at the end of the run.
OUT_OF_TIME: Final = "the time of this run is over"


@dataclass(frozen=True)
class Case:
    """One test in a report of pytest."""

    file: str
    name: str
    seconds: float
    # The first line of its error; empty if it has not failed.
    failure: str
    # Why it was skipped.
    skipped: str

    @property
    def node(self) -> str:
        """Its node id."""
        return f"{self.file}::{self.name}"


def cases(report: Path) -> list[Case]:
    """Return the tests of a report."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        wrong = [one for kind in ("failure", "error") for one in case.iter(kind)]
        skips = [one.get("message", "") for one in case.iter("skipped")]
        message = (wrong[0].get("message") or wrong[0].text or "unknown") if wrong else ""
        found.append(
            Case(
                case.get("file", ""),
                case.get("name", ""),
                float(case.get("time", 0)),
                message.strip().partition("\n")[0],
                skips[0] if skips else "",
            )
        )
    return found


# Flaky tests.


def known_flaky(text: str) -> set[str]:
    """Node ids in the text of .ci/flaky.txt: one a line, before two spaces and the reason."""
    lines = (line.strip() for line in text.splitlines())
    return {line.partition("  ")[0] for line in lines if line and not line.startswith("#")}


def judged(failures: Mapping[str, str], known: Collection[str]) -> tuple[list[str], bool]:
    """Return what to print of tests that failed once and passed alone (`failures`: the reason of
    each), and whether that is allowed: not of a test that was flaky at an earlier landing."""
    lines = []
    for node, reason in sorted(failures.items()):
        lines.append(f"FLAKY {node}  {reason}")
        if node in known:
            lines.append(f"  it is in {FLAKY}: mend it now (docs/contributing.md, Flaky tests)")
        else:
            lines.append(f"  mend it, or add this line to {FLAKY}: {node}  {reason}")
    return lines or ["FLAKY none"], not set(failures) & set(known)


# The order of slow tests.


@dataclass(frozen=True)
class Ran:
    """The last complete run of a test file."""

    seconds: float
    # The landing that ran it, counted from 1.
    landing: int


@dataclass(frozen=True)
class Record:
    """The content of .ci/slow.json."""

    # HEAD at the last landing; empty before the first.
    commit: str
    files: Mapping[str, Ran]

    @property
    def landing(self) -> int:
        """The number of the last landing."""
        return max((one.landing for one in self.files.values()), default=0)

    def seconds(self, files: Iterable[str]) -> float:
        """Return how long test files take, as far as it is known."""
        unknown = Ran(_UNKNOWN_SECONDS, 0)
        return sum(self.files.get(file, unknown).seconds for file in files)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record; an empty one if there is none."""
        if not path.exists():
            return cls("", {})
        kept = json.loads(path.read_text())
        return cls(kept["commit"], {file: Ran(**one) for file, one in kept["files"].items()})

    def write(self, path: Path) -> None:
        """Replace the record."""
        files = {file: asdict(one) for file, one in sorted(self.files.items())}
        path.write_text(json.dumps({"commit": self.commit, "files": files}, indent=1) + "\n")


def relevance(test: str, changed: Iterable[str]) -> int:
    """Return how many names of folders and files a test's path shares with a changed file's path;
    a test that was changed itself comes before all others."""
    own = set(PurePosixPath(test).parts[1:-1])
    paths = [PurePosixPath(path) for path in changed]
    if PurePosixPath(test) in paths:
        return sys.maxsize
    return max((len(own & {*path.parts[:-1], path.stem}) for path in paths), default=0)


def ordered(
    files: Collection[str], changed: Collection[str], record: Record, head: str, budget: float
) -> list[str]:
    """Test files in the order in which to run them, of which the first `budget` seconds will run.

    First those that the change touches, then those that have not run for longest; equally old
    ones in an order that differs with every commit (`head`). A quarter of the whole suite's time
    is kept for the longest not run, so that all run within four landings.
    """
    oldest = sorted(
        files,
        key=lambda file: (
            record.files[file].landing if file in record.files else 0,
            hashlib.sha256(f"{head} {file}".encode()).digest(),
        ),
    )
    touched = sorted(
        (file for file in oldest if relevance(file, changed)),
        key=lambda file: -relevance(file, changed),
    )
    kept = record.seconds(files) / LANDINGS
    first = [file for file, (_, end) in _spans(touched, record) if end <= budget - kept]
    rest = [file for file in oldest if file not in set(first)]
    due = [file for file, (start, _) in _spans(rest, record) if start < kept]
    return list(dict.fromkeys([*first, *due, *touched, *rest]))


def _spans(files: Sequence[str], record: Record) -> Iterator[tuple[str, tuple[float, float]]]:
    """When each file starts and ends, in seconds, if they run one after the other."""
    ends = itertools.accumulate((record.seconds([file]) for file in files), initial=0.0)
    return zip(files, itertools.pairwise(ends), strict=True)


def told(head: str, ran: Iterable[Case]) -> list[str]:
    """Return what a run says of its files, for `noted`: how long each took, or that it was left
    out."""
    seconds: dict[str, float] = {}
    left: set[str] = set()
    for case in ran:
        seconds[case.file] = seconds.get(case.file, 0.0) + case.seconds
        if OUT_OF_TIME in case.skipped:
            left.add(case.file)
    lines = [f"RAN {took:.1f} {file}" for file, took in sorted(seconds.items()) if file not in left]
    return [f"LANDING {head}", *lines, *(f"LEFT OUT {file}" for file in sorted(left))]


def noted(record: Record, log: str) -> Record:
    """Return the record after a landing, from the log of its run. Files that are gone leave the
    record.

    Raises ValueError if the log does not say what ran.
    """
    # A forge may put something before each line.
    said = [line.partition(" ")[2] if line.startswith(">") else line for line in log.splitlines()]
    heads = [line.removeprefix("LANDING ") for line in said if line.startswith("LANDING ")]
    if not heads:
        raise ValueError("the log has no line `LANDING COMMIT`: is it a whole log of .ci/run?")
    landing = record.landing + 1
    new = {}
    for line in said:
        if line.startswith("RAN "):
            _, seconds, file = line.split(" ", 2)
            new[file] = Ran(float(seconds), landing)
    left = {line.removeprefix("LEFT OUT ") for line in said if line.startswith("LEFT OUT ")}
    kept = {file: one for file, one in record.files.items() if file in left}
    return Record(heads[-1], kept | new)


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def _slow_files() -> list[str]:
    # One -q of pyproject.toml and one here: a line per file, "tests/e2e/test_it.py: 3".
    command = [sys.executable, "-m", "pytest", "-m", "slow", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (line.rpartition(": ") for line in done.stdout.splitlines())
    return [file for file, _, count in lines if file.endswith(".py") and count.isdigit()]


def main() -> int:
    """Command line; the exit status."""
    what, *rest = sys.argv[1:]
    head = "".join(_git("rev-parse", "HEAD"))
    record = Record.read(ROOT / SLOW)
    if what == "order":
        (budget,) = map(float, rest)
        files = _slow_files()
        changed = _git("diff", "--name-only", record.commit or "HEAD~1")
        if (needed := record.seconds(files) / LANDINGS) > budget:
            text = f"a quarter of the slow tests takes {needed:.0f} s, and {budget:.0f} are left"
            print(f"{text}: not all run within {LANDINGS} landings", file=sys.stderr)
        print("\n".join(ordered(files, changed, record, head, budget)))
        return 0
    if what == "note":
        noted(record, Path(rest[0]).read_text()).write(ROOT / SLOW)
        return 0
    found = [case for report in rest for case in cases(Path(report))]
    if what == "ran":
        print("\n".join(told(head, found)))
        return 0
    failures = {case.node: case.failure for case in found if case.failure}
    lines, allowed = judged(failures, known_flaky((ROOT / FLAKY).read_text()))
    print("\n".join(lines))
    return int(not allowed)


if __name__ == "__main__":
    sys.exit(main())
