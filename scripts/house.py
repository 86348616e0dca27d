"""Counts of the code's layout, compared with the rules of docs/contributing.md.

Exits with 1 for what is wrong whatever the reason: circles of imports, classes of one package that
share a name, large binary files. Sizes only warn, since a ceiling that fails buys joined lines and
odd splits: the files of a folder, the lines of a file, and the lines of each package against its
budget. The table shows how each package has grown since the last landing.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

PRODUCT: Final = ("troupe", "services")
GENERATED: Final = Path("troupe/v1")
# Of the last landing, scripts/landing.py.
LANDED: Final = Path(".ci/slow.json")

MOST_FILES_OF_A_FOLDER: Final = 15
MOST_LINES_OF_A_FILE: Final = 800
MOST_BYTES_OF_A_BINARY_FILE: Final = 100_000
# The line budget of each package, with the package's tasks. A package that outgrows its budget
# should be reviewed: code may be superfluous or belong elsewhere, or the budget is wrong.
BUDGETS: Final = {
    "services/trainer": (
        19_000,
        "learners of three kinds, gangs over hosts, divided experts, crash-exact state, pairs that "
        "several policies learn together, payloads between a gang's leader and its ranks",
    ),
    "services/rollout": (
        18_000,
        "an embedded engine, two kinds of servers, each for one policy or for a team, loads before "
        "a commit, routing, trajectories",
    ),
    "services/orchestrator": (
        15_500,
        "jobs, their ends and origins, pipeline, placement, populations, records",
    ),
    "troupe/workflow": (11_500, "what users write: agents, environments, conversations, trials"),
    "services/reward": (9_700, "functions that scale from zero, sandboxes, quotas"),
    "troupe/client": (10_000, "SDK, command line with views of jobs, jobs of running programs"),
    "services/experience_store": (6_000, "samples, claims, commits, exactly once"),
    "troupe/scheduling": (6_000, "decisions without side effects, memory model, planner"),
    "troupe/transfer": (6_000, "states between processes and hosts, verified; servers' formats"),
    "troupe/job": (7_000, "the specification of a job, with every check, and its reference"),
    "troupe/twin": (5_000, "the simulator behind the planner"),
    "troupe": (4_000, "what several packages share"),
    "services/chassis": (3_500, "what every service is made of"),
    "troupe/networks": (3_500, "policies that are small networks"),
    "troupe/cluster": (3_500, "clusters on one host and on several"),
    "troupe/functions": (3_500, "ready rewards, tools, MCP, shipped code"),
    "troupe/endpoint": (3_000, "OpenAI's and Anthropic's HTTP interfaces"),
    "troupe/algorithms": (3_000, "losses, advantages, groups of steps"),
    "troupe/checkpoints": (3_000, "formats of models on disk, and the proof that one is served"),
    "troupe/populations": (2_500, "meta-solvers, payoffs, ratings"),
    "services/control_panel": (2_200, "REST and the panel's pages"),
    "troupe/data": (2_000, "rows of data sets as tasks"),
    "troupe/rpc": (2_100, "channels, errors, retries, who may call"),
    "troupe/replies": (600, "what is in a model's reply, by family of models"),
    "troupe/chat_templates": (1_000, "templates within bounds"),
    "troupe/doctor": (1_000, "checks of a host"),
    "troupe/demo": (1_100, "the example team, copies of examples, runs of recipes"),
    "troupe/recipes": (800, "published results repeated: runs, criteria, pages"),
    "troupe/processes": (800, "children: tethers, frames, ends, forks"),
    "troupe/contracts": (900, "names and files that several programs must write alike"),
    "troupe/http": (300, "bounds on what clients of HTTP servers may take"),
    "services": (100, "the refusal of another distribution named troupe"),
}
# Accepted circles of imports, by their modules, each with the reason. A part of such a circle is
# also accepted, so that it can be taken apart step by step.
EXCUSED_CIRCLES: Final[Mapping[frozenset[str], str]] = {}
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
    """Return every module of the product by its dotted name, without generated code."""
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
    """Return the product's modules that a module imports anywhere, under `if TYPE_CHECKING` too.

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
    """Return the circles that `excused` does not cover, and its entries that cover none any
    more."""
    found = list(rings)
    return (
        [ring for ring in found if not any(entry.issuperset(ring) for entry in excused)],
        [sorted(entry) for entry in excused if not any(entry.issuperset(ring) for ring in found)],
    )


