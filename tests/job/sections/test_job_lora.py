"""The section `lora`: its meaning, and invalid combinations."""

from __future__ import annotations

import json
from typing import Any

import pytest

from troupe.job import JobSpecError, LoraSpec, parse_job
from troupe.job.sections.balancing import exchange
from troupe.job.sections.policy import PolicySpec


def written(lora: dict[str, Any], policy: dict[str, Any], pipeline: dict[str, Any]) -> str:
    return json.dumps(
        {
            "name": "team",
            "workflow": "a.b:play",
            "tasks": {"source": "a.b:Tasks"},
            "agents": {"a": {"policy": "a"}},
            "policies": {"a": {"model": {"path": "/models/qwen"}, "lora": lora, **policy}},
            "pipeline": {"steps": 3, "queries_per_step": 2, **pipeline},
        }
    )


@pytest.mark.parametrize(
    ("lora", "policy", "pipeline", "message"),
    [
        ({"rank": 0}, {}, {}, "policies.a.lora.rank = 0"),
        ({"alpha": 0}, {}, {}, "policies.a.lora.alpha = 0"),
        ({"dropout": 1}, {}, {}, "policies.a.lora.dropout = 1"),
        ({"target_modules": []}, {}, {}, "policies.a.lora.target_modules"),
        ({"target_modules": ["q-proj"]}, {}, {}, "'q-proj' is not the name of a layer"),
        ({"ranks": 1}, {}, {}, "policies.a.lora.ranks"),
        ({"dropout": 0.1}, {}, {"deterministic": True}, "policies.a.lora.dropout: dropout depends"),
        ({}, {"simulated": {}}, {}, "policies.a.lora: a simulated policy does not learn"),
    ],
)
def test_impossible_lora_settings_are_refused_by_field(
    lora: dict[str, Any], policy: dict[str, Any], pipeline: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobSpecError) as caught:
        parse_job(written(lora, policy, pipeline))
    assert message in str(caught.value)


def test_target_layers_are_sorted_without_duplicates() -> None:
    spec = LoraSpec(target_modules=["v_proj", "q_proj", "v_proj"])
    assert spec.target_modules == ["q_proj", "v_proj"]


def test_engines_of_adapters_of_one_shape_may_change_places() -> None:
    def policy(lora: dict[str, Any] | None) -> PolicySpec:
        return PolicySpec.model_validate({"model": {"path": "/m"}, "lora": lora})

    small = policy({"rank": 4})
    assert exchange(small, policy({"rank": 4, "path": "/begin/here"})) == "in_place"
    assert exchange(small, policy({"rank": 8})) == "rebuild"
    assert exchange(small, policy(None)) == "rebuild"
