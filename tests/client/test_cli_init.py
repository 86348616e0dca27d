"""`troupe init`: the project that it makes validates, plays in its test, and trains on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.conftest import Run
from tests.support.waiting import PATIENCE
from troupe.job import load_job

ROOT = Path(__file__).resolve().parents[2]


def do(directory: Path, *command: str, seconds: float = PATIENCE) -> str:
    """Run Python in a project, as a user does; return its output. Asserts that it succeeds."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_project_is_whole_and_knows_nothing_of_the_examples(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "My Team"
    status, out, err = run("init", str(target))
    assert (status, err) == (0, "")
    assert f"cd '{target}'" in out
    assert "troupe train job.yaml" in out
    names = {path.name for path in target.iterdir()}
    assert names == {"README.md", "job.yaml", "model.py", "tasks.jsonl", "team.py", "test_team.py"}
    assert not [path for path in target.iterdir() if "examples" in path.read_text()]
    job = load_job(target / "job.yaml")
    assert (job.name, job.workflow) == ("my-team", "team:solve")

    status, _, err = run("init", str(target))
    assert status == 2
    assert "is not an empty directory" in err
    file = tmp_path / "file"
    file.write_text("")
    assert run("init", str(file))[0] == 2
    (tmp_path / "empty").mkdir()
    assert run("init", str(tmp_path / "empty"))[0] == 0


def test_a_project_plays_in_its_own_test(run: Run, tmp_path: Path) -> None:
    assert run("init", str(tmp_path / "team"))[0] == 0
    out = do(tmp_path / "team", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "2 passed" in out


@pytest.mark.slow
def test_a_project_validates_and_learns_on_the_cpu(run: Run, tmp_path: Path) -> None:
    project = tmp_path / "team"
    assert run("init", str(project))[0] == 0
    do(project, "model.py")
    command = ("-m", "troupe.client.cli")
    assert "is a valid job" in do(project, *command, "job", "validate", "job.yaml", "--imports")
    # deadline: a cluster starts and trains twenty steps, in half a minute if it has two cores
    out = do(project, *command, "train", "job.yaml", "--job-id", "mine", seconds=10 * PATIENCE)
    found = re.search(r"team_success +(\S+) \[.*\] +(\S+) \[", out)
    assert found is not None, out
    assert float(found[2]) > float(found[1]) + 0.2
    # Its cluster has stopped; its texts and metrics are there.
    said = do(project, *command, "conversations", "mine", "--evaluation", "--limit", "1", "--full")
    assert re.search(r"checker\[1\]\n +user: \d or \d\? \d", said)
    assert "checker version 20" in said
    name = "evaluation/team/mean"
    assert name in do(project, *command, "jobs", "metrics", "mine", "--names", name)
