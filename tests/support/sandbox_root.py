"""The files that a sandbox on this machine shows below its private /tmp, before any write."""

from __future__ import annotations

import sys
from pathlib import Path


def shown_below_tmp() -> set[str]:
    """Return names; none unless this checkout, its interpreter or its packages are below /tmp."""
    paths = (Path(entry) for entry in [sys.base_prefix, sys.prefix, *sys.path] if entry)
    return {path.parts[2] for path in paths if path.parts[:2] == ("/", "tmp") and path.parts[2:]}
