"""Names in the documentation exist: variables, metrics, files, fields of a job, Python."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

from troupe.client.cli.app import app
from troupe.job import JobSpec

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
SCHEMA = JobSpec.model_json_schema()
COMMANDS: Mapping[str, Any] = vars(typer.main.get_command(app))["commands"]
page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pytest.fixture(scope="module")
def source() -> str:
    """Yield all files except documentation."""
    kinds = ("*.py", "*.proto", "*.y*ml", "*.toml", "*.lua", "*.js", "Makefile", "deploy", ".ci")
    command = ["git", "grep", "-hI", "", "--", *kinds]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def named(page: Path, pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, page.read_text(encoding="utf-8"))))


@page
def test_environment_variables_are_read_somewhere(page: Path, source: str) -> None:
    for name in named(page, r"TROUPE_[A-Z0-9_]+"):
        setting = name.removeprefix("TROUPE_").lower()
        assert name in source or re.search(rf"\b{setting}\b", source), name


@page
def test_metrics_are_counted_somewhere(page: Path, source: str) -> None:
    for name in named(page, r"`(troupe_[a-z0-9_]+)`"):
        # Prometheus's suffixes; models' suffixes are composed.
        stem = re.sub(r"_(total|bucket|sum|count)$", "", name)
        assert stem in source or name.startswith("troupe_reward_model_"), name


@page
def test_files_exist(page: Path) -> None:
    if page.name == "compare.md":
        return  # It names files of other repositories.
    for name in named(page, r"`((?:services|troupe|tests|benchmarks|examples|scripts)/[\w./-]+)`"):
        assert (ROOT / name).exists(), name


@page
def test_names_that_docs_give_for_a_module_exist_in_it(page: Path) -> None:
    module = r"`((?:services|troupe|testbed|tests|benchmarks|scripts)/[\w./-]+\.py)`"
    text = page.read_text(encoding="utf-8")
    pairs = re.findall(rf"`([A-Za-z_]\w*)` in {module}", text)
    pairs += [(name, path) for path, name in re.findall(rf"{module} \(`([A-Za-z_]\w*)`\)", text)]
    assert [pair for pair in pairs if pair[0] not in (ROOT / pair[1]).read_text()] == []


def test_the_table_of_commands_has_every_command_and_no_other() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").replace(r"\|", "/")
    listed: set[str] = set()
    for code in re.findall(r"`(.+?)`", "".join(re.findall(r"(?m)^\| (`troupe .*?) \|", page))):
        first, *rest = code.removeprefix("troupe ").split()
        if hasattr(COMMANDS[first], "commands"):
            listed |= {f"{first} {name}" for name in rest[0].split("/")}
        else:
            listed.add(first)
    assert listed == set(every_command(COMMANDS))


@page
def test_fields_of_a_job_exist(page: Path) -> None:
    for name in named(page, r"`([a-z_]+(?:\.[A-Za-z_]+)+)(?::[^`]*)?`"):
        first, *rest = name.split(".")
        if first in SCHEMA["properties"]:
            assert is_field([SCHEMA], [first, *rest]), name


@page
def test_python_in_docs_parses_and_imports_existing_names(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("troupe"):
                module = importlib.import_module(node.module or "")
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


def every_command(commands: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Yield the full name of each command."""
    for name, command in commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command.commands, f"{name} ")
        elif not command.hidden:
            yield group + name


def is_field(nodes: Iterable[dict[str, Any]], path: list[str]) -> bool:
    """Whether `path` leads somewhere from one of these schemas."""
    if not path:
        return True
    following: list[dict[str, Any]] = []
    for node in (found for one in nodes for found in alternatives(one)):
        names = node.get("properties", {})
        others = node.get("additionalProperties")
        if path[0] in names:
            following.append(names[path[0]])
        if isinstance(others, dict):
            following.append(others)
        elif node.get("type") == "object" and not names and others is not False:
            return True
        if isinstance(node.get("items"), dict):
            following.append(node["items"])
    return bool(following) and is_field(following, path[1:])


def alternatives(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a schema without references, and its alternatives."""
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    yield node
    for kind in ("anyOf", "oneOf", "allOf"):
        for one in node.get(kind, []):
            yield from alternatives(one)


def test_a_field_that_there_is_not_is_found() -> None:
    assert is_field([SCHEMA], ["policies", "solver", "model", "path"])
    assert not is_field([SCHEMA], ["pipeline", "stps"])
