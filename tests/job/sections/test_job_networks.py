"""Jobs whose policies are small networks: their sections, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.job.reference import reference


def _job(**changes: Any) -> dict[str, Any]:
    """Return a job of one network; "section.field" reaches into a section, None removes a field."""
    job: dict[str, Any] = {
        "name": "particles",
        "environment": {"source": "simple_spread", "copies": 4},
        "agents": {"one": {"policy": "team"}, "two": {"policy": "team"}},
        "policies": {"team": {"network": {"learning": {"paradigm": "mappo"}}}},
        "pipeline": {"steps": 2, "queries_per_step": 1},
    }
    for path, value in changes.items():
        *sections, last = path.split("__")
        place = job
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
        if value is None:
            del place[last]
    return job


def _parse(job: dict[str, Any]) -> JobSpec:
    return parse_job(yaml.safe_dump(job))


def test_a_job_of_networks_is_read_back_as_it_is() -> None:
    spec = _parse(_job())
    assert (spec.pipeline.mode, spec.pipeline.group_size) == ("sync", 1)
    assert spec.workflow is None
    assert spec.tasks is None
    assert not spec.balances
    network = spec.policies["team"].network
    assert network is not None
    assert network.learning.paradigm == "mappo"
    assert parse_job(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": None}, "policies.team.network"),
        ({"workflow": "a.b:c"}, "workflow"),
        ({"tasks": {"source": "a.b:c"}}, "tasks"),
        ({"rewards": {"score": {"entrypoint": "a.b:c"}}}, "rewards"),
        ({"tools": {"search": {"entrypoint": "a.b:c"}}}, "tools"),
        ({"algorithm": {"loss": "gspo"}}, "algorithm"),
        ({"routing": {"sticky": 0.5}}, "routing"),
        ({"agents__one__system_prompt": "You move."}, "agents.one"),
        ({"pipeline__mode": "micro_batch"}, "pipeline.mode"),
        ({"pipeline__group_size": 4}, "pipeline.group_size"),
        ({"pipeline__dynamic_sampling": True}, "pipeline.dynamic_sampling"),
        ({"pipeline__redundant_trajectories": 1}, "pipeline.redundant_trajectories"),
        ({"pipeline__micro_batch_tokens": 5}, "pipeline.micro_batch_tokens"),
        ({"pipeline__rollout": "batch"}, "pipeline.rollout"),
        ({"pipeline__required_columns": ["x"]}, "pipeline.required_columns"),
        ({"evaluation": {"temperature": 0.5}}, "evaluation.temperature"),
        ({"evaluation": {"answer_pattern": "x"}}, "evaluation.answer_pattern"),
        ({"policies__team__lora": {"rank": 2}}, "policies.team: lora"),
        ({"policies__team__optimizer": {"lr": 1.0}}, "policies.team: optimizer"),
        ({"policies__team__engine": {"kind": "sglang"}}, "policies.team: engine"),
        ({"policies__team__trainer": {"gang": 2}}, "policies.team: trainer"),
        ({"policies__team__simulated": {}}, "policies.team: simulated"),
        ({"policies__team__model": {"path": "/m"}}, "policies.team: give exactly one"),
        ({"policies__team__network": None}, "policies.team: give exactly one"),
        ({"policies__other": {"model": {"path": "/m"}}, "agents__two__policy": "other"}, "other"),
        ({"environment__copies": 0}, "environment.copies"),
        (
            {"policies__team__network__learning__clip": 2},
            "policies.team.network.learning.mappo.clip",
        ),
    ],
)
def test_settings_that_exclude_networks_are_refused_by_field(
    changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(JobSpecError) as caught:
        _parse(_job(**changes))
    assert field in str(caught.value), caught.value


def test_a_job_of_language_models_needs_a_workflow() -> None:
    job = _job(environment=None, policies__team={"model": {"path": "/m"}})
    with pytest.raises(JobSpecError, match="workflow: is missing"):
        _parse(job)


def test_a_misspelt_field_of_a_paradigm_is_recognised() -> None:
    job = _job(policies__team__network__learning={"paradigm": "qmix", "mixer_with": 8})
    with pytest.raises(JobSpecError, match="Did you mean `mixer_width`"):
        _parse(job)


@pytest.mark.parametrize(
    ("learning", "says"),
    [
        ({"paradigm": "dqn", "epsilon": [1.5, 0.1]}, "dqn.epsilon.0 = 1.5"),
        ({"paradigm": "qmix", "buffer": 8, "warmup": 9}, "never holds 9"),
        ({"paradigm": "maddpg", "buffer": 8, "warmup": 9}, "at most buffer = 8"),
    ],
)
def test_learning_settings_that_never_update_are_refused(
    learning: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobSpecError) as caught:
        _parse(_job(policies__team__network__learning=learning))
    assert says in str(caught.value)


def test_the_reference_has_every_paradigm_and_equals_the_page() -> None:
    page = reference()
    shown = Path(__file__).parents[3] / "docs" / "job-reference.md"
    assert shown.read_text(encoding="utf-8") == page, "write it anew: make docs"
    for paradigms in ("ppo, mappo", "dqn, vdn, qmix", "maddpg"):
        assert f"## `policies.<name>.network.learning ({paradigms})`" in page


def test_the_reference_describes_each_section_once_and_its_links_lead_to_headings() -> None:
    page = reference()
    headings = re.findall(r"(?m)^## (.+)$", page)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
    assert len(anchors) == len(headings)
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors
    tables = re.findall(r"(?m)(?:^\|.*\n)+", page)
    assert len(tables) == len(set(tables))
