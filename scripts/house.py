"""Counts of the code's layout, held against the rules of docs/contributing.md.

Prints a table of the product's files and lines, the files of each folder, the lines of each file,
classes that share a name, circles of imports, and large binary files. Exits with 1 when a rule is
broken. The totals have no limit: a ceiling on the present count buys joined lines, not a smaller
product.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PRODUCT: Final = ("troupe", "services")
GENERATED: Final = Path("troupe/v1")

MOST_FILES_OF_A_FOLDER: Final = 16
MOST_LINES_OF_A_FILE: Final = 800
MOST_SHARED_CLASS_NAMES: Final = 0
MOST_BYTES_OF_A_BINARY_FILE: Final = 100_000
# Circles of imports that stay, by their modules, each with the reason. A part of such a circle is
# excused too, so that it can be taken apart step by step.
EXCUSED_CIRCLES: Final[Mapping[frozenset[str], str]] = {
    frozenset(
        {
            "services.orchestrator.context",
            "services.orchestrator.pipeline.metrics",
            "services.orchestrator.placement.engine_balancer",
            "services.orchestrator.placement.engines",
            "services.orchestrator.placement.shared_servers",
            "services.orchestrator.placement.trainer_lease",
            "services.orchestrator.placement.trainer_scheduler",
            "services.orchestrator.state.trajectories",
        }
    ): "being removed: issue 43 splits the lease of a trainer and takes SplitWatch out of metrics",
}
# Larger binary files that belong to the repository.
LARGE_BINARY_FILES: Final = {"docs/figures/panel.png", "docs/figures/panel-conversations.png"}


@dataclass(frozen=True)
class Module:
    """A source file of the product, parsed."""

    name: str
    path: Path
    lines: int
    tree: ast.Module


def modules(root: Path) -> dict[str, Module]:
    """Every module of the product by its dotted name, without generated code."""
    found = {}
    for top in PRODUCT:
        for path in sorted((root / top).rglob("*.py")):
            inner = path.relative_to(root)
            if inner.is_relative_to(GENERATED):
                continue
            text = path.read_text()
            name = ".".join(inner.with_suffix("").parts).removesuffix(".__init__")
            found[name] = Module(name, inner, text.count("\n"), ast.parse(text, str(inner)))
    return found


def imports(module: Module, known: Iterable[str], *, loading: bool = False) -> set[str]:
    """The product's modules that a module imports anywhere, under `if TYPE_CHECKING` too.

    `loading`: only those that Python runs while it loads the module, with the packages that they
    are in; functions import theirs later, and type checkers need no order.
    """
    known = set(known)
    targets: set[str] = set()
    skipped: set[int] = set()
    for node in ast.walk(module.tree) if loading else ():
        match node:
            case ast.If(test, body) if ast.unparse(test).endswith("TYPE_CHECKING"):
                pass
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                pass
            case _:
                continue
        skipped |= {id(inner) for part in body for inner in ast.walk(part)}
    for node in ast.walk(module.tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                targets.add(inner if inner in known else node.module)
    if loading:
        packages = {name.rsplit(".", count)[0] for name in targets for count in range(1, 9)}
        targets |= {one for one in packages if not module.name.startswith(f"{one}.")}
    return (targets & known) - {module.name}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for start in sorted(graph):
        if start in index:
            continue
        work = [(start, iter(sorted(graph[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    component, stack[cut:] = stack[cut:], []
                    on_stack -= set(component)
                    if len(component) > 1:
                        found.append(sorted(component))
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                on_stack.add(target)
                work.append((target, iter(sorted(graph[target]))))
            elif target in on_stack:
                low[node] = min(low[node], index[target])
    return found


def unexcused(
    rings: Iterable[list[str]], excused: Mapping[frozenset[str], str] = EXCUSED_CIRCLES
) -> tuple[list[list[str]], list[list[str]]]:
    """The circles that `excused` does not cover, and its entries that cover none any more."""
    found = list(rings)
    return (
        [ring for ring in found if not any(entry.issuperset(ring) for entry in excused)],
        [sorted(entry) for entry in excused if not any(entry.issuperset(ring) for ring in found)],
    )


def shared_class_names(product: Mapping[str, Module]) -> dict[str, list[Path]]:
    """Names of top-level classes that more than one file defines."""
    places = defaultdict(list)
    for module in product.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def large_binary_files(root: Path) -> list[str]:
    """Tracked binary files above the limit that the list does not name; git calls a file binary
    that has a null byte among its first 8,000."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    found = []
    for name in filter(None, listed.split("\0")):
        path = root / name
        if name in LARGE_BINARY_FILES or not path.is_file():
            continue
        with path.open("rb") as file:
            if path.stat().st_size > MOST_BYTES_OF_A_BINARY_FILE and b"\0" in file.read(8_000):
                found.append(name)
    return found


def main() -> int:
    """Prints the counts; 1 when a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files behind each count")
    listed = parser.parse_args().list
    root = Path(__file__).resolve().parent.parent
    product = modules(root)
    folders: dict[Path, int] = defaultdict(int)
    for module in product.values():
        folders[module.path.parent] += 1
    shared = shared_class_names(product)
    rings, needless = unexcused(
        ring
        for loading in (False, True)
        for ring in circles({n: imports(m, product, loading=loading) for n, m in product.items()})
    )
    binaries = large_binary_files(root)
    longest = max(product.values(), key=lambda module: module.lines)
    fullest = max(folders, key=lambda folder: folders[folder])
    print(f"{'files':<30}{len(product):>8,}")
    print(f"{'lines':<30}{sum(module.lines for module in product.values()):>8,}")
    rows: list[tuple[str, int, int, str]] = [
        ("files of the fullest folder", folders[fullest], MOST_FILES_OF_A_FOLDER, str(fullest)),
        ("lines of the longest file", longest.lines, MOST_LINES_OF_A_FILE, str(longest.path)),
        ("class names used twice", len(shared), MOST_SHARED_CLASS_NAMES, ""),
        ("circles of imports", len(rings), 0, "; ".join(map(", ".join, rings))),
        ("excuses without a circle", len(needless), 0, "; ".join(map(", ".join, needless))),
        ("large binary files", len(binaries), 0, ", ".join(binaries)),
    ]
    for what, count, most, where in rows:
        verdict = "" if count <= most else "  BROKEN"
        print(f"{what:<30}{count:>8,}  at most {most:>8,}{verdict}  {where}".rstrip())
    if listed:
        for entry, reason in EXCUSED_CIRCLES.items():
            print("excused circle:", ", ".join(sorted(entry)), f"({reason})")
        for name, paths in sorted(shared.items()):
            print(f"class {name}:", ", ".join(map(str, paths)))
        for folder, count in sorted(folders.items(), key=lambda pair: -pair[1])[:12]:
            print(f"folder {folder}: {count}")
    return int(any(count > most for _, count, most, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
