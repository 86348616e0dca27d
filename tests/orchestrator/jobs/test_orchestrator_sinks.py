"""Sinks that exit, raise anything or hang: notices, and the rows arrive where they can."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import threading
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.orchestrator.jobs import sinks as module
from services.orchestrator.jobs.sinks import Sinks
from tests.support.cluster import job_yaml
from tests.support.hostile import HALF, UnsayableError, leaf_errors, nested_group
from tests.support.waiting import PATIENCE
from troupe.job import parse_job
from troupe.outcomes import type_name
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

ROOT = Path(__file__).resolve().parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def row(step: int) -> orchestrator_pb.MetricsLogged:
    return orchestrator_pb.MetricsLogged(step=step, values={"reward/mean": step / 10})


class Tool:
    """A module named wandb: what its calls do is the test's."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.logged: list[int] = []
        self.finished = False
        self.on_init: Callable[[], Any] = lambda: None
        self.on_log: Callable[[], Any] = lambda: None
        self.on_finish: Callable[[], Any] = lambda: None

    def init(self, **how: Any) -> Tool:
        self.on_init()
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.on_log()
        self.logged.append(step)

    def finish(self) -> None:
        self.on_finish()
        self.finished = True


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tool]:
    tool = Tool()
    wandb = types.ModuleType("wandb")
    wandb.init = tool.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(module, "SINK_WAIT_SECONDS", PATIENCE)
    yield tool
    tool.released.set()


class FileFirst(Sinks):
    """Sinks of which the file of metrics is waited for as long as it takes, and the others
    `brief` seconds more."""

    brief = 0.3

    async def _wait(self, answers: Any) -> None:
        file = [done for feed, done in answers.items() if feed.name == "JsonLines"]
        await asyncio.wait(file, timeout=PATIENCE)
        await asyncio.wait(answers.values(), timeout=self.brief)


SPEC = parse_job(job_yaml(logging__wandb_project="p", logging__tensorboard=False))


def make(tmp_path: Path) -> Sinks:
    return Sinks(SPEC, "job", tmp_path)


