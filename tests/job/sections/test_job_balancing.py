"""The balancing section: its meaning, and invalid settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.job.sections.balancing import exchange
from troupe.job.sections.policy import PolicySpec

MODEL = {"path": "/models/qwen"}


def job(balancing: dict[str, Any] | None = None, **policies: dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate(written(balancing, **policies))


def written(balancing: dict[str, Any] | None = None, **policies: dict[str, Any]) -> dict[str, Any]:
    policies = policies or {"a": {"engine": {"replicas": 2}}, "b": {}}
    return {
        "name": "team",
        "workflow": "a.b:play",
        "tasks": {"source": "a.b:Tasks"},
        "agents": {name: {"policy": name} for name in policies},
        "policies": {name: {"model": MODEL, **policy} for name, policy in policies.items()},
        "pipeline": {"steps": 3, "queries_per_step": 2},
        "balancing": balancing or {},
    }


def fault(balancing: dict[str, Any], **policies: dict[str, Any]) -> str:
    with pytest.raises(JobSpecError) as caught:
        parse_job(json.dumps(written(balancing, **policies)))
    return str(caught.value)


def test_engines_move_by_default_where_they_can() -> None:
    assert job().balances
    assert not job({"inter": False}).balances
    assert not job(a={}, b={}).balances
    assert not job(a={"engine": {"replicas": 4}}).balances
    other = {"model": {"path": "/models/llama"}}
    assert not job(a={"engine": {"replicas": 2}}, b=other).balances
    assert job({"rebuild": True}, a={"engine": {"replicas": 2}}, b=other).balances
    # Services pass the specification on with its defaults filled in.
    for spec in (job(), job(a={}, b={})):
        assert parse_job(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("source", "target", "way"),
    [
        ({}, {}, "in_place"),
        ({"engine": {"replicas": 4}}, {"engine": {"start_timeout_seconds": 9}}, "in_place"),
        ({"trainable": False}, {"optimizer": {"lr": 0.1}}, "in_place"),
        ({}, {"model": {"path": "/models/llama"}}, "rebuild"),
        ({}, {"model": MODEL | {"dtype": "bfloat16"}}, "rebuild"),
        ({}, {"engine": {"kind": "sglang"}}, "rebuild"),
        ({}, {"engine": {"max_context": 64}}, "rebuild"),
        ({"simulated": {}}, {"simulated": {"load_seconds": 3}}, "rebuild"),
        (
            {"engine": {"kind": "sglang", "urls": ["http://a:1"]}},
            {"engine": {"kind": "sglang"}, "model": {"path": "/models/llama"}},
            "never",
        ),
    ],
)
def test_the_way_of_an_engine_to_another_policy_follows_from_its_kind(
    source: dict[str, Any], target: dict[str, Any], way: str
) -> None:
    a, b = (PolicySpec.model_validate({"model": MODEL, **one}) for one in (source, target))
    assert exchange(a, b) == exchange(b, a) == way


def test_a_launched_engine_may_join_attached_ones_but_none_of_these_leaves() -> None:
    sglang = {"model": MODEL, "engine": {"kind": "sglang"}}
    launched = PolicySpec.model_validate(sglang)
    attached = PolicySpec.model_validate(
        sglang | {"engine": {"kind": "sglang", "urls": ["http://a:1"]}}
    )
    assert exchange(launched, attached) == "in_place"
    assert exchange(attached, launched) == exchange(attached, attached) == "never"


def test_the_threshold_is_in_the_unit_of_the_measure() -> None:
    assert job().balancing.rules.threshold == 5
    assert job().balancing.rules.hysteresis == 1
    assert job({"measure": "tokens"}).balancing.rules.threshold == 4096
    assert job({"threshold": 2, "hysteresis": 2}).balancing.rules.hysteresis == 2


@pytest.mark.parametrize(
    ("balancing", "policies", "message"),
    [
        ({"minimum": {"x": 1}}, {}, "balancing.minimum: 'x' is not a policy; known: a, b"),
        ({"minimum": {"a": 3}}, {}, "balancing.minimum.a: 3 is not between 1 and the 2 engines"),
        ({"minimum": {"a": 0}}, {}, "balancing.minimum.a: 0 is not"),
        ({"hysteresis": 9}, {}, "hysteresis = 9: must not exceed the threshold (5)"),
        ({"threshold": 0}, {}, "balancing.threshold = 0"),
        ({"inter": True}, {"a": {"engine": {"replicas": 2}}}, "there is one policy only"),
        ({"inter": True}, {"a": {}, "b": {}}, "no policy has more engines than it keeps"),
        ({"inter": True, "minimum": {"a": 2}}, {}, "no policy has more engines than it keeps"),
        (
            {"inter": True},
            {"a": {"engine": {"replicas": 2}}, "b": {"model": {"path": "/other"}}},
            "no engine can serve another policy",
        ),
    ],
)
def test_impossible_balancing_is_refused_by_field(
    balancing: dict[str, Any], policies: dict[str, dict[str, Any]], message: str
) -> None:
    assert message in fault(balancing, **policies)
