"""The other project named `troupe` is refused, with the commands that mend the environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
THEIRS = "[console_scripts]\ntroupe = troupe.cli:main\n"
OURS = "[console_scripts]\ntroupe = troupe.client.cli.app:main\n"


def installed(folder: Path, entry_points: str | None) -> Path:
    """A folder with the metadata of a distribution `troupe`, as pip leaves it."""
    metadata = folder / "troupe-0.5.2.dist-info"
    metadata.mkdir(parents=True)
    if entry_points is not None:
        (metadata / "entry_points.txt").write_text(entry_points)
    return folder


def python(*arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    """Run Python outside the checkout, with `path` before the installed packages."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=path[0],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("entry_points", [THEIRS, None], ids=["with_command", "without_command"])
def test_import_with_the_other_project_installed_fails_with_a_remedy(
    tmp_path: Path, entry_points: str | None
) -> None:
    done = python("-c", "import troupe", path=[installed(tmp_path, entry_points), ROOT])
    assert done.returncode != 0
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"ImportError: the package troupe 0.5.2 in {tmp_path}")
    assert "`pip uninstall troupe`" in line
    assert "`pip install --force-reinstall --no-deps troupe-rl`" in line


def test_command_with_the_other_project_installed_ends_in_one_line(tmp_path: Path) -> None:
    command = installed(tmp_path, THEIRS) / "troupe"
    command.write_text("from troupe.client.cli.app import main\nraise SystemExit(main())\n")
    done = python(str(command), "--version", path=[tmp_path, ROOT])
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("error: the package troupe 0.5.2")


@pytest.mark.parametrize("module", ["troupe.client", "services.chassis"])
def test_other_project_installed_over_this_one_is_refused(tmp_path: Path, module: str) -> None:
    """Its `troupe/__init__.py` has replaced ours."""
    for package in ("troupe", "services"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "troupe/__init__.py").write_text('__version__ = "0.5.2"\n')
    done = python("-c", f"import {module}", path=[installed(tmp_path, THEIRS)])
    assert "ImportError: the package troupe 0.5.2" in done.stderr


def test_this_project_under_its_former_name_is_accepted(tmp_path: Path) -> None:
    done = python("-c", "import troupe", path=[installed(tmp_path, OURS), ROOT])
    assert done.returncode == 0, done.stderr
