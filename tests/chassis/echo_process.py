"""Launches the echo service as a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ECHO = [sys.executable, str(Path(__file__).with_name("echo_service.py"))]

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch() -> Iterator[Launch]:
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **variables: object) -> subprocess.Popen[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {name: str(value) for name, value in variables.items()}
        process = subprocess.Popen(
            command or ECHO, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
