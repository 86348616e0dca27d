"""`troupe slurm`: its script, its refusals, and a job on a real Slurm that loses a node.

The real one needs a tool named by TROUPE_SLURM_TOOL with the verbs `up DIR NODES GPUS` and
`down DIR`, whose configuration is DIR/slurm.conf.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.tiny_team import job, make_model
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TOOL = os.environ.get("TROUPE_SLURM_TOOL")
JOB = "troupe/demo/job.yaml"


def troupe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "troupe.client.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_dry_run_prints_a_script_and_writes_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "a shared 'place'"
    options = ["--nodes", "4", "--time", "2-00:00:00", "--sbatch=--qos=high", "--dry-run"]
    done = troupe("slurm", JOB, "--shared-dir", str(shared), "--job-id", "team", *options)
    assert done.returncode == 0, done.stderr
    checked = subprocess.run(["bash", "-n"], input=done.stdout, text=True, capture_output=True)
    assert not checked.returncode, checked.stderr
    lines = done.stdout.splitlines()
    for line in ("--nodes=4", "--gpus-per-node=8", "--time=2-00:00:00", "--qos=high", "--requeue"):
        assert f"#SBATCH {line}" in lines
    # Slurm reads options up to the first command.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any("#SBATCH" in line for line in lines[first:])
    assert not shared.exists()
    assert "--colocate" not in done.stdout
    turns = ["--set", "pipeline.mode=sync", "--set", "pipeline.colocate=true", "--dry-run"]
    done = troupe("slurm", JOB, "--shared-dir", str(shared), *turns)
    assert "--devices-per-trainer 1 --colocate" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--time", "tomorrow"], "--time"),
        (["--sbatch=qos"], "--sbatch"),
        (["--job-id", "a/b"], "--job-id"),
        (["--nodes", "0"], "--nodes"),
        (["--notice", "1"], "--notice"),
        (["--set", "pipeline.steps=-1"], "pipeline.steps"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str) -> None:
    done = troupe("slurm", JOB, "--dry-run", *options)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_slurm_the_remedy_is_said(tmp_path: Path) -> None:
    done = troupe("slurm", JOB, "--shared-dir", str(tmp_path / "s"), PATH=str(tmp_path))
    assert done.returncode != 0
    assert "--dry-run" in done.stderr
    assert not (tmp_path / "s").exists()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A real Slurm of three nodes with two pretended GPUs each; runs its commands."""
    if TOOL is None:
        pytest.skip("TROUPE_SLURM_TOOL names no tool that starts a Slurm")
    place = tmp_path / "slurm"
    subprocess.run([TOOL, "up", str(place), "3", "2"], check=True, timeout=600)

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            env={**os.environ, "SLURM_CONF": str(place / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.stdout + done.stderr

    run.place = place  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        run("scancel", "--full", "--user=root")
        _until(lambda: not run("squeue", "-h").strip(), 60, "Slurm to be empty", quiet=True)
        subprocess.run([TOOL, "down", str(place)], check=False, timeout=PATIENCE)
        for process in _daemons(str(place / "slurm.conf")):
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_goes_on_when_a_node_dies_and_the_allocation_is_requeued(
    slurm: Callable[..., str], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    make_model(tmp_path / "solver", hidden=32, seed=1)
    make_model(tmp_path / "checker", hidden=16, seed=2)
    text = yaml.safe_load(job(tmp_path))
    text["pipeline"] |= {"steps": 60, "mode": "sync"}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(text))
    conf = str(slurm.place / "slurm.conf")  # type: ignore[attr-defined]
    done = troupe(
        *("slurm", str(file), "--nodes", "3", "--gpus-per-node", "2"),
        *("--shared-dir", str(shared), "--notice", "30"),
        SLURM_CONF=conf,
        TROUPE_DEVICES="2xPretended-80GB",
    )
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[3]
    output = shared / f"slurm-{number}.out"

    def said() -> str:
        return output.read_text() if output.exists() else ""

    try:
        _until(lambda: "step 2" in said(), 400, "two steps")
        seen = _devices()
        assert {name for name, _ in seen} == {"n1", "n2", "n3"}
        for name in ("n1", "n2", "n3"):
            mine = sorted(devices for node, devices in seen if node == name)
            assert mine == ["0", "1"], seen
        # A host is lost: its slurmd, and all that it ran.
        for process in [*_daemons(conf, "n3"), *_processes("n3")]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        slurm("scontrol", "requeue", number)
        # The host is back, empty.
        with (tmp_path / "slurmd.log").open("w") as log:
            subprocess.Popen(
                ["slurmd", "-D", "-N", "n3"],
                env={**os.environ, "SLURM_CONF": conf},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _until(lambda: "Restarts=1" in slurm("scontrol", "show", "job", number), 120, "a restart")
        _until(lambda: slurm("squeue", "-h", "-j", number).strip() == "", 600, "the end")
        assert "JobState=COMPLETED" in slurm("scontrol", "show", "job", number)
    except BaseException:
        print(said()[-8000:], slurm("squeue"), slurm("sinfo"))
        raise
    record = shared / "jobs" / "tiny"
    assert record.is_dir()
    assert "succeeded" in said(), said()[-4000:]
    # The head's Redis outlives the allocation: the samples are audited from it.
    token = {"TROUPE_TOKEN": (shared / "token").read_text()}
    place = ["--data-dir", str(shared / "head")]
    up = troupe(
        *("head", "--detach", "--no-panel", "--host", "127.0.0.1", "--port", "23456", *place),
        *("--jobs-dir", str(shared / "jobs")),
        **token,
    )
    assert up.returncode == 0, up.stderr
    try:
        audit = troupe("jobs", "audit", "tiny", *place, **token)
        assert audit.returncode == 0, audit.stdout + audit.stderr
    finally:
        troupe("down", *place)


def _daemons(conf: str, node: str = "") -> list[psutil.Process]:
    """The daemons of a Slurm by its configuration: a node's, or all."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            if command[:1] not in (["slurmd"], ["slurmctld"]):
                continue
            if process.environ().get("SLURM_CONF") == conf and (not node or command[-1] == node):
                found.append(process)
    return found


def _processes(node: str) -> list[psutil.Process]:
    """The processes that a node of Slurm runs: all nodes are on this machine."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("SLURMD_NODENAME") == node:
                found.append(process)
    return found


def _devices() -> list[tuple[str, str]]:
    """Node and CUDA_VISIBLE_DEVICES of each worker."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environment = process.environ()
            worker = {"services.rollout", "services.trainer"} & set(process.cmdline())
            if worker and (node := environment.get("SLURMD_NODENAME")):
                found.append((node, environment.get("CUDA_VISIBLE_DEVICES", "")))
    return found


def _until(
    condition: Callable[[], bool], seconds: float, what: str, *, quiet: bool = False
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            assert quiet, f"waited {seconds:g} s for {what}"
            return
        time.sleep(0.5)