def package_of(path: PurePath) -> str:
    """Return the package of the product that a file is in: troupe/job, services/trainer, troupe."""
    return "/".join(path.parts[: min(2, len(path.parts) - 1)])


def shared_class_names(product: Mapping[str, Module]) -> dict[str, list[Path]]:
    """Names of top-level classes that more than one file of a package defines."""
    places = defaultdict(list)
    for module in product.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[package_of(module.path), node.name].append(module.path)
    return {f"{where}: {name}": paths for (where, name), paths in places.items() if paths[1:]}


def growth(root: Path) -> dict[str, int]:
    """Return lines by which each package has grown since the last landing that is on record,
    uncommitted ones included; empty where git or that commit is missing."""
    since = json.loads((root / LANDED).read_text())["commit"]
    command = ["git", "diff", "--numstat", "--no-renames", since, "--", *PRODUCT]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    found: dict[str, int] = defaultdict(int)
    for line in told.splitlines():
        added, removed, name = line.split("\t")
        path = PurePath(name)
        if path.suffix == ".py" and not path.is_relative_to(GENERATED):
            found[package_of(path)] += int(added) - int(removed)
    return found


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
    """Print the counts; return 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the files behind each count")
    listed = parser.parse_args().list
    root = Path(__file__).resolve().parent.parent
    product = modules(root)
    files: dict[str, int] = defaultdict(int)
    lines: dict[str, int] = defaultdict(int)
    folders: dict[Path, int] = defaultdict(int)
    for module in product.values():
        files[package_of(module.path)] += 1
        lines[package_of(module.path)] += module.lines
        folders[module.path.parent] += 1
    grown = growth(root)
    budgets = dict.fromkeys(lines, (0, "no budget yet: add one, with its reason")) | BUDGETS
    print(f"{'package':<28}{'files':>6}{'lines':>9}{'grown':>8}{'budget':>9}")
    for name in sorted(lines, key=lambda one: -lines[one]):
        budget, reason = budgets[name]
        print(
            f"{name:<28}{files[name]:>6}{lines[name]:>9,}{grown.get(name, 0):>+8,}{budget:>9,}"
            f"  {reason}"
        )
    print(
        f"{'all':<28}{len(product):>6}{sum(lines.values()):>9,}{sum(grown.values()):>+8,}"
        f"{sum(budget for budget, _ in BUDGETS.values()):>9,}"
    )
    warnings = [
        *(
            f"{name} has {count:,} lines, its budget is {budgets[name][0]:,}"
            for name, count in lines.items()
            if count > budgets[name][0]
        ),
        *(
            f"{folder} has {count} files, more than {MOST_FILES_OF_A_FOLDER}"
            for folder, count in folders.items()
            if count > MOST_FILES_OF_A_FOLDER
        ),
        *(
            f"{module.path} has {module.lines} lines, more than {MOST_LINES_OF_A_FILE}"
            for module in product.values()
            if module.lines > MOST_LINES_OF_A_FILE
        ),
    ]
    for warning in sorted(warnings):
        print("warning:", warning)
    shared = shared_class_names(product)
    rings, needless = unexcused(
        ring
        for loading in (False, True)
        for ring in circles({n: imports(m, product, loading=loading) for n, m in product.items()})
    )
    broken = [
        *(f"class {name} is in {', '.join(map(str, at))}" for name, at in shared.items()),
        *(f"a circle of imports: {', '.join(ring)}" for ring in rings),
        *(f"EXCUSED_CIRCLES has one that is no more: {', '.join(ring)}" for ring in needless),
        *(f"{name} is a large binary file" for name in large_binary_files(root)),
    ]
    for one in sorted(broken):
        print("BROKEN:", one)
    if listed:
        for entry, reason in EXCUSED_CIRCLES.items():
            print("excused circle:", ", ".join(sorted(entry)), f"({reason})")
        for folder, count in sorted(folders.items(), key=lambda pair: -pair[1])[:12]:
            print(f"folder {folder}: {count}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
