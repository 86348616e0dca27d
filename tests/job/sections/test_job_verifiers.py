"""Jobs whose tasks are environments of the `verifiers` library."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from troupe.job import JobSpec
from troupe.job.sections.data import JobTasksSpec
from troupe.job.spec import VERIFIERS_WORKFLOW
from troupe.workflow.loading import load_workflow

MARBLES = {"environment": "marble-v1", "python": "~/envs/marble/bin/python"}


def job(tasks: Any, **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "marbles",
            "tasks": tasks,
            "agents": {"solver": {"policy": "solver"}},
            "policies": {"solver": {"model": {"path": "Qwen/Qwen3-0.6B"}}},
            "pipeline": {"steps": 2, "queries_per_step": 4},
            **fields,
        }
    )


def test_an_environment_brings_its_workflow() -> None:
    spec = job({"verifiers": MARBLES})
    assert spec.workflow == VERIFIERS_WORKFLOW
    assert callable(load_workflow(spec.workflow))
    assert spec.tasks is not None
    assert spec.tasks.verifiers is not None
    assert not (spec.tasks.verifiers.python or "~").startswith("~")
    # As services exchange it, and as Python code may make it.
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert job(JobTasksSpec.model_validate({"verifiers": MARBLES})).workflow == VERIFIERS_WORKFLOW
    assert job({"verifiers": MARBLES}, workflow="mine:play").workflow == "mine:play"


def test_a_mixture_of_environments_has_the_same_workflow() -> None:
    both = {"marbles": {"verifiers": MARBLES, "weight": 2}, "sums": {"verifiers": MARBLES}}
    assert job({"mix": both}).workflow == VERIFIERS_WORKFLOW
    with pytest.raises(ValidationError, match="workflow: is missing"):
        job({"mix": {**both, "own": {"source": "mine:Tasks"}}})


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"verifiers": MARBLES, "source": "mine:Tasks"}, "exactly one of"),
        ({"verifiers": MARBLES, "split": "train"}, "`split` needs a `dataset`"),
        ({"verifiers": MARBLES, "args": {"a": 1}}, "`args` need a `source`"),
        ({"verifiers": MARBLES, "held_out": "test"}, "no splits by name"),
        ({"verifiers": {**MARBLES, "environment": "a b"}}, "environment"),
        ({"verifiers": {**MARBLES, "roles": {"agent": "nobody"}}}, "roles.agent: 'nobody' is no"),
        (
            {"mix": {"one": {"verifiers": {**MARBLES, "roles": {"agent": "nobody"}}}}},
            "tasks.mix.one.verifiers.roles.agent",
        ),
    ],
)
def test_contradictory_verifiers_tasks_are_refused(tasks: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        job(tasks)


def test_evaluations_may_have_environments_of_their_own() -> None:
    own = {"tasks": {"verifiers": {**MARBLES, "args": {"taskset": {"pieces": 2}}}}}
    spec = job({"verifiers": MARBLES}, evaluations={"harder": own})
    assert spec.evaluations["harder"].tasks is not None
    own["tasks"]["verifiers"]["roles"] = {"agent": "nobody"}
    with pytest.raises(ValidationError, match=r"evaluations\.harder\.tasks\.verifiers\.roles"):
        job({"verifiers": MARBLES}, evaluations={"harder": own})
    # Whether it has tasks for evaluations is known when it is loaded.
    assert job({"verifiers": MARBLES}, evaluation={"queries": 4}).tasks is not None


def test_an_environment_cannot_be_a_source_of_demonstrations() -> None:
    with pytest.raises(ValidationError, match="are not demonstrations"):
        job({"verifiers": MARBLES}, supervised={"tasks": {"verifiers": MARBLES}, "steps": 1})
