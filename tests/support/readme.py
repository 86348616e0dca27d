"""The job on the README's first page."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def readme_job() -> str:
    """The job of the README's first page."""
    found = re.search(r"```yaml\n# job.yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found is not None
    return found[1]
