"""Records of a landing for the next: flaky tests, times of slow tests, and a clean tree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import house, leftovers
from scripts.landing import (
    LANDINGS,
    OUT_OF_TIME,
    Case,
    Ran,
    Record,
    cases,
    judged,
    known_flaky,
    noted,
    ordered,
    relevance,
    told,
)
from tests.support.waiting import PATIENCE

REPO = Path(__file__).resolve().parents[2]
ROOMS = ("trainer", "trainer/gang", "rollout", "transfer", "e2e")
FILES = [f"tests/{room}/test_{room.replace('/', '_')}_{n}.py" for room in ROOMS for n in range(5)]
SOURCES = ["services/trainer/gang/rank.py", "services/rollout/router.py", "troupe/transfer/blob.py"]
CHANGE = st.lists(st.sampled_from([*SOURCES, *FILES]), max_size=9)
SECONDS = st.fixed_dictionaries({file: st.floats(1, 300) for file in FILES})


def landed(
    record: Record, seconds: dict[str, float], changed: Sequence[str], head: str, budget: float
) -> tuple[Record, set[str]]:
    """Return the record after a landing that runs files in order until its time is over, and the
    files."""
    now, ran, reports = 0.0, set(), []
    for file in ordered(FILES, changed, record, head, budget):
        # As in CI, a file that starts before the end of the time runs to its end.
        begins = now < budget
        if begins:
            now += seconds[file]
            ran.add(file)
        reports.append(Case(file, "test", seconds[file], "", "" if begins else OUT_OF_TIME))
    said = told(head, reports)
    assert {line[9:] for line in said if line.startswith("LEFT OUT ")} == set(FILES) - ran
    return noted(record, "\n".join(["pytest's own lines", *said])), ran


@settings(max_examples=25)
@given(
    seconds=SECONDS,
    share=st.floats(1 / LANDINGS, 1.2),
    changes=st.lists(
        st.lists(st.sampled_from([*SOURCES, *FILES]), max_size=9), min_size=8, max_size=8
    ),
)
def test_every_slow_test_runs_once_in_four_landings(
    seconds: dict[str, float], share: float, changes: list[list[str]]
) -> None:
    record = Record("", {file: Ran(took, 0) for file, took in seconds.items()})
    budget = share * sum(seconds.values()) + 1e-3
    runs: list[set[str]] = []
    for number, changed in enumerate(changes):
        record, ran = landed(record, seconds, changed, f"head-{number}", budget)
        runs.append(ran)
    for first in range(len(runs) - LANDINGS + 1):
        assert set.union(*runs[first : first + LANDINGS]) == set(FILES)


def test_tests_of_changed_folders_run_first() -> None:
    record = Record("c", {file: Ran(10, 9) for file in FILES})
    changed = ["services/trainer/gang/rank.py", "tests/e2e/test_e2e_3.py"]
    order = ordered(FILES, changed, record, "head", 1_000)
    assert order[0] == "tests/e2e/test_e2e_3.py"
    assert all("/gang/" in file for file in order[1:6])
    assert all("/trainer/" in file or "/e2e/" in file for file in order[6:15])
    assert sorted(order) == sorted(FILES)


def test_files_that_are_equally_old_run_in_an_order_of_the_commit() -> None:
    orders = {tuple(ordered(FILES, [], Record("", {}), f"head-{n}", 60)) for n in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize(
    ("changed", "test", "shared"),
    [
        ("services/trainer/gang/lending.py", "tests/trainer/gang/test_gang.py", 2),
        ("services/trainer/step.py", "tests/trainer/gang/test_gang.py", 1),
        ("troupe/transfer.py", "tests/transfer/test_deaths.py", 1),
        ("services/trainer/step.py", "tests/rollout/test_x.py", 0),
        ("docs/operating.md", "tests/docs/test_site.py", 1),
    ],
)
def test_a_changed_file_touches_the_tests_of_its_folders(
    changed: str, test: str, shared: int
) -> None:
    assert relevance(test, [changed]) == shared


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = Record("abc", {"tests/e2e/test_x.py": Ran(12.5, 3)})
    record.write(tmp_path / "slow.json")
    assert Record.read(tmp_path / "slow.json") == record
    assert Record.read(tmp_path / "missing.json") == Record("", {})


def test_a_log_is_noted_with_a_mark_before_each_line_too() -> None:
    said = told("abc", [Case("tests/e2e/test_x.py", "test", 2.04, "", "")])
    marked = "\n".join(f"> {line}" for line in ["== done", *said])
    assert noted(Record("", {}), marked) == Record("abc", {"tests/e2e/test_x.py": Ran(2.0, 1)})
    with pytest.raises(ValueError, match="LANDING COMMIT"):
        noted(Record("", {}), "== slow tests\n")


SUITE = """
import pytest

