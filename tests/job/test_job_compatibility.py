"""Changes after which a job is still the same job."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import job_yaml
from troupe.job import JobSpec, parse_job
from troupe.job.compatibility import (
    CHANGEABLE,
    changeable_values,
    differences,
    incompatible,
    reason,
)

FUNCTION = {"entrypoint": "examples.nowhere:reward"}


def spec(**over: Any) -> JobSpec:
    return parse_job(job_yaml(**{"rewards": {"exact": FUNCTION}, **over}))


def test_a_job_does_not_differ_from_itself() -> None:
    assert differences(spec(), spec()) == []
    # A default that is written out changes nothing.
    assert differences(spec(), spec(algorithm__clip_low=0.2)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pipeline__steps", 9),
        ("pipeline__micro_batch_samples", 3),
        ("policies__solver__optimizer", {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 3}),
        ("agents__solver__sampling", {"temperature": 0.5, "top_p": 0.9, "top_k": 40}),
        ("limits__step_seconds", 17),
        ("evaluation__queries", 4),
        ("checkpoint__every", 2),
        ("logging__tensorboard", True),
        ("policies__solver__engine", {"replicas": 2, "max_running": 3}),
        ("rewards", {"exact": FUNCTION | {"timeout_seconds": 3}}),
    ],
)
def test_changeable_fields_may_change_when_a_job_is_resumed(path: str, value: object) -> None:
    changed = spec(**{path: value})
    assert differences(spec(), changed)
    assert incompatible(spec(), changed, steps_done=2) == []


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("seed", 1, "seed"),
        ("workflow", "examples.nowhere:other", "workflow"),
        ("tasks__args", {"size": 3}, "tasks.args.size"),
        ("pipeline__group_size", 3, "pipeline.group_size"),
        ("pipeline__queries_per_step", 3, "pipeline.queries_per_step"),
        ("pipeline__mode", "sync", "pipeline.mode"),
        ("pipeline__deterministic", True, "pipeline.deterministic"),
        ("pipeline__over_sampling", 1, "pipeline.over_sampling"),
        ("pipeline__redundant_trajectories", 1, "pipeline.redundant_trajectories"),
        ("pipeline__dynamic_sampling", True, "pipeline.dynamic_sampling"),
        ("pipeline__required_columns", ["x"], "pipeline.required_columns"),
        ("algorithm__clip_low", 0.1, "algorithm.clip_low"),
        ("policies__solver__optimizer", {"betas": [0.8, 0.9]}, "policies.solver.optimizer.betas"),
        ("policies__solver__trainable", False, "policies.solver.trainable"),
        (
            "agents__solver__sampling",
            {"stop": ["."]},
            "agents.solver.sampling.stop",
        ),
        ("rewards", {"exact": FUNCTION | {"version": "2"}}, "rewards.exact.version"),
        ("rewards", {}, "rewards.exact"),
    ],
)
def test_fields_that_define_the_job_may_not_change(path: str, value: object, named: str) -> None:
    found = incompatible(spec(), spec(**{path: value}), steps_done=0)
    assert [one.path for one in found] == [named]
    assert str(found[0]).startswith(f"{named}: ")
    assert " -> " in str(found[0])


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("seed", "randomness"),
        ("tasks.args.size", "must not repeat"),
        ("policies.solver.optimizer.betas", "computed again"),
        ("policies.solver.model.path", "belong to this model"),
        ("policies.third", "would not fit together"),
        ("pipeline.mode", "which samples are in a step"),
        ("rewards.exact.version", "differ in meaning"),
    ],
)
def test_a_field_that_may_not_change_has_a_reason(path: str, why: str) -> None:
    assert why in reason(path)


def test_a_type_that_follows_from_another_kind_of_engine_is_to_be_named() -> None:
    path = {"policies__solver__model": {"path": "/models/solver"}}
    old, new = spec(**path), spec(**path, policies__solver__engine={"kind": "sglang"})
    [found] = incompatible(old, new, steps_done=1)
    assert (found.path, found.old, found.new) == ("policies.solver.model.dtype", "float32", "auto")
    assert "name the old value" in reason(found.path)
    path["policies__solver__model"]["dtype"] = "float32"
    new = spec(**path, policies__solver__engine={"kind": "sglang"})
    assert incompatible(old, new, steps_done=1) == []


def test_steps_that_are_done_cannot_be_undone() -> None:
    assert incompatible(spec(), spec(pipeline__steps=1), steps_done=1) == []
    found = incompatible(spec(), spec(pipeline__steps=1), steps_done=2)
    assert [(one.path, one.old, one.new) for one in found] == [("pipeline.steps", 2, 1)]


def test_the_values_that_may_change_are_those_that_a_resume_takes() -> None:
    values = changeable_values(spec().model_dump(mode="json"))
    assert values["pipeline.steps"] == 2
    assert values["agents.solver.sampling.temperature"] == 1.0
    assert {"policies.solver.optimizer.lr", "rewards.exact.timeout_seconds"} <= values.keys()
    assert not {"seed", "pipeline.mode", "policies.solver.optimizer.weight_decay"} & values.keys()


def test_an_added_policy_makes_another_job() -> None:
    more = spec(policies=["checker", "solver", "third"])
    paths = {one.path for one in incompatible(spec(), more, steps_done=0)}
    assert paths == {"agents.third", "policies.third"}


def test_every_changeable_pattern_names_a_field() -> None:
    """A pattern whose field was renamed would silently refuse its changes."""
    dumped = spec(tools={"calculator": FUNCTION}, population={}).model_dump(mode="json")
    for pattern in CHANGEABLE:
        place: Any = dumped
        for part in pattern.split("."):
            name = next(iter(place)) if part == "*" else part
            assert name in place, pattern
            place = place[name]
