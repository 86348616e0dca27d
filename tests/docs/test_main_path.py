"""The main path of docs/where.md: every file of it is reached from the files before it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Files that a reader follows from a job's YAML to an engine with the next version.
MOST = 60


def main_path() -> list[str]:
    text = (ROOT / "docs/where.md").read_text()
    section = text.partition("## The main path\n")[2].partition("\n## ")[0]
    return re.findall(r"`([\w/]+\.py)`", section)


def imports_of(path: str) -> set[str]:
    """The modules that a file imports, or names as an import path ("module:attribute"); each name
    of `from` also as a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {match[1] for match in re.finditer(r"^([\w.]+):\w+$", node.value)}
    return found


def test_the_main_path_is_connected_and_short() -> None:
    path = main_path()
    assert len(path) == len(set(path))
    assert 40 < len(path) <= MOST
    lost = []
    for number, file in enumerate(path[1:], 1):
        before = path[:number]
        module = file.removesuffix(".py").replace("/", ".")
        package = module.rpartition(".")[0]
        exports = module in imports_of(f"{package.replace('.', '/')}/__init__.py")
        imported = any(
            module in imports_of(one) or (exports and package in imports_of(one)) for one in before
        )
        if not imported and not is_called(file, before):
            lost.append(file)
    assert not lost


def is_called(file: str, before: list[str]) -> bool:
    """Whether it is a server, and an earlier file calls one of its methods."""
    tree = ast.parse((ROOT / file).read_text())
    methods = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and node.name[0].isupper()
    }
    texts = [(ROOT / one).read_text() for one in before]
    return any(re.search(rf"\.{name}\b", text) for name in methods for text in texts)
