"""Requirements of tests that a machine may not meet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

# A library that sets the clocks of a process (Debian: libfaketime), preloaded into it.
FAKETIME_LIBRARY = next(
    iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), Path("/none")
)
FAKETIME = pytest.mark.skipif(not FAKETIME_LIBRARY.exists(), reason="libfaketime is not installed")
BUBBLEWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
