"""Launches the echo service as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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


def wait_for(path: Path, process: subprocess.Popen[str]) -> tuple[int, int]:
    end = time.monotonic() + 20
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
    grpc_port, metrics_port = path.read_text().split()
    return int(grpc_port), int(metrics_port)
