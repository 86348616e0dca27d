"""Every code block of the tutorials is run, in the order of the pages, in an empty directory.

What trains on this machine trains for as many steps as the page says, and has to learn.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.support.tutorials import code_blocks
from troupe.cluster.daemon import stop_running
from troupe.cluster.settings import DEFAULT_PANEL_PORT
from troupe.cluster.state import running_state
from troupe.job import parse_job

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/tutorials"
# The first makes the models of the others.
PAGES = ["first-team", "your-agent", "your-data", "gpu", "cluster", "not-learning"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

# The job that shows a run without a signal.
HOPELESS = "hopeless.yaml"
# A row of a summary: a score before and after, each with its interval.
SCORE = re.compile(
    r"(?m)^ ?(?P<name>[\w@/-]+) +(?P<before>\S+) \[\S+, (?P<highest>\S+)\]"
    r" +(?P<after>\S+) \[(?P<lowest>\S+), \S+\] +[+-]\S+ *$"
)

# In place of pip: nothing is installed, and the named packages must already exist.
PIP = """#!{python}
import re, sys
from importlib.metadata import distribution

extras = {extras!r}
assert sys.argv[1] == "install", sys.argv
for text in sys.argv[2:]:
    if text.startswith(("--index-url", "https://")):
        continue  # of torch's CPU build
    name, _, of = text.partition("[")
    assert name != "troupe-rl" or of.rstrip("]") in extras, text
    distribution(re.split("[=<>]", name)[0])
"""


@pytest.fixture(scope="module", autouse=True)
def panel_port() -> Iterator[None]:
    """Holds the default port of panels: clusters that start at once, here and in other tests,
    would compete for it."""
    with socket.socket() as held:
        with suppress(OSError):
            held.bind(("127.0.0.1", DEFAULT_PANEL_PORT))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the reader stands; `bin` has `troupe`, `pip` and `python` of this checkout. Jobs of all
    pages run on the cluster that the first one leaves."""
    here = tmp_path_factory.mktemp("reader")
    (here / "bin").mkdir()
    (here / "bin/pip").write_text(PIP.format(python=sys.executable, extras=sorted(EXTRAS)))
    (here / "bin/troupe").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m troupe.client.cli "$@"\n'
    )
    (here / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for command in ("pip", "troupe", "python"):
        (here / "bin" / command).chmod(0o755)
    yield here
    if running_state(here / "runs") is not None:  # pages were run alone, or one has failed
        stop_running(here / "runs")


def run(script: str, place: Path) -> str:
    """Return the output of a page's script; fail if the script fails."""
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TROUPE_ROOT": str(ROOT)}
    variables["COLUMNS"] = "120"  # so that no row of a table is wrapped
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=place,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
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


def test_only_the_demo_is_run_with_fewer_steps_than_its_page_says() -> None:
    """The demo learns in a test of its own, which takes longer than all the others."""
    texts = [block.text for page in PAGES for block in code_blocks(FOLDER / f"{page}.md")]
    shortened = [text for text in texts if "pipeline.steps=" in text]
    assert [text.split()[:2] for text in shortened] == [["troupe", "demo"]]


def test_the_jobs_of_all_pages_share_one_cluster_which_the_last_page_stops() -> None:
    pages = [page for page in PAGES if page != "gpu"]  # needs another machine
    texts = [block.text for page in pages for block in code_blocks(FOLDER / f"{page}.md")]
    commands = [line for text in texts for line in text.splitlines()]
    trained = [line for line in commands if line.startswith("troupe train ")]
    assert len(trained) >= 5
    assert all("--keep-up" in line for line in trained[:-1])
    assert commands[commands.index(trained[-1]) + 1] == "troupe down"


def check_learned(printed: str) -> None:
    """Every held-out score is higher after training, by more than both intervals."""
    rows = list(SCORE.finditer(printed))
    assert rows, printed[-4000:]
    for row in rows:
        assert float(row["lowest"]) > float(row["highest"]), printed[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_and_every_job_learns(page: str, place: Path) -> None:
    if page != PAGES[0] and not (place / "runs/models/reasoning_team-0/solver").is_dir():
        run("python -m troupe.demo.warm_start --out runs/models/reasoning_team-0", place)
    for block in code_blocks(FOLDER / f"{page}.md"):
        if block.name is not None:
            (place / block.name).write_text(block.text)
            continue
        printed = run(block.text, place)
        if HOPELESS in block.text and "troupe train" in block.text:
            assert "nothing was learned" in printed
            assert "signal       writer 0 of 3 steps" in printed
        elif "troupe train" in block.text:
            check_learned(printed)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_demo_learns_at_its_defaults(place: Path) -> None:
    check_learned(run("troupe demo", place))
