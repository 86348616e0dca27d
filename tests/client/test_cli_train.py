"""`troupe train` as a user runs it: real processes, real signals, services that play."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.client.project import Project, read_until
from tests.support.waiting import PATIENCE
from troupe.client.cli.app import main
from troupe.cluster.daemon import stop_running
from troupe.cluster.state import ClusterState, running_state

Capture = pytest.CaptureFixture[str]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose cluster runs already."""
    project = Project(tmp_path_factory.mktemp("standing") / "project")
    status, out, err = project.run("up", "--detach")
    assert (status, err) == (0, "")
    assert re.search(r"^panel +http://127\.0\.0\.1:\d+$", out, re.M)
    yield project
    stop_running(project.runs)


@pytest.fixture
def run_here(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run_here(project, ...)`: a command in this process; quicker, where no signal comes."""

    def run(project: Project, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(project.directory)
        monkeypatch.delenv("TROUPE_DATA_DIR", raising=False)
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


def test_a_job_from_file_to_summary(project: Project) -> None:
    status, out, err = project.run("train", "job.yaml", "--set", "pipeline.steps=2")

    assert (status, err) == (0, "")
    assert re.search(r"^evaluation before step 1 \| team 0\.250$", out, re.M)
    assert re.search(
        r"^step 1/2 \| reward solver 0\.500 checker 0\.250 team 0\.500 \| "
        r"solver v1 loss 0\.100 grad 1\.50 \| checker v0 loss - grad - \| "
        r"900 tok/s \| eta 0s$",
        out,
        re.M,
    )
    assert re.search(r"^step 2/2 ", out, re.M)
    assert re.search(r"team_success +0\.250 +0\.875 +\+0\.625", out)
    assert re.search(r"^metrics +\S+/metrics\.jsonl$", out, re.M)
    assert re.search(r"^tensorboard +tensorboard --logdir \S+/tensorboard$", out, re.M)
    assert re.search(r"^checkpoints +\S+/checkpoints/solver/v3$", out, re.M)
    assert re.search(r"^panel +troupe up --data-dir \S+\Z", out.strip(), re.M)
    assert project.gone()


def test_ctrl_c_pauses_stops_everything_and_the_job_goes_on_later(project: Project) -> None:
    # So many steps that the job cannot end before the signal arrives.
    process = project.start("train", "job.yaml", "--job-id", "mine", "--set", "pipeline.steps=5000")
    read_until(process, r"^step 2/5000")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)

    assert (process.returncode, err) == (130, "")
    assert "pausing the job after its step" in out
    assert f"resume with: troupe train --resume mine --data-dir {project.runs}" in out
    assert project.gone()
    jobs = (project.runs / "fake-jobs" / "mine.job").read_bytes()
    assert jobs

    process = project.start("train", "--resume", "mine")
    out = read_until(process, r"^step \d+/5000")
    assert "job mine is running" in out
    assert "step 1/5000" not in out  # told in the first run
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert project.gone()


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_step(project: Project) -> None:
    project.rename_job("deaf")
    process = project.start("train", "job.yaml", "--set", "pipeline.steps=5000", "--grace", "60")
    read_until(process, r"^step 1/5000")
    process.send_signal(signal.SIGINT)
    read_until(process, "pausing the job")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    assert "committed steps stay" in out
    assert "resume with:" in out
    assert project.gone()


def test_ctrl_c_while_the_cluster_starts(project: Project) -> None:
    process = project.start("train", "job.yaml")
    read_until(process, "starting a cluster")
    time.sleep(0.3)  # some moment of the start; any will do
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)

    assert (process.returncode, err) == (130, "")
    assert running_state(project.runs) is None


@pytest.mark.slow
def test_the_death_of_the_orchestrator_does_not_end_the_training(project: Project) -> None:
    process = project.start("train", "job.yaml", "--set", "pipeline.steps=25")
    read_until(process, r"^step 3/25")
    state = running_state(project.runs)
    assert state is not None
    os.kill(_pid(state, "orchestrator"), signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE)

    assert (process.returncode, err) == (0, "")
    assert "orchestrator was killed by SIGKILL; restarting it" in out
    assert "orchestrator is back" in out
    assert re.search(r"^step 25/25 ", out, re.M)
    assert project.gone()


def test_a_failed_job_is_one_line_and_status_1(standing: Project) -> None:
    standing.rename_job("doomed")
    status, out, err = standing.run("train", "job.yaml")

    assert status == 1
    assert re.fullmatch(
        r"error: policies\.solver\.model\.path = /models/solver: job \S+ failed: no such directory"
        r"\.\n",
        err,
    )
    assert "doomed" in out


def test_a_cluster_that_runs_is_used_and_left_running(standing: Project, run_here: Run) -> None:
    standing.rename_job("team")
    process = standing.start("train", "job.yaml", "--job-id", "mine", "--set", "pipeline.steps=500")
    out = read_until(process, r"^step 1/500")
    assert "using the running cluster in" in out
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    assert "the job keeps running; `troupe jobs watch mine` shows it" in out
    status, out, _ = run_here(standing, "status", "--json")
    report = json.loads(out)
    assert status == 0
    assert all(s["healthy"] and s["memory_bytes"] > 2**20 for s in report["services"])
    assert len(report["services"]) == 7
    status, out, _ = run_here(standing, "status")
    assert status == 0
    assert re.search(r"orchestrator +healthy +127\.0\.0\.1:\d+", out)
    status, out, _ = run_here(standing, "jobs", "list", "--json")
    assert {job["id"]: job["state"] for job in json.loads(out)}["mine"] == "running"
    assert run_here(standing, "jobs", "pause", "mine") == (0, "mine is pausing\n", "")


@pytest.mark.slow
def test_keep_up_leaves_the_cluster_until_down(project: Project, run_here: Run) -> None:
    status, out, err = project.run("train", "job.yaml", "--keep-up")
    assert (status, err) == (0, "")
    state = running_state(project.runs)
    assert state is not None
    assert re.search(rf"^panel +{state.panel_url}$", out, re.M)

    status, out, err = run_here(project, "down")
    assert (status, err) == (0, "")
    assert project.gone()
    for command in (("status",), ("down",), ("jobs", "list")):
        status, _, err = run_here(project, *command)
        assert status == 1
        assert "no cluster runs in this directory. Start one with `troupe up`" in err


@pytest.mark.slow
def test_up_in_the_foreground_ends_with_ctrl_c(project: Project) -> None:
    process = project.start("up", "--no-panel")
    read_until(process, "Ctrl-C stops it")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)

    assert (process.returncode, err) == (0, "")
    assert project.gone()


def test_a_service_that_cannot_start_is_one_line_and_status_1(project: Project) -> None:
    project.runs.mkdir()
    (project.runs / "broken-rollout").touch()
    status, _, err = project.run("train", "job.yaml")

    assert status == 1
    assert err.count("\n") == 1
    assert "service = rollout-0: exited with status 3" in err
    assert "rollout-0.log" in err


def test_on_a_terminal_the_picture_stays_in_place(standing: Project) -> None:
    standing.rename_job("team")
    master, slave = pty.openpty()
    process = standing.start(
        "train", "job.yaml", "--set", "pipeline.steps=4", stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)

    assert process.wait(PATIENCE) == 0
    text = shown.decode()
    assert "training reward per step" in text
    assert "\x1b[" in text
    assert "█" in text
    assert "step 4/4" in text
    assert "+0.625" in text


def _pid(state: ClusterState, name: str) -> int:
    pid = next(s.pid for s in state.services if s.name == name)
    assert pid is not None
    return pid