@pytest.mark.parametrize("text", ["a b", "c::d"])
def test_fails(text):
    assert text == "other"

def test_passes():
    pass

def test_late():
    pytest.skip("the time of this run is over: run it by hand")

@pytest.fixture
def broken():
    raise OSError("no such device")

def test_error(broken):
    pass
"""


def test_a_report_tells_what_failed_and_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(SUITE)
    options = ["--junitxml=r.xml", "-o", "junit_family=xunit1", "--rootdir=."]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, "tests"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        timeout=PATIENCE,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    found = {case.node: case for case in cases(tmp_path / "r.xml")}
    prefix = "tests/test_it.py::"
    assert "assert" in found[f"{prefix}test_fails[a b]"].failure
    assert "assert" in found[f"{prefix}test_fails[c::d]"].failure
    assert "no such device" in found[f"{prefix}test_error"].failure
    assert not found[f"{prefix}test_passes"].failure
    assert OUT_OF_TIME in found[f"{prefix}test_late"].skipped


def test_a_test_that_is_flaky_again_fails_the_run() -> None:
    known = known_flaky("# a comment\n\ntests/a.py::test_a[x y]  TimeoutError\n")
    assert known == {"tests/a.py::test_a[x y]"}
    new = {"tests/b.py::test_b": "assert None is not None"}
    lines, allowed = judged(new, known)
    assert allowed
    assert lines[0] == "FLAKY tests/b.py::test_b  assert None is not None"
    assert known_flaky(lines[1].partition(": ")[2]) == set(new)
    lines, allowed = judged({"tests/a.py::test_a[x y]": "TimeoutError"}, known)
    assert not allowed
    assert "mend it now" in lines[1]
    assert judged({}, known) == (["FLAKY none"], True)


def test_the_list_of_flaky_tests_names_tests_that_exist() -> None:
    for node in known_flaky((REPO / ".ci/flaky.txt").read_text()):
        file, _, name = node.partition("::")
        assert f"def {name.partition('[')[0]}(" in (REPO / file).read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "kept").write_text("1")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_files_that_a_suite_leaves_in_the_tree_are_found(checkout: Path) -> None:
    (checkout / "mine").write_text("before the suite")
    before = leftovers.state(checkout)
    assert leftovers.left(before, leftovers.state(checkout)) == []
    (checkout / "ignored").mkdir()
    (checkout / "ignored/x").touch()
    (checkout / "new folder").mkdir()
    (checkout / "new folder/a state").write_bytes(bytes(10))
    (checkout / "kept").write_text("2")
    (checkout / "mine").write_text("changed by the suite")
    found = leftovers.left(before, leftovers.state(checkout))
    assert sorted(found) == ["kept", "mine", "new folder/a state"]


def test_large_binary_files_are_found(checkout: Path) -> None:
    limit = house.MOST_BYTES_OF_A_BINARY_FILE
    (checkout / "state").write_bytes(bytes(limit + 1))
    (checkout / "small").write_bytes(bytes(limit))
    (checkout / "text").write_text("x" * 2 * limit)
    subprocess.run(["git", "add", "."], cwd=checkout, check=True)
    assert house.large_binary_files(checkout) == ["state"]


def test_outside_a_checkout_nothing_is_left(tmp_path: Path) -> None:
    assert leftovers.state(tmp_path) == []
    assert house.large_binary_files(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["", "-n 1 --dist loadfile --no-loadscope-reorder"])
def test_a_run_follows_the_order_of_files(tmp_path: Path, workers: str) -> None:
    (tmp_path / "tests").mkdir()
    hook = "from tests.conftest import pytest_collection_modifyitems, pytest_runtest_setup"
    (tmp_path / "conftest.py").write_text(hook)
    for name in "abcd":
        note = f"def test_it():\n    open('ran', 'a').write('{name}')\n"
        (tmp_path / f"tests/test_{name}.py").write_text(note)
    (tmp_path / "order").write_text("".join(f"tests/test_{name}.py\n" for name in "cdab"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir=.", *workers.split(), "tests"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TROUPE_TESTS_ORDER": "order", "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "ran").read_text() == "cdab"
