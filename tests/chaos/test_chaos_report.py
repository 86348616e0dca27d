"""The harness's conclusions from two runs, and its changes to a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.chaos.accounts import SampleAudit, audit_of
from testbed.chaos.fault_injector import InjectedFault, InjectionLog
from testbed.chaos.harness import differences
from testbed.chaos.plan import ChaosPlan, prepare_directory, prepared
from testbed.chaos.report import ChaosReport, JobOutcome
from testbed.chaos.schedule import KINDS
from testbed.chaos.transcript import StepRecord, Transcript
from tests.support import tiny_team
from troupe.cluster import ClusterSettings, NotWritable
from troupe.job import parse_job
from troupe.rpc import InvalidArgument
from troupe.rpc.channel import FaultSettings
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

GOOD = SampleAudit(appended=10, trained=8, dropped=2, trajectories_admitted=4, trajectories_ended=4)


def outcome(**changes: Any) -> JobOutcome:
    common: dict[str, Any] = {
        "state": "succeeded",
        "seconds": 10.0,
        "steps": 3,
        "total_steps": 3,
        "versions": {"solver": (3, "abc")},
        "accounts": GOOD,
        "transcript": Transcript(),
    }
    return JobOutcome(**{**common, **changes})


def report(
    disturbed: JobOutcome, baseline: JobOutcome | None = None, **changes: Any
) -> ChaosReport:
    done = InjectionLog(
        kills=3,
        injected=[
            InjectedFault(1.0, "kill", "redis", "SIGKILL", 0.5),
            InjectedFault(2.0, "kill", "redis", "SIGKILL", 1.5),
            InjectedFault(3.0, "stall", "reward", "SIGSTOP", 2.0),
        ],
    )
    common: dict[str, Any] = {
        "seed": 1,
        "kills_wanted": 3,
        "disturbed": disturbed,
        "disturbance": done,
        "baseline": baseline or outcome(),
        "deterministic": True,
    }
    return ChaosReport(**{**common, **changes})


def test_a_run_that_kept_every_promise() -> None:
    one = report(outcome())
    assert one.passed
    document = one.document()
    assert list(document)[:4] == ["kills", "lost", "duplicated", "bitwise_equal"]
    assert (document["kills"], document["lost"], document["duplicated"]) == (3, 0, 0)
    assert document["bitwise_equal"] is True
    assert document["faults"] == {"kill": 2, "stall": 1}
    assert document["recovery_seconds"] == {"redis": {"kills": 2, "median": 1.0, "max": 1.5}}
    assert json.loads(json.dumps(document)) == document


@pytest.mark.parametrize(
    ("disturbed", "fault"),
    [
        (outcome(accounts=replace(GOOD, lost=1)), "1 samples or trajectories lost"),
        (outcome(accounts=replace(GOOD, live=2)), "2 samples or trajectories lost"),
        (outcome(accounts=replace(GOOD, trajectories_ended=3)), "1 samples or trajectories lost"),
        (outcome(accounts=replace(GOOD, duplicated=4)), "4 samples duplicated"),
        (outcome(accounts=replace(GOOD, violations=("step 2: odd",))), "step 2: odd"),
        (outcome(accounts=SampleAudit(missing="no audit")), "no audit"),
        (outcome(versions={"solver": (3, "other")}), "the final weights differ"),
        (outcome(versions={"solver": (2, "abc")}), "the final weights differ"),
        (outcome(versions={}), "the final weights differ"),
        (outcome(state="failed"), "the disturbed job failed"),
        (outcome(state="running", cut_short=True), "the time limit passed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_broken_promise_is_a_fault(disturbed: JobOutcome, fault: str) -> None:
    one = report(disturbed)
    assert not one.passed
    assert any(fault in text for text in one.faults)


def test_without_an_audit_nothing_is_claimed() -> None:
    one = report(outcome(accounts=SampleAudit(missing="no audit")))
    assert (one.lost, one.duplicated) == (None, None)


def test_weights_are_compared_only_in_deterministic_runs_with_a_baseline() -> None:
    other = outcome(versions={"solver": (3, "other")})
    assert report(other, deterministic=False).bitwise_equal is None
    assert report(other, deterministic=False).passed
    alone = replace(report(other), baseline=None)
    assert alone.bitwise_equal is None
    assert alone.passed


def test_accounts_add_up_over_policies() -> None:
    answer = orchestrator_pb.AuditJobResponse(
        tables=store_pb.AuditTablesResponse(
            policies=[
                store_pb.PolicyAudit(
                    policy="a", appended=5, trained=4, dropped=1, drop_reasons={"x": 1}
                ),
                store_pb.PolicyAudit(
                    policy="b", appended=5, trained=3, lost=1, drop_reasons={"x": 1}
                ),
            ],
            trajectories_admitted=7,
            trajectories_ended=6,
        ),
        violations=["b: a sample is missing"],
    )
    accounts = audit_of(answer)
    assert (accounts.appended, accounts.trained, accounts.dropped) == (10, 7, 1)
    assert accounts.drop_reasons == {"x": 2}
    assert accounts.unaccounted == 2
    assert accounts.violations == ("b: a sample is missing",)


def test_the_first_step_at_which_two_runs_part_is_named(tmp_path: Path) -> None:
    def transcript(**changes: Any) -> Transcript:
        steps = [
            StepRecord(step=0, version=0, checksum="start"),
            StepRecord(
                step=1, version=1, checksum="one", samples={"s1": "trained"}, samples_digest=1
            ),
            StepRecord(
                step=2, version=2, checksum="two", samples={"s2": "trained"}, samples_digest=2
            ),
        ]
        steps[1] = steps[1].model_copy(update=changes)
        return Transcript(policies={"solver": steps})

    base = transcript()
    assert differences(base, transcript()) == []
    (found,) = differences(base, transcript(checksum="another"))
    assert found.startswith("solver, step 1: other weights")
    assert "the arithmetic differ" in found
    (found,) = differences(base, transcript(samples={"s9": "trained"}))
    assert "1 samples only in the first run (s1), 1 samples only in the second run (s9)" in found
    (found,) = differences(base, transcript(samples={"s1": "dropped: no_signal"}))
    assert "1 with another fate (s1 trained / dropped: no_signal)" in found
    (found,) = differences(base, transcript(samples_digest=9))
    assert "accumulated different ones" in found
    (found,) = differences(base, transcript(outcome="skipped"))
    assert "first version 1, skipped version 1" in found
    path = tmp_path / "t.json"
    base.save(path)
    assert Transcript.load(path) == base


def test_a_job_is_prepared_for_bad_times(tmp_path: Path) -> None:
    text = tiny_team.job(tmp_path)
    spec, changes = prepared(parse_job(text))
    assert spec.pipeline.deterministic
    assert spec.limits.worker_deaths >= 10_000
    assert spec.limits.trajectory_seconds >= 600
    assert spec.tools["score"].timeout_seconds >= 60
    assert "pipeline.deterministic=true" in changes
    assert prepared(spec) == (spec, [])
    timely, _ = prepared(parse_job(tiny_team.job(tmp_path, **{"pipeline.mode": "async"})))
    assert not timely.pipeline.deterministic


def test_both_clusters_are_apart_and_only_one_is_disturbed(tmp_path: Path) -> None:
    plan = ChaosPlan(
        spec=parse_job(tiny_team.job(tmp_path)),
        settings=ClusterSettings(panel=False),
        directory=tmp_path / "runs",
        seed=3,
    )
    base, disturbed = plan.cluster("a", disturbed=False), plan.cluster("b", disturbed=True)
    assert base.data_dir != disturbed.data_dir
    assert base.transfer_dir != disturbed.transfer_dir
    assert base.environment == {}
    assert FaultSettings.parse(disturbed.environment["TROUPE_FAULTS"]).seed == 3
    assert disturbed.max_restarts > 1000 > base.max_restarts
    assert replace(plan, kinds=frozenset({"kill"})).environment() == {}
    assert not replace(plan, kinds=frozenset({"kill", "duplicate"})).proxied
    assert plan.kinds == frozenset(KINDS)
    assert plan.proxied


def test_an_earlier_run_is_not_written_over(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "runs")
    (tmp_path / "runs" / "disturbed").mkdir()
    with pytest.raises(InvalidArgument, match="this directory has an earlier run"):
        prepare_directory(tmp_path / "runs")
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable, match="cannot be written"):
        prepare_directory(tmp_path / "file")
