"""The suite's own rule: programs that tests hold as strings define every name that they use."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]


def programs(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each string that is a Python program of several lines: one that begins
    with an import, and is not a part of an f-string."""
    tree = ast.parse(source)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in parts:
            continue
        if not isinstance(node.value, str) or "\n" not in node.value:
            continue
        text = textwrap.dedent(node.value)
        try:
            body = ast.parse(text).body
        except SyntaxError:
            continue
        if body and isinstance(body[0], ast.Import | ast.ImportFrom):
            yield node.lineno, text


def undefined(texts: dict[str, str], place: Path) -> list[str]:
    """Return ruff's findings on undefined names in the programs; `texts`: by label."""
    for label, text in texts.items():
        (place / f"{label}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    done = subprocess.run(
        [*command, "--select", "F821", "--output-format", "concise", str(place)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if "F821" in line]


def test_programs_in_tests_define_every_name_that_they_use(tmp_path: Path) -> None:
    texts = {
        f"{str(path.relative_to(ROOT).with_suffix('')).replace('/', '.')}-{line}": text
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, text in programs(path.read_text())
    }
    assert len(texts) > 20
    assert undefined(texts, tmp_path) == []


def test_an_undefined_name_is_found_in_a_string(tmp_path: Path) -> None:
    source = (
        'GOOD = """\nimport os\nprint(os.getpid())\n"""\nBAD = """import os\nprint(PATIENCE)\n"""'
    )
    found = undefined({f"at-{line}": text for line, text in programs(source)}, tmp_path)
    assert len(found) == 1
    assert "PATIENCE" in found[0]
    assert "at-5" in found[0]
