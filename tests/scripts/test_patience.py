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
        if isinstance(node, ast.Call):
            short = any(map(_is_short, _deadlines(node)))
            end = node.end_lineno or node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            short = any(_default_of(node, name) for name in _waits_for(node))
            end = node.body[0].lineno - 1
        else:
            continue
        if short and not any(MARK in line for line in lines[node.lineno - 1 : end]):
            yield node.lineno


def _waits_for(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that say how long a wait in `function` lasts."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    return {one.id for call in calls for one in _deadlines(call) if isinstance(one, ast.Name)}


def _default_of(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> bool:
    """Return whether a parameter of that name has a short default."""
    given = function.args
    places = given.posonlyargs + given.args
    pairs = [*zip(places[::-1], given.defaults[::-1], strict=False)]
    pairs += [
        (one, value)
        for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if value
    ]
    return any(one.arg == name and _is_short(value) for one, value in pairs)


def _deadlines(call: ast.Call) -> list[ast.expr]:
    """The arguments that say how long `call` waits at most."""
    name = ast.unparse(call.func)
    if name == "asyncio.to_thread":  # the call that it makes
        return _deadlines(ast.Call(call.args[0], call.args[1:], call.keywords))
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
        "def ended(handle, seconds=90):\n    handle.wait(timeout=seconds)\n"
        "async def gone(*, limit: float = 15):\n    await asyncio.wait(tasks, timeout=limit)\n"
        "asyncio.to_thread(process.wait, 30)\n"
        "def slow(seconds=1):\n    time.sleep(seconds)\n"
    )
    assert sorted(short_waits(source)) == [1, 3, 4, 9, 12, 14, 16]
