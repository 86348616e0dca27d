"""Checks of processes that tests, or the services under test, have started."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import psutil

from tests.support.waiting import block_until


def runs(pid: int) -> bool:
    """Whether the process `pid` runs. A zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ports_of(process: subprocess.Popen[Any], port_file: Path) -> list[int]:
    """Block until a service has written the ports that it serves at, and return them.

    Raises AssertionError, with the service's output, if it ends before.
    """
    block_until(lambda: port_file.exists() or process.poll() is not None)
    assert port_file.exists(), (process.returncode, process.communicate())
    return [int(port) for port in port_file.read_text().split()]
