"""Steps that learn from rows (`supervised`, `preferences`) in one job with other sections."""

from __future__ import annotations

import pytest

from tests.support.cluster import job_yaml
from troupe.job import JobSpecError, parse_job

ROWS = {"tasks": {"source": "examples.nowhere:Rows"}, "steps": 1, "agent": "solver"}


@pytest.mark.parametrize("section", ["supervised", "preferences"])
def test_rows_are_not_learned_again_in_steps_of_reinforcement_learning(section: str) -> None:
    changes = {section: ROWS, "pipeline__mode": "async"}
    assert parse_job(job_yaml(**changes)).offline is not None
    with pytest.raises(JobSpecError, match=f"not with `{section}`.*set it to 1") as refused:
        parse_job(job_yaml(**changes, pipeline__max_uses=2))
    assert refused.value.problems[0].field == "pipeline.max_uses"
