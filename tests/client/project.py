"""A directory of a user, for tests of commands and programs that run in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.stub_services import write_stub_services
from tests.support.waiting import PATIENCE
from troupe.cluster.state import is_alive, read_state, running_state

JOB_YAML = """
name: team
workflow: "team:solve"
tasks: {source: "tasks:Tasks"}
agents:
  solver: {policy: solver}
  checker: {policy: checker}
policies:
  solver: {model: {path: /models/solver}}
  checker: {model: {path: /models/checker}}
pipeline: {steps: 3, queries_per_step: 4}
"""
ROOT = Path(__file__).resolve().parents[2]


class Project:
    """A user's directory with a job file; runs commands in it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.runs = directory / "runs"
        write_stub_services(directory, playing=True)
        (directory / "job.yaml").write_text(JOB_YAML)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TROUPE_")},
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
        }

    def start(self, *arguments: str, **settings: object) -> subprocess.Popen[str]:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        return subprocess.Popen(
            [sys.executable, "-m", "troupe.client.cli", *arguments],
            cwd=self.directory,
            env=self.environment,
            text=True,
            **settings,  # type: ignore[call-overload]
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def rename_job(self, name: str) -> None:
        """Rename the job: the playing orchestrator treats "doomed" and "deaf" jobs specially."""
        (self.directory / "job.yaml").write_text(JOB_YAML.replace("name: team", f"name: {name}"))

    def gone(self) -> bool:
        """Return whether nothing of the last cluster is left."""
        state = read_state(self.runs)
        assert state is not None
        left = any(is_alive(s.pid, s.created) for s in state.services)
        return running_state(self.runs) is None and not left


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the lines of stdout up to the first that matches."""
    assert process.stdout is not None
    seen = ""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        seen += line
        if re.search(pattern, line):
            return seen
        assert line, f"ended before {pattern!r}:\n{seen}"
    raise AssertionError(f"no line {pattern!r} within {PATIENCE} s:\n{seen}")
