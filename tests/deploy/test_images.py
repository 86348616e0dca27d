"""An image installs all packages that its modules import.

A service's image has the packages of `deploy/requirements/SERVICE.txt`, a user's program at least
the packages of `troupe` without extras. Developers have all packages, so that other tests do not
notice when an import needs more.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_wheel import needed

from scripts.lock import LOCKS

ROOT = Path(__file__).resolve().parents[2]

# Imports the modules that standard input names; code of this repository can only import packages of
# the distributions in the arguments. Other code is not restricted.
IMPORT = """
import importlib, sys, traceback
from importlib.metadata import packages_distributions

from packaging.utils import canonicalize_name

installed = {"troupe-rl", *sys.argv[1:]}
others = {
    package
    for package, distributions in packages_distributions().items()
    if not installed & set(map(canonicalize_name, distributions))
}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in others:
            return None
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("importlib"):
            frame = frame.f_back
        if frame.f_globals["__name__"].startswith(("troupe.", "services.", "testbed.")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for module in sys.stdin.read().split():
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        print(module, traceback.format_exc(), sep="\\n")
"""


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Names and files of the modules below a package of this repository."""
    for file in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def imported_later(file: Path) -> Iterator[str]:
    """Modules of this repository that functions in a file import when they are called."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or not node.col_offset:
            continue
        if node.module.partition(".")[0] in ("troupe", "services", "testbed"):
            yield node.module


def missing(names: Collection[str], distributions: Collection[str]) -> str:
    """Tracebacks of the modules among `names` that need more than `distributions`."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, *distributions],
        input="\n".join(names),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("image", sorted(LOCKS.keys() - {"dev", "reasoning-gym"}))
def test_a_service_imports_what_its_image_installs(image: str) -> None:
    lines = (ROOT / "deploy" / "requirements" / f"{image}.txt").read_text().splitlines()
    pinned = [canonicalize_name(Requirement(line).name) for line in lines if line[:1].isalnum()]
    held = dict(modules(f"services.{image.replace('-', '_')}"))
    assert len(held) > 5
    later = {name for file in held.values() for name in imported_later(file)}
    assert missing(sorted(held.keys() | later), pinned) == ""


def test_a_users_program_needs_no_extras() -> None:
    held = dict(modules("troupe.client")) | dict(modules("troupe.workflow"))
    assert missing(sorted({*held, "troupe.twin.profile"}), needed("")) == ""


def test_a_package_that_is_missing_is_found() -> None:
    found = missing(["troupe.twin.cluster"], needed(""))
    assert found.startswith("troupe.twin.cluster")
    assert "No module named 'simpy'" in found
