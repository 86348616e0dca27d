"""Every code block of the tutorials is run, in the order of the pages, in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.tutorials import code_blocks
from troupe.job import parse_job

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/tutorials"
# The first makes the models of the others.
PAGES = ["first-team", "your-agent", "your-data", "gpu", "cluster", "not-learning"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# In the place of pip: nothing is installed, what is named has to be here already.
PIP = """#!{python}
import re, sys
from importlib.metadata import distribution

extras = {extras!r}
assert sys.argv[1] == "install", sys.argv
for text in sys.argv[2:]:
    name, _, of = text.partition("[")
    assert name != "troupe" or of.rstrip("]") in extras, text
    distribution(re.split("[=<>]", name)[0])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader stands; `bin` has `troupe`, `pip` and `python` of this checkout."""
    here = tmp_path_factory.mktemp("reader")
    (here / "bin").mkdir()
    (here / "bin/pip").write_text(PIP.format(python=sys.executable, extras=sorted(EXTRAS)))
    (here / "bin/troupe").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m troupe.client.cli "$@"\n'
    )
    (here / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for command in ("pip", "troupe", "python"):
        (here / "bin" / command).chmod(0o755)
    return here


def run(script: str, place: Path) -> str:
    """What a script of a page printed; fails with it."""
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TROUPE_ROOT": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=place,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-4000:]}"
    return done.stdout


def test_all_pages_are_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_are_files_or_commands_and_jobs_are_valid(page: str) -> None:
    blocks = code_blocks(FOLDER / f"{page}.md")
    assert [block for block in blocks if block.name is None]
    for block in blocks:
        if block.name and block.name.endswith(".yaml"):
            parse_job(block.text)
        elif block.name and block.name.endswith(".py"):
            compile(block.text, block.name, "exec")
        elif block.name:
            assert all(isinstance(yaml.safe_load(row), dict) for row in block.text.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page: str, place: Path) -> None:
    if page != PAGES[0] and not (place / "runs/models/reasoning_team-0/solver").is_dir():
        run("python -m troupe.demo.warm_start --out runs/models/reasoning_team-0", place)
    for block in code_blocks(FOLDER / f"{page}.md"):
        if block.name is not None:
            (place / block.name).write_text(block.text)
        else:
            run(block.text, place)
