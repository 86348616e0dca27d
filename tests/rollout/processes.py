"""Runs a service as the process that users run, for tests that need its neighbours for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


class ServiceProcess:
    """`python -m services.<name>` on a free loopback port."""

    def __init__(self, name: str, directory: Path, settings: Mapping[str, str] | None = None):
        self._name = name
        self._directory = directory
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def start(self) -> None:
        """Start, or start again on the port that it had."""
        port_file = self._directory / f"{self._name}.port"
        port_file.unlink(missing_ok=True)
        port = self.address.rpartition(":")[2] or "0"
        environment = {
            **os.environ,
            "TROUPE_PORT_FILE": str(port_file),
            "TROUPE_PORT": port,
            "TROUPE_PARENT_PID": str(os.getpid()),
            "TROUPE_DRAIN_SECONDS": "1",
            **self._settings,
        }
        with (self._directory / f"{self._name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"services.{self._name}"],
                cwd=ROOT,
                env=environment,
                stderr=log,
            )
        deadline = time.monotonic() + PATIENCE
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = (self._directory / f"{self._name}.log").read_text()[-3000:]
                raise RuntimeError(f"{self._name} does not serve:\n{tail}")
            time.sleep(0.02)
        self.address = f"127.0.0.1:{port_file.read_text().split()[0]}"

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in order."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(PATIENCE)
