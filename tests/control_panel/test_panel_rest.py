"""The REST interface: calls arrive, errors are problem details, events are live."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import yaml

from tests.control_panel.conftest import SPEC, YAML, Panel
from tests.support.waiting import PATIENCE
from troupe.client.conversion import to_json
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


async def test_a_job_is_submitted_and_steered(panel: Panel) -> None:
    job_id = await panel.submit()
    assert [job["job_id"] for job in (await panel.http.get("/api/jobs")).json()] == [job_id]
    await panel.orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    setting = {"field": "limits.turn_seconds", "value": "600", "source": "GPU of 80 GB"}
    panel.orchestrator.jobs[job_id].resolved.add(**setting)
    assert (await panel.http.get(f"/api/jobs/{job_id}")).json()["resolved"] == [setting]
    paused = await panel.http.post(f"/api/jobs/{job_id}/pause")
    assert paused.json()["state"] == "paused"
    resumed = await panel.http.post(f"/api/jobs/{job_id}/resume")
    assert resumed.json()["state"] == "submitted"
    assert panel.orchestrator.requests("ResumeJob")[0].spec == ""
    await panel.http.post(f"/api/jobs/{job_id}/pause")
    await panel.http.post(f"/api/jobs/{job_id}/resume", content=SPEC, headers=YAML)
    assert panel.orchestrator.requests("ResumeJob")[1].spec == SPEC
    await panel.http.post(f"/api/jobs/{job_id}/pause")
    changed = {"set": ["pipeline.steps=60", "agents.solver.sampling={temperature: 0.7}"]}
    bad = await panel.http.post(f"/api/jobs/{job_id}/resume", params={"set": "steps"})
    assert (bad.status_code, bad.json()["field"]) == (422, "set")
    await panel.http.post(f"/api/jobs/{job_id}/resume", params=changed)
    assert dict(panel.orchestrator.requests("ResumeJob")[2].overrides) == {
        "pipeline.steps": "60",
        "agents.solver.sampling": "{temperature: 0.7}",
    }
    change = panel.orchestrator.jobs[job_id].history.add(step=20)
    change.at.GetCurrentTime()
    change.fields.add(field="pipeline.steps", old="20", new="60")
    change.at.FromSeconds(1_800_000_000)
    [shown] = (await panel.http.get(f"/api/jobs/{job_id}")).json()["history"]
    assert (shown["step"], shown["at"][:4]) == (20, "2027")
    assert shown["fields"] == [{"field": "pipeline.steps", "old": "20", "new": "60"}]
    cancelled = await panel.http.post(f"/api/jobs/{job_id}/cancel?reason=enough")
    assert cancelled.json()["state"] == "cancelled"
    newer = await panel.submit()
    found = (await panel.http.get("/api/jobs")).json()
    assert [job["job_id"] for job in found] == [newer, job_id]
    assert panel.orchestrator.requests("CancelJob")[0].reason == "enough"
    assert (await panel.http.post(f"/api/jobs/{job_id}/forget")).json()["job_id"] == job_id
    assert panel.orchestrator.requests("ForgetJob")


async def test_an_idempotency_key_becomes_the_request_id(panel: Panel) -> None:
    for _ in range(2):
        reply = await panel.http.post(
            "/api/jobs?job_id=mine", content=SPEC, headers={**YAML, "Idempotency-Key": "once"}
        )
        assert reply.status_code == 201
    assert {r.request_id for r in panel.orchestrator.requests("SubmitJob")} == {"once"}
    assert len((await panel.http.get("/api/jobs")).json()) == 1


async def test_an_unknown_job_is_a_problem(panel: Panel) -> None:
    for path in ("/api/jobs/nope", "/api/jobs/nope/events", "/api/nothing"):
        reply = await panel.http.get(path)
        assert reply.status_code == 404
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["detail"]


async def test_a_wrong_query_names_its_field(panel: Panel) -> None:
    job_id = await panel.submit()
    reply = await panel.http.get(f"/api/jobs/{job_id}/trajectories?limit=0")
    assert reply.status_code == 422
    assert reply.json()["field"] == "query.limit"


async def test_a_parameter_that_there_is_not_is_refused(panel: Panel) -> None:
    reply = await panel.http.post("/api/jobs?jobid=mine", content=SPEC, headers=YAML)
    assert reply.status_code == 422
    assert (reply.json()["field"], reply.json()["value"]) == ("query.jobid", "mine")
    assert reply.json()["remedy"] == "Did you mean `job_id`?"
    assert not panel.orchestrator.requests("SubmitJob")
    none = await panel.http.get("/api/engines?policy=x")
    assert none.json()["remedy"] == "This call takes: none."


async def test_a_body_that_is_not_json_is_refused_with_the_position(panel: Panel) -> None:
    job_id = await panel.submit()
    path = f"/api/jobs/{job_id}/policies/solver/generate"
    headers = {"Content-Type": "application/json"}
    reply = await panel.http.post(path, content='{"messages": [}', headers=headers)
    problem = reply.json()
    assert (reply.status_code, problem["field"]) == (422, "body")
    assert problem["detail"] == "the body is not JSON: Expecting value at character 14"
    assert "value" not in problem


async def test_a_specification_that_is_too_large_is_refused(panel: Panel) -> None:
    reply = await panel.http.post("/api/jobs", content=b"#" * (1 << 20) + b"##", headers=YAML)
    assert reply.status_code == 422
    assert "1048576" in reply.json()["detail"]
    assert reply.json()["remedy"]
    not_text = await panel.http.post("/api/jobs", content=b"\xff\xfe", headers=YAML)
    assert "UTF-8" in not_text.json()["detail"]


async def test_events_arrive_while_they_happen(panel: Panel) -> None:
    job_id = await panel.submit()
    seen: list[tuple[str, dict[str, Any]]] = []

    async def read() -> None:
        async with panel.http.stream("GET", f"/api/jobs/{job_id}/events") as stream:
            name = ""
            async for line in stream.aiter_lines():
                if line.startswith("event:"):
                    name = line.removeprefix("event:").strip()
                elif line.startswith("data:"):
                    seen.append((name, json.loads(line.removeprefix("data:"))))
                    if name == "end":
                        return

    reader = asyncio.create_task(read())
    orchestrator = panel.orchestrator
    await orchestrator.move(job_id, common_pb.JOB_STATE_STARTING, common_pb.JOB_STATE_RUNNING)
    orchestrator.break_after = 4  # the stream breaks once; the panel takes it up again
    await orchestrator.step(job_id, 1, reward__solver__mean=0.25)
    await orchestrator.step(job_id, 2, reward__solver__mean=0.5)
    await orchestrator.move(job_id, common_pb.JOB_STATE_SUCCEEDED)
    await asyncio.wait_for(reader, PATIENCE)
    rows = [data for name, data in seen if name == "metrics"]
    assert [(r["step"], r["values"]["reward/solver/mean"]) for r in rows] == [(1, 0.25), (2, 0.5)]
    states = [data["state"] for name, data in seen if name == "state"]
    assert states == ["submitted", "starting", "running", "succeeded"]


async def test_metrics_as_columns_in_pages(panel: Panel) -> None:
    job_id = await panel.submit()
    for step in range(1, 6):
        await panel.orchestrator.step(job_id, step, a=step / 3, b=float("nan"))
    await panel.orchestrator.step(job_id, 5, evaluation__c=0.5)
    path = f"/api/jobs/{job_id}/curves"
    wanted = {"name": ["a", "b", "evaluation/c"], "limit": 3}
    newest = (await panel.http.get(path, params=wanted)).json()
    assert newest == {
        "steps": [4, 5],
        "columns": {"a": [1.33333, 1.66667], "b": [None, None], "evaluation/c": [None, 0.5]},
        "next_page": "3",
    }
    older = (await panel.http.get(path, params=wanted | {"page": newest["next_page"]})).json()
    assert (older["steps"], older["next_page"]) == ([1, 2, 3], "")
    assert older["columns"].keys() == {"a", "b"}
    assert (await panel.http.get(path)).status_code == 422  # of nothing
    # Metrics read in this way are left out of the stream.
    reply = await panel.http.post(f"/api/jobs/{job_id}/cancel")
    assert reply.status_code == 200
    told = (await panel.http.get(f"/api/jobs/{job_id}/events?recent_metrics=4")).text
    assert told.count("event: metrics") == 2
    assert told.count("event: state") == 3


@pytest.mark.parametrize("panel", ["secret"], indirect=True)
async def test_a_token_guards_all_calls(panel: Panel) -> None:
    assert (await panel.http.get("/api/jobs")).status_code == 401
    refused = await panel.http.post("/api/jobs", content=SPEC, headers=YAML)
    assert refused.status_code == 401
    assert "TROUPE_TOKEN" in refused.json()["remedy"]
    wrong: Any = {**YAML, "Authorization": "Bearer sécret".encode()}
    refused = await panel.http.post("/api/jobs", content=SPEC, headers=wrong)
    assert (refused.status_code, refused.json()["title"]) == (401, "unauthenticated")
    taken = await panel.http.post(
        "/api/jobs", content=SPEC, headers={**YAML, "Authorization": "Bearer secret"}
    )
    assert taken.status_code == 201


async def test_openapi_documents_every_call(panel: Panel) -> None:
    paths = (await panel.http.get("/openapi.json")).json()["paths"]
    for path, methods in paths.items():
        for method, call in methods.items():
            assert call.get("summary"), f"{method} {path} has no summary"
            assert call.get("description"), f"{method} {path} has no description"


def test_messages_become_plain_json() -> None:
    reply = orchestrator_pb.GetTrajectoryResponse()
    reply.summary.state = common_pb.TRAJECTORY_STATE_COMPLETED
    turn = reply.turns.add(response="42")
    turn.versions.add(version=2**40)
    data = to_json(reply)
    assert data["summary"]["state"] == "completed"
    assert data["turns"][0]["response"] == "42"  # text stays text
    assert data["turns"][0]["versions"][0]["version"] == 2**40  # and numbers numbers
    assert data["turns"][0]["reward"] is None


async def test_samples_and_their_audit(panel: Panel) -> None:
    job_id = await panel.submit()
    tables = (await panel.http.get(f"/api/jobs/{job_id}/tables")).json()
    assert tables["tables"][0]["drop_reasons"] == {"workflow_raised": 5}
    path = f"/api/jobs/{job_id}/policies/solver/samples"
    page = (await panel.http.get(f"{path}?limit=2")).json()
    assert [row["sample_id"] for row in page["samples"]] == ["q0_0_t0", "q1_0_t0"]
    second = page["samples"][1]
    assert (second["prompt_tokens"], second["response_tokens"]) == (3, 2)
    assert second["columns"] == ["hint", "values"]
    assert second["state"] == "ready"
    rest = (await panel.http.get(f"{path}?limit=9&page={page['next_page']}&state=trained")).json()
    assert [row["state"] for row in rest["samples"]] == ["trained"]
    wrong = await panel.http.get(f"{path}?state=eaten")
    assert (wrong.status_code, wrong.json()["field"]) == (422, "query.state")
    wrong = await panel.http.get(f"{path}?step={2**63}")
    assert (wrong.status_code, wrong.json()["field"]) == (422, "query.step")
    audit = (await panel.http.get(f"/api/jobs/{job_id}/audit")).json()
    assert audit["violations"] == []
    assert audit["tables"]["policies"][0]["trained"] == 44


async def test_a_population_and_its_matches(panel: Panel) -> None:
    found = (await panel.http.get("/api/jobs/mine/population")).json()
    assert found["pools"][0]["members"][1]["member_id"] == "player@5"
    assert found["pools"][0]["members"][1]["state"] == "settled"
    assert found["history"][1]["mixtures"][0]["probabilities"] == {
        "player@0": 0.25,
        "player@5": 0.75,
    }
    page = (await panel.http.get("/api/jobs/mine/matches?limit=2&member=player@5")).json()
    assert [one["trajectory_id"] for one in page["matches"]] == ["m0x1-t0", "m0x1-t1"]
    assert page["next_page"] == "2"
    none = await panel.http.get("/api/jobs/plain/population")
    assert (none.status_code, none.json()["title"]) == (404, "no_population")


async def test_a_field_that_there_is_not_is_named_with_the_one_that_was_meant(panel: Panel) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_new_token": 4}
    reply = await panel.http.post("/api/jobs/mine/policies/solver/generate", json=body)
    assert reply.status_code == 422
    problem = reply.json()
    assert problem["field"] == "body.max_new_token"
    assert problem["value"] == "4"
    assert problem["detail"] == "there is no such field"
    assert problem["remedy"] == "Did you mean `max_new_tokens`?"
    for message, field in (
        ({"role": "user", "text": "hi"}, "content"),
        ({"rol": "system", "content": "hi"}, "rol"),
        ({}, "content"),
    ):
        reply = await panel.http.post(
            "/api/jobs/mine/policies/solver/generate", json={"messages": [message]}
        )
        assert (reply.status_code, reply.json()["field"]) == (422, f"body.messages.0.{field}")
    assert not panel.orchestrator.requests("GeneratePolicy")
    function = {"name": "f", "entrypoint": "a:f", "costs": {"core": 1}}
    problem = (await panel.http.post("/api/functions", json=function)).json()
    assert (problem["field"], problem["remedy"]) == ("core", "Did you mean `cores`?")
    problem = (await panel.http.post("/api/functions", json={"nmae": "f"})).json()
    assert "permitted" not in problem["detail"]


async def test_a_job_has_tags_notes_and_its_file_as_it_was_given(panel: Panel) -> None:
    text = f"# The baseline.{SPEC}"
    reply = await panel.http.post(
        "/api/jobs?tag=baseline&tag=gsm8k&notes=first%20try", content=text, headers=YAML
    )
    job = reply.json()
    assert (job["tags"], job["notes"]) == (["baseline", "gsm8k"], "first try")
    path = f"/api/jobs/{job['job_id']}"
    changed = await panel.http.patch(
        path,
        json={"add_tags": ["kept"], "remove_tags": ["gsm8k"]},
        headers={"Idempotency-Key": "1"},
    )
    assert changed.json()["tags"] == ["baseline", "kept"]
    assert changed.json()["notes"] == "first try"
    assert panel.orchestrator.requests("AnnotateJob")[0].request_id == "1"
    assert (await panel.http.patch(path, json={"notes": ""})).json()["notes"] == ""
    refused = await panel.http.patch(path, json={"tags": ["a"]})
    assert (refused.status_code, refused.json()["field"]) == (422, "body.tags")
    found = (await panel.http.get(f"{path}/specification")).json()
    assert found["given"] == text
    assert yaml.safe_load(found["resolved"])["pipeline"]["steps"] == 10
    assert "group_size" in found["resolved"], "with defaults"
    assert found["changeable"]["pipeline.steps"] == 10
    assert "pipeline.group_size" not in found["changeable"]


async def test_the_utilization_of_hosts_is_fractions_and_null_without_a_value(panel: Panel) -> None:
    query = {"since": "2026-11-29T03:00:00Z", "until": "2026-11-29T04:00:00+00:00", "points": 60}
    found = (await panel.http.get("/api/cluster/utilization", params=query)).json()
    [asked] = panel.orchestrator.requests("ListHostUse")
    assert (asked.since.ToJsonString(), asked.points) == ("2026-11-29T03:00:00Z", 60)
    assert asked.until.ToJsonString() == "2026-11-29T04:00:00Z"
    [host] = found["hosts"]
    assert host["host"] == "node-a"
    assert (host["cpu"][0], host["cpu"][30]) == (0.5, None)
    assert host["gpu"] == [None] * 60 == [None] * len(found["times"])
    for bad in ({"since": "yesterday"}, {"since": "2026-11-29T03:00:00"}, {"points": 0}):
        reply = await panel.http.get("/api/cluster/utilization", params=bad)
        assert (reply.status_code, reply.json()["field"]) == (422, f"query.{next(iter(bad))}")
