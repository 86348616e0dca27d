"""The log output of services."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import PATIENCE

PROGRAM = """
import logging, sys
from services.chassis import logs
logs.configure("test", sys.argv[1], "json")
logging.getLogger("httpx").info("a request")
logging.getLogger("httpx").warning("a fault")
logging.getLogger("troupe.other").info("an event")
"""


@pytest.mark.parametrize(("level", "requests"), [("info", False), ("debug", True)])
def test_requests_of_http_clients_are_logged_for_debugging_only(level: str, requests: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "a fault" in done.stderr
    assert "an event" in done.stderr
    assert ("a request" in done.stderr) is requests
