"""The GPU benchmarks tested without a GPU: the command and each of its parts."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.gpu.__main__ import OTHERS, OWN, Failed, parts, run
from tests.benchmarks.quick import quick_run


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_on_the_device_that_it_is_told() -> None:
    assert parts("cpu", quick=True).keys() == {*OWN, *OTHERS}
    found = quick_run("gpu", "--device", "cpu", seconds=1700)
    # Only SGLang may be missing on a machine; a way of `weights` that fails is a problem too.
    here = {"TROUPE_SGLANG_PYTHON", "TROUPE_SGLANG_CPU_DIR"} & os.environ.keys()
    missing = set() if here else {"weights"}
    assert found["problems"].keys() == missing
    assert {name for name in (*OWN, *OTHERS) if not found[name]} == missing
    assert found["device"].startswith("CPU")
    assert 0 < found["update"]["mfu"] < 2
    assert found["copies"]["of_link"] > 0
    assert found["transfer"]["device"] == "cpu"
    assert found["swap"]["memcpy_ratio"] > 0


_PART = """
import sys, time
print("begins", file=sys.stderr, flush=True)
print("more than the object")
if sys.argv[1] == "hangs":
    time.sleep(600)
if sys.argv[1] == "fails":
    sys.exit("no memory")
print('{"seconds": 1.5}' if sys.argv[1] == "works" else "no object")
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A part named `made_part` can be run; what it says on its way goes here."""
    (tmp_path / "made_part.py").write_text(_PART)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return io.StringIO()


def test_output_of_a_part_is_shown_while_it_runs(said: io.StringIO) -> None:
    assert run(["made_part", "works"], 100, Console(file=said)) == {"seconds": 1.5}
    assert "begins" in said.getvalue()


@pytest.mark.parametrize(
    ("kind", "seconds", "reason"),
    [
        ("fails", 100, "begins | no memory"),
        ("hangs", 5, "took over 5 s"),
        ("babbles", 100, "its last line is not JSON"),
    ],
)
def test_a_part_that_fails_says_why(
    said: io.StringIO, kind: str, seconds: float, reason: str
) -> None:
    with pytest.raises(Failed) as raised:
        run(["made_part", kind], seconds, Console(file=said))
    assert reason in str(raised.value)
