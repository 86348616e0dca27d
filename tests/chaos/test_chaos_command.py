"""`troupe chaos` on a real team: nothing lost, nothing twice, the same weights to the bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import tiny_team
from tests.support.waiting import PATIENCE
from troupe.client.cli.app import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for number, (name, hidden) in enumerate({"solver": 32, "checker": 16}.items()):
        tiny_team.make_model(directory / name, hidden=hidden, seed=number)
    return directory


def start(directory: Path, models: Path, steps: int, *arguments: str) -> subprocess.Popen[str]:
    job = directory / "job.yaml"
    over = {"pipeline.steps": steps, "evaluation.queries": 0, "pipeline.early_start": True}
    job.write_text(tiny_team.job(models, **over))
    command = [sys.executable, "-m", "troupe.client.cli", "chaos", str(job), "--no-panel"]
    return subprocess.Popen(
        [*command, "--data-dir", str(directory / "runs"), "--json", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_team_under_fire_ends_as_one_left_alone(tmp_path: Path, models: Path) -> None:
    process = start(tmp_path, models, 60, "--kills", "15", "--seed", "4", "--max-minutes", "14")
    out, _ = process.communicate()
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, out
    assert report["kills"] >= 15
    assert (report["lost"], report["duplicated"], report["bitwise_equal"]) == (0, 0, True)
    assert (report["job"], report["steps"], report["resumed"]) == ("succeeded", 60, 0)
    assert report["trained"] == 60 * 4 * 8 * 3  # steps, queries, trajectories, turns
    assert report["violations"] == report["troubles"] == []
    assert len(report["faults"]) >= 4
    assert "nothing lost, nothing duplicated; final weights bitwise equal" in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_power_cut_changes_nothing(tmp_path: Path, models: Path) -> None:
    arguments = ("--kills", "0", "--power-off", "2", "--faults", "kill", "--max-minutes", "14")
    process = start(tmp_path, models, 12, *arguments)
    out, _ = process.communicate()
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 0, out
    assert (report["power_offs"], report["steps"]) == (2, 12)
    assert (report["lost"], report["duplicated"], report["bitwise_equal"]) == (0, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_cluster(tmp_path: Path, models: Path, number: signal.Signals) -> None:
    process = start(tmp_path, models, 500, "--no-baseline", "--kills", "100")
    assert process.stdout is not None
    while "killed" not in (line := process.stdout.readline()):
        assert line, "it ended before the first kill"
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(number)
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number
    assert "interrupted: the cluster is stopped" in out
    _, left = psutil.wait_procs(family, timeout=PATIENCE)
    assert left == []


@pytest.mark.slow
def test_when_the_time_is_up_it_stops_and_says_so(tmp_path: Path, models: Path) -> None:
    started = time.monotonic()
    process = start(tmp_path, models, 5000, "--no-baseline", "--max-minutes", "0.5")
    out, _ = process.communicate()
    report = json.loads(out.splitlines()[-1])
    assert process.returncode == 1
    assert report["cut_short"]
    assert "the time limit passed before the job ended" in out
    assert time.monotonic() - started < 200


def test_bad_arguments_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(tiny_team.job(tmp_path))
    assert main(["chaos", str(job), "--faults", "kill,earthquake"]) == 2
    error = capsys.readouterr().err
    assert "--faults = kill,earthquake: 'earthquake' is not a kind of fault." in error
    (tmp_path / "runs" / "disturbed").mkdir(parents=True)
    assert main(["chaos", str(job), "--data-dir", str(tmp_path / "runs")]) == 2
    assert "this directory has an earlier run" in capsys.readouterr().err
    assert main(["chaos", str(tmp_path / "nothing.yaml")]) == 2
    assert "nothing.yaml" in capsys.readouterr().err
