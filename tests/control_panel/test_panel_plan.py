"""The planner over REST: a plan with its picture, and problems that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.control_panel.conftest import Panel
from tests.twin.test_planner import job
from tests.twin.test_profile import measured
from troupe.job import JobSpec

JSON = {"Content-Type": "application/json"}


async def planned(panel: Panel, query: str, spec: dict[str, Any] | None = None) -> Any:
    body = json.dumps(job() if spec is None else spec)
    return await panel.http.post(f"/api/plan?{query}", content=body, headers=JSON, timeout=200)


def placed(one: dict[str, Any]) -> Any:
    """Return the devices that a split gives to each policy, without predictions."""
    given = ("replicas", "tensor_parallel", "gang")
    policies = {name: [p[key] for key in given] for name, p in one["policies"].items()}
    return one["engine_devices"], one["training_devices"], one["engine_hosts"], policies


async def test_a_plan_has_its_split_its_fields_and_a_picture_of_a_step(panel: Panel) -> None:
    reply = await planned(panel, "devices=4xH200-141GB&turns=1&response_tokens=50")
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["best"]["engine_devices"] + found["best"]["training_devices"] == 4
    assert any(one.startswith("policies.solver.engine.replicas=") for one in found["set"])
    assert found["assumed"][0] == "turns, lengths and waits"
    assert not found["measured"]
    # The picture shows the steps that the prediction is the mean of.
    picture = found["picture"]
    assert picture["ends"][-1] == picture["seconds"]
    mean = picture["seconds"] / len(picture["ends"])
    assert mean == pytest.approx(found["best"]["seconds_per_step"], abs=0.002)
    # Every alternative differs from the best split and from the others.
    splits = [json.dumps(placed(one)) for one in (found["best"], *found["others"])]
    assert len(set(splits)) == len(splits)
    lanes = picture["lanes"]
    assert {one["kind"] for one in lanes} == {"engine", "trainer"}
    for lane in lanes:
        for policy, begin, end in lane["busy"]:
            assert policy in job()["policies"]
            assert 0 <= begin <= end <= found["picture"]["seconds"] + 0.01
    assert not panel.orchestrator.requests("SubmitJob")


@pytest.mark.parametrize(
    ("query", "spec", "field", "said"),
    [
        ("devices=many", None, "query.devices", "many"),
        ("devices=2xL4-24GB", None, "devices", "does not fit"),
        ("devices=8xNew-80GB", None, "devices", "is unknown"),
        ("devices=8xH100-80GB&hosts=3", None, "hosts", "spread evenly"),
        ("devices=8xH100-80GB&hosts=0", None, "query.hosts", ""),
        ("devices=8xH100-80GB&tflops=-1", None, "query.tflops", ""),
        ("devices=8xH100-80GB&turns=-1", None, "turns", "is not a number"),
        ("hosts=1", None, "query.devices", ""),
        ("devices=8xH100-80GB", {"name": "x"}, "", ""),
    ],
)
async def test_a_job_that_cannot_be_planned_is_answered_with_a_problem(
    panel: Panel, query: str, spec: dict[str, Any] | None, field: str, said: str
) -> None:
    reply = await planned(panel, query, spec)
    assert reply.status_code == 422, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    found = reply.json()
    assert found["remedy"]
    assert said in found["detail"] + (found.get("value") or "")
    if field:
        assert found["field"] == field


async def test_a_job_that_was_not_measured_yet_has_no_profile(panel: Panel) -> None:
    job_id = await panel.submit()
    for reply in (
        await panel.http.get(f"/api/jobs/{job_id}/profile"),
        await planned(panel, f"devices=8xH100-80GB&profile={job_id}"),
    ):
        assert reply.status_code == 409
        assert "nothing is measured yet" in reply.json()["detail"]


async def test_a_plan_takes_the_profile_of_a_run_of_the_same_job_only(panel: Panel) -> None:
    job_id = await panel.submit()
    panel.orchestrator.profiles[job_id] = measured(JobSpec.model_validate(job())).to_json()
    reply = await panel.http.get(f"/api/jobs/{job_id}/profile")
    assert reply.json()["steps"] == 4
    query = f"devices=4xH200-141GB&profile={job_id}"
    found = (await planned(panel, query)).json()
    assert "trajectories of 4 steps" in found["measured"][0]
    other = job()
    other["policies"]["solver"]["model"]["path"] = "Qwen/Qwen3-4B"
    refused = await planned(panel, query, other)
    assert refused.status_code == 422
    assert refused.json()["field"] == "profile"
