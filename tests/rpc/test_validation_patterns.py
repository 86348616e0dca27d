"""Patterns that decide whether a text is taken: a newline at its end is part of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from troupe.client.discovery import check_address
from troupe.job import JobSpecError, parse_job
from troupe.rpc import InvalidArgument

ROOT = Path(__file__).parents[2]
# Functions of `re` that take a pattern, and do not look at the whole text by themselves.
_TAKING = {"compile", "match", "search"}


def patterns() -> Iterator[tuple[str, str]]:
    """Where a pattern for `re` is written, and the pattern."""
    for folder in ("troupe", "services", "simulator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                owner = node.func.value
                if not (isinstance(owner, ast.Name) and owner.id == "re" and node.args):
                    continue
                first = node.args[0]
                if node.func.attr in _TAKING and isinstance(first, ast.Constant):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", str(first.value)


def test_no_pattern_of_re_ends_with_a_dollar() -> None:
    """`$` matches before a newline at the end, so `match` takes "name\\n" for "name". Use
    `fullmatch`, or `\\Z`. (pydantic's patterns are Rust's, whose `$` is the end.)"""
    found = dict(patterns())
    assert len(found) > 20
    assert not {where: one for where, one in found.items() if one.endswith("$")}


@pytest.mark.parametrize(
    "address", ["localhost:50051\n", "localhost:\u0665\u0660", "host:1\nhost:2"]
)
def test_an_address_is_a_line(address: str) -> None:
    with pytest.raises(InvalidArgument):
        check_address(address)


SPEC = """
name: team
workflow: team:solve
tasks: {source: "team:Tasks"}
agents: {solver: {policy: big}}
policies: {big: {model: {path: big}}}
pipeline: {steps: 10, queries_per_step: 4}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: team", 'name: "team\\n"'),
        ("workflow: team:solve", 'workflow: "team:solve\\n"'),
        ('source: "team:Tasks"', 'source: "team:Tasks\\n"'),
        ("{solver:", '{"solver\\n":'),
        ("{big: {model: {path: big}}}", '{"big\\n": {model: {path: big}}}'),
        ("steps: 10", 'steps: 10, required_columns: ["score\\n"]'),
        ("path: big}}", 'path: big}, engine: {kind: sglang, urls: ["http://h:1/x\\n"]}}'),
    ],
)
def test_names_in_a_job_are_lines(old: str, new: str) -> None:
    parse_job(SPEC)
    assert old in SPEC
    with pytest.raises(JobSpecError):
        parse_job(SPEC.replace(old, new))
