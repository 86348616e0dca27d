"""The twin compiled by mypyc behaves like its sources, and reports missing build requirements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.papers.twin import compiled, flexmarl, mechanisms, rollart
from benchmarks.papers.twin.speed import large_job
from testbed.twin.cluster import PublishedJob, PublishedTwin
from troupe.twin import cluster
from troupe.twin.cluster import Twin
from troupe.twin.job import TwinJob


def jobs() -> dict[str, TwinJob]:
    """Jobs in which every mode and mechanism of the twin takes part."""
    used = frozenset(mechanisms.MECHANISMS)
    return {
        **{f"ma {row}": flexmarl.job("ma", row) for row in flexmarl.ROWS},
        **{f"rollart {row}": rollart.job(one) for row, one in rollart.FEATURES.items()},
        "all mechanisms": mechanisms.job(64, used, queries_per_device=0.125),
        "none": mechanisms.job(64, frozenset(), queries_per_device=0.125),
        "large": large_job(200),
    }


def outcomes() -> dict[str, str]:
    """Everything that two steps of each job report."""
    found = {}
    for name, one in jobs().items():
        twin = PublishedTwin(one) if isinstance(one, PublishedJob) else Twin(one)
        found[name] = repr(twin.run(2).steps)
    return {"twin": str(cluster.__file__), **found}


def _outcomes_in(environment: dict[str, str]) -> dict[str, str]:
    module = "tests.benchmarks.papers.test_twin_compiled"
    program = f"from {module} import *; print(json.dumps(outcomes()))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiles nine modules, then runs large jobs twice
def test_compiled_runs_end_as_interpreted_ones() -> None:
    try:
        ready = compiled.environment()
    except SystemExit as error:
        if "install" in str(error):  # no compiler, or no mypyc
            pytest.skip(str(error))
        raise
    root = str(Path(__file__).parents[3])
    interpreted = _outcomes_in({**os.environ, "PYTHONPATH": root})
    machine_code = _outcomes_in(ready)
    assert interpreted.pop("twin").endswith(".py")
    assert not machine_code.pop("twin").endswith(".py")
    for name, steps in interpreted.items():
        assert machine_code[name] == steps, name


def test_without_a_compiler_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(SystemExit, match="no C compiler 'no-such-compiler': install gcc"):
        compiled.environment(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_new_build_replaces_the_old_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only the build that another process is making stays."""
    for name in ("0123456789abcdef", "new-of-another"):
        (tmp_path / name / "troupe").mkdir(parents=True)
    compiler = [sys.executable, "-c", "print('instead of mypyc')"]
    run = subprocess.run
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(subprocess, "run", lambda _, **options: run(compiler, **options))
    built = compiled.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)[0]
    assert {one.name for one in tmp_path.iterdir()} == {Path(built).name, "new-of-another"}
    assert (Path(built) / "troupe" / "twin" / "cluster.py").is_file()


def test_sources_that_differ_are_built_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build's name depends on the compiled sources."""
    before = compiled._key()
    assert compiled._key() == before
    monkeypatch.setattr(compiled, "MODULES", compiled.MODULES[:1])
    assert compiled._key() != before