def raises(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def lines(tmp_path: Path) -> list[int]:
    return [
        json.loads(one)["step"] for one in (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1]
    ]


ERRORS = [*leaf_errors(), UnsayableError(), nested_group(SystemExit(HALF), 3)]


@pytest.mark.parametrize("error", ERRORS, ids=type_name)
async def test_an_exception_of_a_sink_becomes_a_notice(
    tmp_path: Path, tool: Tool, error: BaseException
) -> None:
    tool.on_init = raises(error)
    sinks = make(tmp_path)
    (trouble,) = await sinks.open([row(0)])
    assert trouble.startswith("no Weights & Biases: ")
    trouble.encode()
    assert await sinks.write(row(1)) == []
    assert await sinks.close() == []
    assert lines(tmp_path) == [0, 1]


async def test_errors_of_a_sink_are_reported_for_every_call(tmp_path: Path, tool: Tool) -> None:
    sinks = make(tmp_path)
    assert await sinks.open([row(0)]) == []
    tool.on_log, tool.on_finish = raises(SystemExit(2)), raises(KeyboardInterrupt())
    for step in (1, 2):
        assert await sinks.write(row(step)) == ["Weights & Biases: UserCodeExit: SystemExit: 2"]
    assert await sinks.close() == ["Weights & Biases: UserCodeExit: KeyboardInterrupt"]
    assert (tool.logged, lines(tmp_path)) == ([0], [0, 1, 2])


async def test_a_sink_that_hangs_is_reported_once_and_gets_its_rows_later(
    tmp_path: Path, tool: Tool
) -> None:
    tool.on_init = tool.released.wait
    sinks = FileFirst(SPEC, "job", tmp_path)
    late = ["Weights & Biases does not answer: the job continues, and its rows wait"]
    assert await sinks.open([row(0)]) == late
    assert await sinks.write(row(1)) == []
    assert lines(tmp_path) == [0, 1]
    tool.released.set()
    sinks.brief = PATIENCE
    assert await sinks.write(row(2)) == []
    assert await sinks.close() == []
    assert (tool.logged, tool.finished) == ([0, 1, 2], True)


async def test_steps_do_not_wait_for_one_that_is_late_already(tmp_path: Path, tool: Tool) -> None:
    """Its server may be away for hours, and a step be shorter than the wait."""
    tool.on_init = tool.released.wait
    sinks = FileFirst(SPEC, "job", tmp_path)
    assert len(await sinks.open([row(0)])) == 1
    sinks.brief = 3600.0
    async with asyncio.timeout(PATIENCE):
        for step in (1, 2, 3):
            assert await sinks.write(row(step)) == []
    tool.released.set()
    assert await sinks.close() == [], "closing waits for it"
    assert (tool.logged, tool.finished) == ([0, 1, 2, 3], True)
    assert lines(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("hanging", ["on_log", "on_finish"])
async def test_a_sink_that_hangs_for_too_long_is_given_up(
    tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch, hanging: str
) -> None:
    call_in_thread = module.call_in_thread

    async def limited(function: Any, *arguments: Any, seconds: float) -> Any:
        sink, call = getattr(function, "__self__", None), getattr(function, "__name__", "")
        hangs = isinstance(sink, module.Wandb) and call == {"on_log": "write"}.get(hanging, "close")
        return await call_in_thread(function, *arguments, seconds=0.1 if hangs else seconds)

    monkeypatch.setattr(module, "call_in_thread", limited)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", PATIENCE)
    setattr(tool, hanging, tool.released.wait)
    sinks = make(tmp_path)
    troubles = await sinks.open([row(0)]) + await sinks.write(row(1)) + await sinks.close()
    assert troubles == ["Weights & Biases is given up: it did not end within 0.1 s"]
    assert lines(tmp_path) == [0, 1]


# In a separate process with wandb: two jobs at once, alternating rows, a resumed job.
OFFLINE = """
import asyncio, sys, time
from pathlib import Path

sys.path.append(sys.argv[1])  # last: what this environment has comes from there
from services.orchestrator.jobs import sinks as module
from services.orchestrator.jobs.sinks import Sinks
from tests.support.cluster import job_yaml
from tests.support.waiting import PATIENCE
from troupe.job import parse_job
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from wandb.proto import wandb_internal_pb2

module.SINK_WAIT_SECONDS = 200.0  # the first import takes a while
BLOCK, HEADER = 2**15, 7


def row(job, step):
    return orchestrator_pb.MetricsLogged(step=step, values={"reward/mean": job + step / 10})


def records(file):
    # LevelDB's format of logs: blocks of chunks, each with checksum, length and kind.
    data, at, text = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + HEADER + length > len(data):
            return  # not written to its end yet
        text += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(text)
            text = b""


def logged(place):
    # Step and value of each row, by run and project.
    found = {}
    for file in sorted(place.glob("job-*/wandb/offline-run-*/*.wandb")):
        run = None
        for one in records(file):
            if one.WhichOneof("record_type") == "run":
                run = one.run.run_id, one.run.project
            items = {tuple(i.nested_key) or (i.key,): i.value_json for i in one.history.item}
            if items:
                row = int(items["_step",]), float(items["reward/mean",])
                found.setdefault(run, []).append(row)
    return found


async def main(place):
    text = job_yaml(logging__wandb_project="p", logging__tensorboard=False)
    jobs = {}
    for job in (1, 2):
        directory = place / f"job-{job}"
        directory.mkdir()
        jobs[job] = Sinks(parse_job(text), f"job-{job}", directory)
        assert (told := await jobs[job].open([])) == [], told
    for step in (1, 2):
        for job, sinks in jobs.items():
            assert await sinks.write(row(job, step)) == []
    for sinks in jobs.values():
        assert await sinks.close() == []
    again = Sinks(parse_job(text), "job-1", place / "job-1")
    assert await again.open([row(1, step) for step in (1, 2, 3)]) == []  # the third is missing
    assert await again.close() == []
    # A process of wandb's writes the files, and the end of them just after `finish` has returned.
    deadline = time.monotonic() + PATIENCE
    wanted = {
        (f"job-{job}", "p"): [(step, job + step / 10) for step in steps]
        for job, steps in ((1, (1, 2, 3)), (2, (1, 2)))
    }
    while (found := logged(place)) != wanted:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.2)


asyncio.run(main(Path(sys.argv[2])))
"""


# The same jobs into the local stores of Trackio (SQLite) and MLflow (files).
LOCAL = """
import asyncio, sys
from pathlib import Path

sys.path.append(sys.argv[1])
from services.orchestrator.jobs import sinks as module
from services.orchestrator.jobs.sinks import Sinks
from tests.support.cluster import job_yaml
from troupe.job import parse_job
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

module.SINK_WAIT_SECONDS = 200.0  # their first import takes a while
FIELD, PLACE = sys.argv[2], Path(sys.argv[3])


def row(job, step):
    return orchestrator_pb.MetricsLogged(step=step, values={"gsm8k/pass@8": job + step / 8})


def trackio():
    import json, sqlite3
    with sqlite3.connect(PLACE / "trackio/p.db") as at:
        for run, step, metrics in at.execute("SELECT run_name, step, metrics FROM metrics"):
            yield run, step, json.loads(metrics)["gsm8k/pass@8"]


def mlflow():
    from mlflow.tracking import MlflowClient
    client = MlflowClient()
    for run in client.search_runs([client.get_experiment_by_name("p").experiment_id]):
        assert run.info.status == "FINISHED"
        assert run.data.params["pipeline.steps"] == "2"
        for one in client.get_metric_history(run.info.run_id, "gsm8k/pass_8"):
            yield run.data.tags["mlflow.runName"], one.step, one.value


async def main():
    spec = parse_job(job_yaml(**{f"logging__{FIELD}": "p", "logging__tensorboard": False}))
    jobs = {}
    for job in (1, 2):
        (PLACE / f"job-{job}").mkdir()
        jobs[job] = Sinks(spec, f"job-{job}", PLACE / f"job-{job}")
        assert (told := await jobs[job].open([])) == [], told
    for step in (1, 2):
        for job, sinks in jobs.items():
            assert await sinks.write(row(job, step)) == []
    for sinks in jobs.values():
        assert await sinks.close() == []
    again = Sinks(spec, "job-1", PLACE / "job-1")
    assert await again.open([row(1, step) for step in (1, 2, 3)]) == []  # the third is missing
    assert await again.close() == []
    found = sorted({"trackio_project": trackio, "mlflow_experiment": mlflow}[FIELD]())
    steps = {1: (1, 2, 3), 2: (1, 2)}
    assert found == [(f"job-{n}", step, n + step / 8) for n in steps for step in steps[n]], found


asyncio.run(main())
"""


def run_with(tmp_path: Path, package: str, script: str, *given: str, **env: str) -> None:
    """Run a script whose first argument is a directory with the package, if this environment lacks
    it."""
    site = tmp_path / "site"
    if importlib.util.find_spec(package.partition("-")[0]) is None:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
        wanted = next(one for one in EXTRAS[package.partition("-")[0]] if one.startswith(package))
        if subprocess.run([*install, wanted], capture_output=True).returncode:
            pytest.skip(f"{package} cannot be installed")
    place = tmp_path / "jobs"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, str(site), *given, str(place)],
        cwd=ROOT,
        env={**os.environ, **{name: text.format(place=place) for name, text in env.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_weights_and_biases_offline_has_the_rows_of_each_job(tmp_path: Path) -> None:
    config = str(tmp_path)
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONFIG_DIR": config}
    run_with(tmp_path, "wandb", OFFLINE, **env)


@pytest.mark.slow
def test_trackio_has_the_rows_of_each_job(tmp_path: Path) -> None:
    run_with(tmp_path, "trackio", LOCAL, "trackio_project", TRACKIO_DIR="{place}/trackio")


@pytest.mark.slow
def test_mlflow_has_the_rows_of_each_job(tmp_path: Path) -> None:
    # The store of files is in maintenance; the others need a server or a database.
    env = {"MLFLOW_TRACKING_URI": "file:{place}/runs", "MLFLOW_ALLOW_FILE_STORE": "true"}
    run_with(tmp_path, "mlflow-skinny", LOCAL, "mlflow_experiment", **env)
