"""The suite's own rule: a wait for something that must happen lasts `PATIENCE`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
MARK = "# deadline: "


def short_waits(source: str) -> Iterator[int]:
    """Lines of waits with a number of seconds below PATIENCE, and without a reason for it."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and any(map(_is_short, _deadlines(node))):
            end = node.end_lineno or node.lineno
            if not any(MARK in line for line in lines[node.lineno - 1 : end]):
                yield node.lineno


def _deadlines(call: ast.Call) -> list[ast.expr]:
    """The arguments that say how long `call` waits at most."""
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    place = {"wait": 0, "join": 0, "result": 0, "wait_for": 1}.get(method)
    if name == "asyncio.timeout":
        place = 0
    if place is None and method not in ("communicate", "run"):
        return []
    found = [one.value for one in call.keywords if one.arg == "timeout"]
    return found + (call.args[place : place + 1] if place is not None else [])


def _is_short(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Constant)
        and type(value.value) in (int, float)
        and float(value.value) < PATIENCE
    )


def test_waits_for_what_must_happen_are_patient() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in short_waits(path.read_text())
    ]
    assert found == [], f"wait for PATIENCE, or say after `{MARK.strip()}` why not"


def test_short_waits_are_found_and_marked_ones_are_not() -> None:
    source = (
        "process.wait(10)\n"
        "process.wait(PATIENCE)\n"
        "process.communicate(timeout=30)\n"
        "asyncio.wait_for(\n    task,\n    20,\n)\n"
        "asyncio.timeout(1.5)  # deadline: the stream has no end\n"
        "asyncio.timeout(5)\n"
        "', '.join(words)\n"
        "event.wait(timeout=600)\n"
    )
    assert list(short_waits(source)) == [1, 3, 4, 9]
