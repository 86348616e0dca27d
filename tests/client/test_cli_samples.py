"""`troupe samples` and `troupe jobs audit` against the orchestrator double."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import pyarrow.parquet
import pytest

from tests.client.conftest import Run, Stage
from troupe.client import Client
from troupe.rpc import InvalidArgument


def test_counts(run: Run, cluster: Stage) -> None:
    status, out, err = run("samples", "counts", "mine")
    assert (status, err) == (0, "")
    assert "1,234" in out
    assert "solver has 2 steps to commit; pending for longest, 1m01s: " in out
    assert max(map(len, out.splitlines())) <= 80
    assert "solver dropped 5 rows or trajectories: workflow_raised" in out
    assert "3.0 MiB of 4.0 MiB of rows" in out
    table = json.loads(run("samples", "counts", "mine", "--json")[1])["tables"][0]
    assert (table["policy"], table["trained"]) == ("solver", 1234)


def test_an_export_of_a_policy_and_a_step_asks_only_for_these(
    run: Run, cluster: Stage, tmp_path: Path
) -> None:
    path = str(tmp_path / "rows.jsonl")
    assert run("samples", "export", "mine", path, "--policy", "solver", "--step", "3")[0] == 0
    asked = cluster.fake.requests("ListSamples")[0]
    assert (asked.policy, asked.step) == ("solver", 3)
    path = str(tmp_path / "others.jsonl")
    status, _, err = run("samples", "export", "mine", path, "--step", str(10**20))
    assert status == 2
    assert "--step" in err
    status, _, err = run("samples", "export", "mine", path, "--state", "eaten")
    assert status == 2
    assert "eaten" in err
    assert "pending, ready, claimed, trained, dropped" in err


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_export(run: Run, cluster: Stage, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    status, out, err = run("samples", "export", "mine", str(path))
    assert (status, err) == (0, "")
    assert "wrote 5 samples" in out
    if suffix == "parquet":
        rows = pyarrow.parquet.read_table(path).to_pylist()
        columns, payloads = json.loads(rows[1]["columns"]), json.loads(rows[1]["payloads"])
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        columns, payloads = rows[1]["columns"], rows[1]["payloads"]
    assert [row["id"] for row in rows] == [f"q{n}_0_t0" for n in range(5)]
    assert rows[1]["prompt_ids"] == [1, 2, 3]
    assert rows[1]["logprobs"] == [-0.5, -0.25]
    assert rows[1]["version"] == 7
    assert columns == {"hint": {"a": 1}, "values": [0.5]}
    (payload,) = payloads
    assert (payload["kind"], payload["position"], payload["tokens"]) == ("image", 1, 2)
    assert payload["data"] == "c2Vlbg=="
    assert rows[2]["prompt_ids"] is None
    assert list(tmp_path.iterdir()) == [path]

    assert run("samples", "export", "mine", str(path))[0] == 1  # it exists
    status, _, err = run("samples", "export", "mine", str(tmp_path / "rows.csv"))
    assert status == 2
    assert "FILE.parquet or FILE.jsonl" in err
    status, _, err = run("samples", "export", "mine", str(tmp_path / "no" / f"rows.{suffix}"))
    assert status == 2
    assert "does not exist" in err


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_export_to_a_url_is_uploaded(run: Run, cluster: Stage, suffix: str) -> None:
    url = f"memory://{uuid.uuid4().hex}/rows.{suffix}"
    status, out, err = run("samples", "export", "mine", url)
    assert (status, err) == (0, "")
    assert f"wrote 5 samples to {url}" in out
    with fsspec.open(url) as file:
        rows = (
            pyarrow.parquet.read_table(file).to_pylist()
            if suffix == "parquet"
            else [json.loads(line) for line in file]
        )
    assert [row["id"] for row in rows] == [f"q{n}_0_t0" for n in range(5)]
    assert run("samples", "export", "mine", url)[0] == 1  # it exists


def test_an_export_that_breaks_leaves_no_file(run: Run, cluster: Stage, tmp_path: Path) -> None:
    status, _, _ = run("samples", "export", "nope", str(tmp_path / "rows.jsonl"), "--state", "x")
    assert status == 2
    assert list(tmp_path.iterdir()) == []


def test_audit(run: Run, cluster: Stage) -> None:
    status, out, err = run("jobs", "audit", "mine")
    assert (status, err) == (0, "")
    assert "audit passed: 0 lost, 0 duplicated" in out
    assert "24 admitted in 3 steps, 24 ended (23 completed, 1 failed)" in out
    assert "solver is at version 3, checksum abc" in out
    assert "solver dropped 2: workflow_raised" in out

    cluster.fake.violations.append("solver: sample q1_0_t0 is in steps 1 and 2")
    status, out, _ = run("jobs", "audit", "mine")
    assert status == 1
    assert "violation: solver: sample q1_0_t0 is in steps 1 and 2" in out
    status, out, _ = run("jobs", "audit", "mine", "--json")
    assert status == 1
    assert json.loads(out)["lost"] == 1


def test_a_resume_may_carry_a_specification(
    run: Run, cluster: Stage, job_yaml: str, tmp_path: Path
) -> None:
    from tests.support.fake_orchestrator import S

    cluster.do(cluster.fake.move("mine", S.JOB_STATE_PAUSING, S.JOB_STATE_PAUSED))
    path = tmp_path / "longer.yaml"
    path.write_text(job_yaml)
    assert run("jobs", "resume", "mine", "--spec", str(path), "--set", "pipeline.steps=9")[0] == 0
    (sent,) = cluster.fake.requests("ResumeJob")
    assert json.loads(sent.spec)["name"]
    assert dict(sent.overrides) == {"pipeline.steps": "9"}
    # As people wrote it, with what the command line changed.
    assert sent.given_spec.startswith(job_yaml.rstrip())
    assert sent.given_spec.endswith("# Changed when it was resumed:\n#   pipeline.steps: 9\n")


def test_the_sdk_pages_and_refuses_unknown_states(cluster: Stage) -> None:
    with Client(cluster.address) as client:
        job = client.job("mine")
        assert [row.uses for row in job.samples("solver")] == [1, 0, 1, 0, 1]
        assert len(cluster.fake.requests("ListSamples")) == 3
        assert [row.state for row in job.samples("solver", state="ready")] == ["ready", "ready"]
        with pytest.raises(InvalidArgument, match="state"):
            list(job.samples("solver", state="eaten"))
        assert job.tables().tables[0].lag == 2
        assert job.audit().passed


def test_a_job_is_forgotten(run: Run, cluster: Stage) -> None:
    status, said, err = run("jobs", "forget", "mine")
    assert (status, err) == (0, "")
    assert said.startswith("mine is forgotten; its checkpoints stay in ")
    assert cluster.fake.requests("ForgetJob")[0].job_id == "mine"
    assert run("jobs", "forget", "nope")[0] != 0
