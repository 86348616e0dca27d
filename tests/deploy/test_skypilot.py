"""deploy/skypilot: its tasks are valid, and their commands start the right processes.

SkyPilot is installed in an environment of its own, since it pins much. TROUPE_SKYPILOT_PYTHON
names one that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
TASKS = sorted((ROOT / "deploy/skypilot").glob("*.yaml"))
VERSION = "0.14.1"

READ = """
import json, sys
import sky
import yaml
with open(sys.argv[1]) as file:
    told = yaml.safe_load(file)
given = [(name, "t") for name in told.get("secrets", {})] or None
task = sky.Task.from_yaml_config(told, secrets_overrides=given)
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, sorted(task.secrets)]))
"""

task = pytest.mark.parametrize("file", TASKS, ids=lambda file: file.stem)


@pytest.fixture(scope="module")
def skypilot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has SkyPilot."""
    if known := os.environ.get("TROUPE_SKYPILOT_PYTHON"):
        return known
    place = tmp_path_factory.mktemp("skypilot")
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    python = str(place / "bin/python")
    got = subprocess.run(
        [python, "-m", "pip", "install", "-q", f"skypilot=={VERSION}"],
        capture_output=True,
        text=True,
    )
    if got.returncode:
        pytest.skip(f"SkyPilot cannot be installed: {got.stderr[-300:]}")
    return python


@pytest.mark.slow
@pytest.mark.timeout(900)
@task
def test_skypilot_reads_it(skypilot: str, file: Path, tmp_path: Path) -> None:
    env = os.environ | {"HOME": str(tmp_path), "PYTHONPATH": ""}
    got = subprocess.run(
        [skypilot, "-c", READ, str(file)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert got.returncode == 0, got.stderr
    nodes, accelerators, secrets = json.loads(got.stdout.splitlines()[-1])
    assert accelerators == {"H100": 8}
    several = "num_nodes" in _read(file)
    assert (nodes, secrets) == ((2, ["TROUPE_TOKEN"]) if several else (1, []))


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


@task
def test_commands_are_shell_and_take_no_secret_as_an_argument(file: Path) -> None:
    told = _read(file)
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=told[part], text=True, check=True)
        assert not any("TOKEN" in line for line in told[part].splitlines() if " troupe " in line)
    assert all((ROOT / path).is_file() for name, path in told["envs"].items() if name == "JOB")


FAKES = {
    # A head and a node run until they are stopped; a job ends after they have started.
    "troupe": 'trap "echo ended $1 >>$LOG; exit" TERM; echo "troupe $@" >>"$LOG"; case $1 in '
    "head|node) while :; do /bin/sleep 0.05; done;; "
    'train) [ "$3" != --cluster ] || until grep -q node "$LOG" && grep -q "troupe head" "$LOG"; do '
    '/bin/sleep 0.05; done; exit "${TRAINED:-0}";; esac',
    # The head answers from the second probe on, until it was asked GONE times.
    "python": 'n=$(cat "$LOG.n" 2>/dev/null || echo 0); echo $((n + 1)) >"$LOG.n"; '
    '[ "$n" -ge 1 ] && [ "$n" -lt "${GONE:-999}" ]',
    "sleep": "exec /bin/sleep 0.01",
    "seq": "echo 1 2 3",
}


def _run(tmp_path: Path, file: str, **env: str) -> tuple[int, list[str]]:
    """Status and commands of a task's run on one machine, with stand-ins for what it starts."""
    binaries = tmp_path / "troupe-venv/bin"
    binaries.mkdir(parents=True)
    (binaries / "activate").write_text(f'PATH="{binaries}:$PATH"\n')
    for name, body in FAKES.items():
        (binaries / name).write_text(f"#!/bin/bash\n{body}\n")
        (binaries / name).chmod(0o755)
    log = tmp_path / "log"
    done = subprocess.run(
        ["bash", "-c", _read(ROOT / "deploy/skypilot" / file)["run"]],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "LOG": str(log),
            "JOB": "job.yaml",
            "TROUPE_TOKEN": "t",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            **env,
        },
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, log.read_text().splitlines()


def test_the_first_machine_is_head_and_node_and_ends_with_the_job(tmp_path: Path) -> None:
    status, log = _run(tmp_path, "cluster.yaml", SKYPILOT_NODE_RANK="0")
    assert status == 0
    assert sorted(log[:3]) == [
        "troupe head --host 0.0.0.0",
        "troupe node --head 10.0.0.1:50051",
        "troupe train job.yaml --cluster 10.0.0.1:50051",
    ]
    assert sorted(log[3:]) == ["ended head", "ended node"]


def test_a_job_that_fails_fails_the_task(tmp_path: Path) -> None:
    status, log = _run(tmp_path, "cluster.yaml", SKYPILOT_NODE_RANK="0", TRAINED="3")
    assert status == 3
    assert "ended head" in log


def test_other_machines_are_nodes_until_the_head_is_gone(tmp_path: Path) -> None:
    status, log = _run(tmp_path, "cluster.yaml", SKYPILOT_NODE_RANK="1", GONE="40")
    assert status == 0
    assert log[0] == "troupe node --head 10.0.0.1:50051"
    assert log[1:] == ["ended node"]


def test_without_a_head_a_machine_gives_up(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    status, log = _run(tmp_path, "cluster.yaml", SKYPILOT_NODE_RANK="1", GONE="0")
    assert (status, log) == (1, [])


def test_without_a_token_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    status, log = _run(tmp_path, "cluster.yaml", SKYPILOT_NODE_RANK="0", TROUPE_TOKEN="")
    assert (status, log) == (1, [])


def test_a_cluster_of_one_machine_trains(tmp_path: Path) -> None:
    status, log = _run(tmp_path, "one-node.yaml")
    assert (status, log) == (0, ["troupe train job.yaml --panel --panel-port 8080"])
