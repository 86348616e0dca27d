"""`troupe submit`, `jobs metrics`, `jobs logs`, `jobs compare`, hints at commands of other groups,
and completion, against the orchestrator double."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from tests.client.conftest import Run, Stage
from tests.client.project import JOB_YAML
from tests.support.fake_orchestrator import S
from tests.support.waiting import PATIENCE
from troupe.client import Client
from troupe.client.cli.jobs.results import ServiceLogs
from troupe.client.cli.options import make_table
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


def notice(text: str) -> orchestrator_pb.JobEvent:
    return orchestrator_pb.JobEvent(notice=orchestrator_pb.Notice(text=text))


def test_submit_returns_with_the_job_id_and_the_commands_that_follow(
    run: Run, cluster: Stage, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB_YAML)
    options = ("--job-id", "new", "--set", "pipeline.steps=7", "--tag", "a", "--notes", "first")
    status, out, err = run("submit", str(path), *options)
    assert (status, out) == (0, "new\n")
    assert "troupe jobs watch new " in err
    assert "troupe conversations new " in err
    job = cluster.fake.jobs["new"]
    assert (job.total_steps, list(job.tags), job.notes) == (7, ["a"], "first")
    changed = "\n# Changed when it was submitted:\n#   pipeline.steps: 7\n"
    assert cluster.fake.given["new"] == f"{JOB_YAML.rstrip()}\n{changed}"
    status, _, err = run("submit", str(path), "--cluster", cluster.address)
    assert f"--cluster {cluster.address}" in err
    status, out, _ = run("submit", str(path), "--json", "--job-id", "third")
    assert json.loads(out)["id"] == "third"
    status, _, err = run("submit", str(path), "--set", "pipeline.steps=-1")
    assert status == 2
    assert "pipeline.steps" in err


def test_submit_without_a_cluster_says_how_to_start_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB_YAML)
    status, _, err = run("submit", str(path))
    assert status == 1
    assert "troupe up" in err


def test_metrics_are_a_table_csv_or_json(run: Run, cluster: Stage) -> None:
    more = {f"solver__other{i}": float(i) for i in range(12)}
    cluster.do(cluster.fake.step("mine", 2, reward__mean=0.75, solver__entropy=1.5, **more))
    status, out, err = run("jobs", "metrics", "mine")
    assert (status, err) == (0, "")
    assert out.split()[:3] == ["step", "reward/mean", "reward/solver/mean"]
    assert "0.750" in out
    assert "more metrics: --names" in out
    out = run("jobs", "metrics", "mine", "--format", "csv")[1]
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [(row["step"], row["reward/mean"], row["solver/entropy"]) for row in rows] == [
        ("1", "0.5", ""),
        ("2", "0.75", "1.5"),
    ]
    assert len(rows[0]) == 16
    chosen = ("--names", "*/entropy,reward/mean", "--format", "json")
    assert json.loads(run("jobs", "metrics", "mine", *chosen, "--after-step", "1")[1]) == [
        {"step": 2, "solver/entropy": 1.5, "reward/mean": 0.75}
    ]
    # A step without the metric has no row.
    only = json.loads(run("jobs", "metrics", "mine", "--names", "*/entropy", "--format", "json")[1])
    assert [row["step"] for row in only] == [2]
    status, _, err = run("jobs", "metrics", "mine", "--names", "rewards/mean")
    assert status == 2
    assert "--names = rewards/mean: the job has no such metric" in err
    assert "reward/mean" in err


def test_metrics_of_a_stopped_cluster_come_from_its_directory(run: Run, tmp_path: Path) -> None:
    job = tmp_path / "data" / "old"
    job.mkdir(parents=True)
    (job / "job.yaml").write_text(JOB_YAML)
    assert run("jobs", "metrics", "old") == (0, "no metrics yet\n", "")
    rows = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}, {"step": 2, "score": 1.0}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (job / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    assert json.loads(run("jobs", "metrics", "old", "--format", "json")[1]) == [
        {"step": 1, "loss": 0.5, "score": None},
        {"step": 2, "loss": 0.25, "score": 1.0},
    ]
    status, _, err = run("jobs", "metrics", "other")
    assert (status, "no cluster runs in this directory" in err) == (1, True)


def test_jobs_are_compared_side_by_side(run: Run, cluster: Stage) -> None:
    with Client() as client:
        for name, size in (("two", 4), ("three", 2)):
            client.submit(JOB_YAML, name, overrides={"pipeline.group_size": size})
    cluster.fake.jobs["three"].after["team_success"] = 0.5
    status, out, err = run("jobs", "compare", "mine", "two", "three")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["mine", "two", "three"],
        ["pipeline.group_size", "8", "4", "2"],
        ["step", "1", "0", "0"],
        ["team_success", "-", "-", "0.500"],
    ]
    values = json.loads(run("jobs", "compare", "mine", "two", "--json")[1])
    assert values["fields"] == {"pipeline.group_size": [8, 4]}
    assert values["metrics"]["reward/mean"] == [0.5, None]
    status, _, err = run("jobs", "compare", "mine")
    assert (status, "needs at least two jobs" in err) == (2, True)
    assert run("jobs", "compare", "mine", "nope")[0] == 2


def write_log(folder: Path, *records: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rollout-0.log").open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def record(job_id: str, event: str) -> dict[str, object]:
    at = datetime.now(UTC).isoformat()
    return {"timestamp": at, "level": "warning", "job_id": job_id, "event": event, "turn": 3}


def test_logs_join_the_job_its_functions_and_its_services(
    run: Run, cluster: Stage, tmp_path: Path
) -> None:
    write_log(
        tmp_path / "data" / "logs",
        record("mine", "the engine restarts"),
        record("other", "not about it"),
        record("mine-2", "nor is this"),
    )
    cluster.do(cluster.fake.log("mine", notice("a worker was lost")))
    status, out, err = run("jobs", "logs", "mine")
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()[1:]) for line in out.splitlines()]
    assert "rollout-0 warning: the engine restarts turn=3" in lines
    assert "job the job is running" in lines
    assert "job info: a worker was lost" in lines
    assert "about it" not in out
    assert "nor is this" not in out
    assert "step 1:" not in out, "metrics have their own command"
    assert len(run("jobs", "logs", "mine", "--lines", "1")[1].splitlines()) == 1
    assert run("jobs", "logs", "nope")[0] == 2


def test_followed_logs_go_on_until_the_job_ends(run: Run, cluster: Stage) -> None:
    async def end(fake) -> None:  # type: ignore[no-untyped-def]
        while not fake.requests("WatchJob"):  # until the stream of the log is read
            await fake.log("mine", orchestrator_pb.JobEvent(activity=orchestrator_pb.Activity()))
            await asyncio.sleep(0.02)
        await fake.log("mine", notice("nearly there"))
        await fake.move("mine", S.JOB_STATE_SUCCEEDED)

    cluster.play(end)
    status, out, err = run("jobs", "logs", "mine", "--follow")
    assert (status, err) == (0, "")
    assert out.count("nearly there") == 1
    assert out.splitlines()[-1].endswith("the job has succeeded")


def test_the_log_of_a_service_is_read_once_also_when_it_is_cut(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    write_log(folder, record("mine", "first"))
    logs = ServiceLogs(folder, "mine")
    assert [one.text for one in logs.read()] == ["warning: first turn=3"]
    assert list(logs.read()) == []
    log = folder / "rollout-0.log"
    (folder / "rollout-0.log.1").write_bytes(log.read_bytes())
    log.write_bytes(b"")
    assert list(logs.read()) == []
    write_log(folder, record("mine", "second"))
    with log.open("a") as file:
        file.write('{"job_id": "mine", half a line')
    assert [one.text for one in logs.read()] == ["warning: second turn=3"]
    fresh = ServiceLogs(folder, "mine").read()
    assert [one.text.split()[1] for one in fresh] == ["first", "second"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("job", "list"), "Did you mean `troupe jobs list`?"),
        (("list",), "Did you mean `troupe jobs list` or `troupe functions list` or "),
        (("jobs", "validate"), "Did you mean `troupe job validate`"),
        (("metrics", "mine"), "Did you mean `troupe jobs metrics`"),
        (("jobs", "train"), "Did you mean `troupe train`"),
        (("tarin",), "Did you mean 'train'?"),
    ],
)
def test_an_unknown_command_hints_at_the_group_that_has_it(
    run: Run, words: tuple[str, ...], hint: str
) -> None:
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith(
        f"error: No such command '{words[-1] if words[0] != 'metrics' else words[0]}'"
    )
    assert hint in err
    assert len(err.splitlines()) == 1


def completions(*words: str, **environment: str) -> tuple[list[str], str]:
    """Return the completions that bash offers for the last word, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "troupe.client.cli"],
        env={
            **os.environ,
            "_TROUPE_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("troupe", *words)),
            "COMP_CWORD": str(len(words)),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.stdout.split(), done.stderr


def test_the_shell_completes_jobs_policies_and_examples(cluster: Stage) -> None:
    with Client() as client:
        client.submit(JOB_YAML, "minor")
        client.submit(JOB_YAML, "other")
    assert completions("jobs", "show", "mi") == (["mine", "minor"], "")
    assert completions("generate", "mine", "so") == (["solver"], "")
    assert completions("examples", "copy", "reason") == (["reasoning_team"], "")
    assert completions("jobs", "sh") == (["show"], "")


def test_completion_without_a_cluster_is_silent_and_quick() -> None:
    assert completions("jobs", "show", "mi") == ([], "")
    # Nothing listens there: it neither waits for retries nor prints an error.
    gone = {"TROUPE_ORCHESTRATOR_ADDRESS": "127.0.0.1:9"}
    assert completions("jobs", "show", "mi", **gone) == ([], "")


def test_a_narrow_terminal_shortens_no_id_that_users_copy() -> None:
    table = make_table(("job", "state", "mode", "tags"), ("step", "reward"))
    job_id = "instruction-following-1a2b3c4d"
    table.add_row(job_id, "succeeded", "micro_batch", "baseline of the paper", "200/200", "0.125")
    text = io.StringIO()
    Console(file=text, width=60).print(table)
    assert job_id in text.getvalue()
