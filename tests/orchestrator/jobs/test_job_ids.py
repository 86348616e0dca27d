"""Ids of jobs that did not choose one."""

from __future__ import annotations

from services.orchestrator.jobs.manager import job_id_of


def test_an_id_has_no_dots_of_the_name_and_is_repeatable() -> None:
    job_id = job_id_of("qwen3-0.6b.v2", "request")
    assert job_id.startswith("qwen3-0-6b-v2-")
    assert "." not in job_id  # engines' ids are "JOB.POLICY.NUMBER"
    assert job_id == job_id_of("qwen3-0.6b.v2", "request")
    assert job_id != job_id_of("qwen3-0-6b-v2", "request")
