"""The tools of a coding agent: files, programs with a time limit, tests with a report."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE
from troupe.functions import declaration_of
from troupe.functions.library import code
from troupe.functions.library.code import read_file, run_pytest, run_python, write_files

TESTS = """
import pytest
from add import add

def test_right(): assert add(2, 2) == 4
def test_wrong(): assert add(2, 2) == 5
@pytest.mark.skip
def test_later(): ...
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
def test_error(broken): ...
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory that a sandbox would have."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_are_written_and_read_in_the_working_directory(place: Path) -> None:
    assert write_files({"a/b.py": "x = 1\ny = 2\n", "c.txt": "c"}) == ["a/b.py", "c.txt"]
    assert (place / "a/b.py").read_text() == "x = 1\ny = 2\n"
    assert read_file("a/b.py", start_line=2) == "y = 2\n"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x"])
def test_paths_that_lead_out_are_refused(path: str) -> None:
    for use in (lambda: write_files({path: ""}), lambda: read_file(path)):
        with pytest.raises(ValueError, match="leads out"):
            use()


def test_python_runs_text_and_files_and_tells_how_it_ended() -> None:
    ran = run_python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (ran["exit_code"], ran["stdout"], ran["stderr"]) == (3, "out\n", "err\n")
    write_files(
        {"lib.py": "WORD = 'four'", "main.py": "import sys, lib\nprint(lib.WORD, sys.argv)"}
    )
    ran = run_python(path="main.py", arguments=["2"])
    assert ran["stdout"].startswith("four [")
    assert run_python("import lib; print(lib.WORD)")["stdout"] == "four\n"
    with pytest.raises(ValueError, match="either code or path"):
        run_python()


def test_a_program_that_does_not_end_is_ended_with_its_children() -> None:
    began = time.monotonic()
    ran = run_python(
        "import subprocess, sys, time\n"
        "print('begun', flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n",
        seconds=1.0,
    )
    assert (ran["timed_out"], ran["stdout"]) == (True, "begun\n")
    assert ran["exit_code"] < 0
    assert time.monotonic() - began < PATIENCE


def test_output_without_end_is_drained_and_cut() -> None:
    ran = run_python(
        "import sys\nfor _ in range(400): sys.stdout.write('x' * 100_000)\nprint('end')"
    )
    assert ran["exit_code"] == 0
    assert len(ran["stdout"]) < 20_000
    assert ran["stdout"].endswith("end\n")
    assert " bytes ..." in ran["stdout"]


def test_a_child_that_keeps_the_pipe_does_not_keep_the_call() -> None:
    began = time.monotonic()
    ran = run_python(
        "import os, time\nprint('parent', flush=True)\n"
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n"
    )
    assert (ran["exit_code"], ran["stdout"]) == (0, "parent\n")
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    ("cores", "xdist"),
    [(1, True), (2, False), pytest.param(2, True, marks=pytest.mark.slow)],
)
def test_pytest_reports_the_same_however_many_cores_it_has(
    monkeypatch: pytest.MonkeyPatch, cores: int, xdist: bool
) -> None:
    monkeypatch.setenv("TROUPE_REWARD_CORES", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(code, "_has_xdist", lambda: xdist)
    more = "def test_more(): assert True\n"
    files = {"add.py": "def add(a, b): return a + b\n", "test_add.py": TESTS, "test_b.py": more}
    report = run_pytest(files=files)
    counts = [report[key] for key in ("passed", "failed", "errors", "skipped")]
    assert counts == [2, 1, 1, 1], report
    assert (report["exit_code"], report["cores"]) == (1, cores)
    assert any("test_wrong" in one["test"] for one in report["failures"])
    assert any("assert 4 == 5" in one["message"] for one in report["failures"])


@pytest.mark.slow
def test_pytest_without_tests_or_time_says_so() -> None:
    assert run_pytest()["exit_code"] == 5
    slow = {"test_slow.py": "import time\ndef test_it(): time.sleep(60)\n"}
    ended = run_pytest(["test_slow.py"], slow, seconds=2.0)
    assert ended["timed_out"]
    assert ended["passed"] == 0
    assert run_pytest(files={"test_a.py": "def test_a(): ..."}, keyword="none")["passed"] == 0


def test_the_tools_share_one_sandbox() -> None:
    cages = []
    for function in (write_files, read_file, run_python, run_pytest):
        declared = declaration_of(function)
        assert declared is not None
        assert declared.description
        cages.append({key: declared.costs[key] for key in code._SANDBOX})
    assert all(cage == cages[0] for cage in cages)
    assert cages[0]["sandbox"] == "bubblewrap"


def test_outside_of_a_sandbox_each_call_has_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    write_files({"x.py": "x = 1"})
    assert not Path("/x.py").exists()
    assert run_python("import os; print(os.listdir())")["stdout"] == "[]\n"
