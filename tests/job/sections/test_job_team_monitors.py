"""Evaluations that judge and replace agents: their fields, and what they are refused for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.job.test_job_loading import JOB, fault, written
from troupe.job import JobSpec, parse_job

FROZEN = {**JOB["policies"]["solver"], "trainable": False}
BASE = {"policies__base": FROZEN}


def evaluating(**section: Any) -> dict[str, Any]:
    return {"evaluation": {"queries": 8} | section}


def test_a_frozen_policy_that_only_replaces_agents_is_used() -> None:
    section = {"contributions": {"queries": 4, "by": "base"}, "judges": {"solver": "(?i)yes"}}
    spec = parse_job(written(**evaluating(**section), **BASE, agents__reader__policy="base"))
    # The frozen policy plays the reader anyway.
    assert spec.replaced_agents("") == ["solver"]
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    left_out = parse_job(written(**evaluating(contributions={"queries": 4})))
    assert left_out.replaced_agents("") == list(left_out.agents)
    assert parse_job(written()).replaced_agents("") == []


@pytest.mark.parametrize("metric", ["contribution/solver", "accepts_wrong/solver", "turn_share/b"])
def test_a_job_may_stop_by_a_monitor(metric: str) -> None:
    section = {"contributions": {"queries": 4}, "judges": {"solver": "yes"}, "every": 1}
    over = evaluating(**section) | {"agents__b__policy": "solver"}
    for name in (f"evaluation/{metric}", f"evaluation/{metric}/low"):
        assert parse_job(written(**over, stop={"metric": name, "at": 0})).stop is not None
    stop = {"metric": f"evaluation/{metric}s", "at": 0}
    assert f"did you mean `evaluation/{metric}`" in fault(written(**over, stop=stop))


def test_more_queries_than_the_evaluation_has_are_all_of_them() -> None:
    section = {"contributions": {"queries": 60_000}, "samples": 64}
    assert parse_job(written(**evaluating(**section), agents__b__policy="solver"))


@pytest.mark.parametrize(
    ("over", "named", "said"),
    [
        (evaluating(judges={"nobody": "yes"}), "evaluation.judges", "is not an agent"),
        (evaluating(judges={"solver": "("}), "evaluation.judges", "not a regular expression"),
        (evaluating(judges={"solver": ""}), "evaluation.judges", "at least 1 character"),
        (evaluating(contributions={}), "evaluation.contributions.queries", "required"),
        (
            evaluating(contributions={"queries": 1, "agents": ["nobody"]}),
            "evaluation.contributions.agents",
            "is not an agent",
        ),
        (
            evaluating(contributions={"queries": 1, "by": "nobody"}),
            "evaluation.contributions.by",
            "is not a policy",
        ),
        (
            evaluating(contributions={"queries": 1, "by": "solver"}),
            "evaluation.contributions.by",
            "`trainable: false`",
        ),
        (
            evaluating(contributions={"queries": 1, "by": "base", "agents": ["reader"]})
            | BASE
            | {"agents__reader__policy": "base"},
            "evaluation.contributions.agents",
            "'base' plays 'reader' anyway",
        ),
        (
            evaluating(contributions={"queries": 60_000}, samples=3, queries=60_000)
            | {"agents__b__policy": "solver"},
            "evaluation.contributions.queries",
            "are more than",
        ),
        (
            evaluating(contributions={"queries": 1, "by": "base"})
            | BASE
            | {
                "policies__base__engine": {"kind": "vllm"},
                "agents__solver__sampling": {"top_p": 0.9},
            },
            "agents.solver.sampling.logprobs",
            "`vllm`, which `base` has",
        ),
        (BASE, "policies.base", "no agent uses it"),
    ],
)
def test_invalid_monitors_are_refused_by_field(over: dict[str, Any], named: str, said: str) -> None:
    found = fault(written(**over))
    assert named in found
    assert said in found
