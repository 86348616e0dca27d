"""What a machine may lack that some tests need."""

from __future__ import annotations

import shutil

import pytest

BUBBLEWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
