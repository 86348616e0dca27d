"""Modules that are run as programs."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("troupe", "services", "testbed", "benchmarks", "scripts", "examples")


def test_a_program_begins_after_all_that_its_module_defines() -> None:
    """Code below the call of `main` does not exist while it runs: ranks that were to copy their
    states ended with a NameError."""
    early = []
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if "__main__" in (text := path.read_text()):
            guards = (one for one in ast.parse(text).body[:-1] if isinstance(one, ast.If))
            early += [path for one in guards if "'__main__'" in ast.unparse(one.test)]
    assert not early
