"""A worker's work before the first request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import gc, sys, threading
gc.disable()
from services.rollout.server import warm_up
assert "transformers" not in sys.modules
warm_up()
for thread in threading.enumerate():
    if thread.name == "warm-up":
        thread.join()
import transformers
assert "services.rollout.engines.embedded.engine" in sys.modules
assert "AutoModelForCausalLM" in vars(transformers)
assert gc.isenabled() and gc.get_freeze_count() > 100_000
warm_up()
print("warm")
"""


@pytest.mark.slow
def test_libraries_are_imported_without_the_collector_which_then_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.stdout == "warm\n", done.stderr
