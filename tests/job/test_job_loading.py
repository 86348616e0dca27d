"""Valid and invalid job files."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.jobs import job_text
from troupe.client.cli.specification import apply_assignments
from troupe.job import JobSpecError, load_job, parse_job, parse_job_in_thread

JOB: dict[str, Any] = {
    "name": "team",
    "workflow": "a.b:play",
    "tasks": {"source": "a.b:Tasks"},
    "agents": {"solver": {"policy": "solver"}},
    "policies": {"solver": {"model": {"path": "/models/solver"}}},
    "pipeline": {"steps": 3, "queries_per_step": 2},
}


def written(**changes: Any) -> str:
    """Return the job with fields replaced by dotted name (`__` for the dot)."""
    return job_text(JOB, changes)


def fault(text: str) -> str:
    with pytest.raises(JobSpecError) as caught:
        parse_job(text)
    return str(caught.value)


def test_yaml_and_the_json_of_services_are_the_same_job() -> None:
    spec = parse_job(written())
    assert parse_job(spec.model_dump_json()) == spec
    # Not JSON, although it begins like JSON.
    assert parse_job(yaml.safe_dump(JOB, default_flow_style=True)).name == "team"


def test_a_home_directory_is_expanded_where_the_job_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    model = parse_job(written(policies__solver__model={"path": "~/solver"})).policies["solver"]
    assert model.model.path == "/home/ada/solver"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"piplines": {}}, "piplines = {}: there is no such field. Did you mean"),
        ({"pipeline__stps": 1}, "pipeline.stps = 1: .* Did you mean `steps`"),
        ({"pipeline__steps": -1}, "pipeline.steps = -1: .*greater than or equal to 0"),
        ({"pipeline__group_size": 10**6}, "pipeline.group_size = 1000000: .*less than or equal"),
        ({"policies__solver__optimizer__lr": float("inf")}, "optimizer.lr = inf: .*finite"),
        ({"limits__turn_seconds": float("nan")}, "limits.turn_seconds = nan"),
        ({"policies__solver__engine": {"max_running": 10**7}}, "max_running = 10000000: .*less"),
        (
            {"policies__solver__engine": {"urls": ["http://gpu-1:1", "http://GPU-1:1/"]}},
            "given twice; a server is one engine",
        ),
        ({"policies__solver__engine": {"urls": ["gpu-1"]}}, "engine.urls: 'gpu-1' is not of the"),
        (
            {"policies__solver__engine": {"urls": ["http://gpu-1:1"]}},
            "kind `sglang` or `vllm`, not `embed",
        ),
        ({"agents__solver__policy": "solvr"}, "agents.solver.policy: 'solvr' is not a policy"),
        ({"agents__team": {"policy": "solver"}}, "agents.team: .* belongs to no agent"),
        (
            {"policies__evaluation": JOB["policies"]["solver"], "agents__b__policy": "evaluation"},
            "policies.evaluation: metrics",
        ),
        ({"policies__solver__trainable": False}, "policies: none is trainable"),
        ({"pipeline__required_columns": ["reward"]}, "every sample already waits for 'reward'"),
        ({"pipeline__required_columns": ["a b"]}, "'a b' does not name a column"),
        ({"tasks__args": {"x": b"\xff"}}, "tasks.args: must consist of JSON values"),
    ],
)
def test_a_bad_field_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        parse_job(written(**change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the job: is empty. Start from an example"),
        ("# nothing\n", "the job: is empty"),
        ("- a\n", "the job: must be a mapping, not list"),
        ("a: [\n", "line 2, column 1: "),
        ("a: 2026-13-45\n", "the job: month must be in 1..12. Quote the value"),
        ("[" * 20_000, "the job: is nested too deeply"),
        ('{"a": ' * 20_000, "the job: is nested too deeply"),
        ("a: &a [*a]\n", "the job: contains itself through an alias"),
        ("a: " + "x" * (1 << 20), "the job: is longer than 1,048,576 bytes"),
    ],
)
def test_a_text_that_is_not_a_job_is_refused_with_the_reason(text: str, message: str) -> None:
    assert message in fault(text)


def test_aliases_are_allowed_within_a_bound() -> None:
    agents = {"agents": {"a": (one := {"policy": "solver"}), "b": one}}
    text = yaml.safe_dump(JOB | agents)
    assert "*id001" in text
    assert set(parse_job(text).agents) == {"a", "b"}
    laughs = ["x0: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    laughs += [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 30)]
    assert "has more than 30,000 keys and values" in fault("\n".join(laughs))


@pytest.mark.parametrize("field", ["policies", "agents", "tools", "rewards"])
@pytest.mark.parametrize("entries", [{f"x{n}": {} for n in range(50_000)}, [{}] * 50_000])
def test_too_many_entries_are_reported_as_one_fault(field: str, entries: Any) -> None:
    with pytest.raises(JobSpecError) as caught:
        parse_job(json.dumps(JOB | {field: entries}))
    (told,) = caught.value.problems
    assert told.field == field
    assert re.match(r"50000 entries; at most \d+ are possible", told.message)


def test_too_many_fields_are_reported_as_one_fault() -> None:
    many = {f"x{n}": 1 for n in range(50_000)}
    for job, field in ((many, "job"), (JOB | {"pipeline": many}, "pipeline")):
        with pytest.raises(JobSpecError) as caught:
            parse_job(json.dumps(job))
        (told,) = caught.value.problems
        assert told.field == field
        assert told.message.startswith("50000 entries")


async def test_texts_are_parsed_one_at_a_time_outside_the_event_loop() -> None:
    parsing: set[str] = set()

    def names() -> set[str]:
        return {one.name for one in threading.enumerate() if one.name.startswith("parse-job")}

    text = yaml.safe_dump(JOB) + "extra: [" + "{}," * 5_000 + "{}]"
    tasks = [asyncio.create_task(parse_job_in_thread(text, f"text {n}")) for n in range(8)]
    turns = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        parsing |= names()
        turns += 1
    # Parsed within the event loop, they would all end within a few turns of it.
    assert turns > 50
    assert len(parsing) == 1
    for task in tasks:
        assert isinstance(task.exception(), JobSpecError)


def test_a_duplicate_name_in_json_is_reported_with_its_place() -> None:
    text = json.dumps(JOB)
    assert parse_job(text) == parse_job(yaml.safe_dump(JOB))
    twice = text[:-1] + ', "policies": {"solver": {"model": {"path": "/models/other"}}}}'
    assert f"line 1, column {len(text) + 2}: `policies` appears twice" in fault(twice)


def test_a_duplicate_name_in_yaml_is_reported_with_its_place() -> None:
    twice = yaml.safe_dump(JOB) + "policies:\n  solver: {model: {path: /models/other}}\n"
    line = yaml.safe_dump(JOB).count("\n") + 1
    told = f"line {line}, column 1: `policies` appears twice"
    assert told in fault(twice)
    assert told in fault(f"{twice}seed: &a 3\n")
    with pytest.raises(JobSpecError) as caught:
        apply_assignments(twice, ["seed=3"])
    assert told in str(caught.value)


def test_a_merged_key_may_be_replaced() -> None:
    text = yaml.safe_dump({k: v for k, v in JOB.items() if k != "agents"}) + (
        "agents:\n"
        "  a: &a {policy: solver, sampling: {temperature: 0.5}}\n"
        "  b: &b {<<: *a, sampling: {temperature: 0.7}}\n"
        "  c: {<<: *b, sampling: {temperature: 0.9}}\n"
    )
    assert [a.sampling.temperature for a in parse_job(text).agents.values()] == [0.5, 0.7, 0.9]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    for make, message in (
        (lambda: None, f"{file}: cannot be read: No such file or directory. Check the path."),
        (lambda: file.write_bytes(b"\xff\xfe"), f"{file}: is not UTF-8 text"),
        (lambda: file.write_text(""), f"{file}: is empty"),
    ):
        make()
        with pytest.raises(JobSpecError) as caught:
            load_job(file)
        assert message in str(caught.value)
    with pytest.raises(JobSpecError, match="cannot be read"):
        load_job("a\0b")


@pytest.mark.parametrize("field", ["over_sampling", "redundant_trajectories"])
def test_deterministic_jobs_refuse_settings_that_depend_on_time(field: str) -> None:
    changes = {f"pipeline__{field}": 2}
    for mode in ("serial", "sync", "micro_batch", "async"):
        assert getattr(parse_job(written(pipeline__mode=mode, **changes)).pipeline, field) == 2
    said = fault(written(pipeline__deterministic=True, **changes))
    assert f"pipeline.{field}: " in said
    assert "depends on time" in said


def test_the_removed_setting_for_engine_processes_names_its_replacement() -> None:
    said = fault(written(policies__solver__engine={"own_process": True}))
    assert "policies.solver.engine: own_process = true: " in said
    assert "start several rollout workers" in said
    # As in stored jobs of earlier releases.
    spec = parse_job(written(policies__solver__engine={"own_process": False}))
    assert "own_process" not in spec.model_dump_json()


def test_two_policies_cannot_share_a_server() -> None:
    spec = yaml.safe_load(written())
    spec["policies"]["other"] = yaml.safe_load(yaml.safe_dump(spec["policies"]["solver"]))
    spec["agents"]["second"] = {"policy": "other"}
    for name, url in (("solver", "http://gpu-1:3000"), ("other", "http://gpu-1:3000/")):
        spec["policies"][name]["engine"] = {"kind": "sglang", "urls": [url]}
    assert "already; a server has one policy's weights" in fault(yaml.safe_dump(spec))
    spec["policies"]["other"]["engine"]["urls"] = ["http://gpu-1:3001"]
    assert parse_job(yaml.safe_dump(spec)).policies["other"].engine.update == "auto"


def test_a_gang_in_a_deterministic_job_is_refused() -> None:
    spec = yaml.safe_load(written())
    spec["policies"]["solver"]["trainer"] = {"gang": 2}
    spec["algorithm"] = {**spec.get("algorithm", {}), "advantage": "gae"}
    spec["policies"]["solver"]["lora"] = {"rank": 2}
    assert parse_job(yaml.safe_dump(spec)).policies["solver"].trainer.gang == 2
    spec["pipeline"] = {**spec.get("pipeline", {}), "deterministic": True}
    said = fault(yaml.safe_dump(spec))
    assert "policies.solver.trainer.gang: " in said
    assert "in another order and round" in said
