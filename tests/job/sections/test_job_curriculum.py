"""The section `curriculum`: its bounds, its measure of success, and invalid combinations."""

from __future__ import annotations

from typing import Any

import pytest

from tests.job.test_job_loading import fault, written
from troupe.job import JobSpec, parse_job


def test_curriculum_defaults_survive_the_way_between_services() -> None:
    spec = parse_job(written(curriculum={"success": "solver", "band": [0.2, 0.8]}))
    assert spec.curriculum is not None
    assert (spec.curriculum.band, spec.curriculum.threshold) == ((0.2, 0.8), 1.0)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert parse_job(written()).curriculum is None


@pytest.mark.parametrize(
    ("over", "named", "said"),
    [
        ({"curriculum": {"band": [0.9, 0.1]}}, "curriculum", "0.9 is above 0.1"),
        ({"curriculum": {"band": [0.1, 1.1]}}, "curriculum.band", "less than or equal to 1"),
        ({"curriculum": {"band": [0.1]}}, "curriculum.band", "required"),
        ({"curriculum": {"explore": 0.8, "replay": 0.3}}, "curriculum", "their sum is 1.15"),
        ({"curriculum": {"success": "nobody"}}, "curriculum.success", "neither an agent nor one"),
        (
            {"curriculum": {}, "pipeline__early_start": True, "pipeline__mode": "sync"},
            "curriculum",
            "not with `pipeline.early_start`",
        ),
    ],
)
def test_invalid_curricula_are_refused_by_field(
    over: dict[str, Any], named: str, said: str
) -> None:
    found = fault(written(**over))
    assert named in found
    assert said in found


def test_a_job_without_tasks_has_nothing_to_choose() -> None:
    supervised = {"tasks": {"dataset": "a.jsonl"}, "steps": 3}
    text = written(curriculum={}, supervised=supervised, tasks=None, workflow=None)
    assert "has no `tasks` to choose from" in fault(text)
