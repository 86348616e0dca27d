"""`init_from`: its forms, and invalid combinations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import job_yaml
from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.job.origins import Origin, difference_of, with_origins


def job(given: Any, **over: Any) -> JobSpec:
    return parse_job(job_yaml(**{"policies__solver__init_from": given, **over}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("teacher", {"job": "teacher"}),
        ("teacher@12", {"job": "teacher", "version": 12}),
        ("./weights", {"path": "./weights"}),
        ("runs/teacher/checkpoints/solver/v3", {"path": "runs/teacher/checkpoints/solver/v3"}),
        ("s3://bucket/solver@3", {"path": "s3://bucket/solver@3"}),
        ({"job": "teacher", "optimizer": True}, {"job": "teacher", "optimizer": True}),
    ],
)
def test_an_origin_has_a_short_form(given: Any, expected: dict[str, Any]) -> None:
    found = job(given).policies["solver"].init_from
    assert found is not None
    assert found.model_dump(exclude_defaults=True) == expected


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({}, "policies.solver.init_from", "exactly one of `job` and `path`"),
        ({"job": "a", "path": "/b"}, "policies.solver.init_from", "exactly one"),
        ({"path": "/b", "version": 1}, "policies.solver.init_from", "belongs to a `job`"),
        ({"path": "/b", "optimizer": True}, "policies.solver.init_from", "no optimizer state"),
        ("teacher@x", "policies.solver.init_from.version", "integer"),
        ("@3", "policies.solver.init_from.job", "at least 1 character"),
    ],
)
def test_an_empty_or_contradictory_origin_is_refused(given: Any, field: str, message: str) -> None:
    with pytest.raises(JobSpecError) as refused:
        job(given)
    [problem] = refused.value.problems
    assert problem.field.startswith(field)
    assert message in problem.message


def test_a_frozen_policy_has_no_optimizer_to_begin_with() -> None:
    given = {"job": "teacher", "optimizer": True}
    with pytest.raises(JobSpecError, match="the policy is frozen"):
        job(given, policies__solver__trainable=False)


def test_the_slots_of_a_population_begin_with_what_their_learner_does() -> None:
    spec = job("teacher", population={}, policies__solver__lora={"rank": 4})
    found = with_origins(
        spec, {"solver": Origin("init/solver/v3", "teacher", "solver", 3)}, Path("/runs/student")
    )
    slots = [name for name in found.slots if name.startswith("solver")]
    assert slots
    for name in ("solver", *slots):
        assert found.policies[name].language_model.path == "/runs/student/init/solver/v3"
    assert with_origins(spec, {}, Path("/")) is spec


def test_keys_that_one_configuration_leaves_open_do_not_differ() -> None:
    model = {"model_type": "qwen3", "hidden_size": 64}
    assert difference_of(model, {**model, "num_hidden_layers": 3, "use_cache": False}) == ""
    assert difference_of(model, {"text_config": model}) == ""
    said = difference_of(model, {**model, "hidden_size": 32})
    assert said == "`hidden_size` is 32 in the checkpoint and 64 in the model"
