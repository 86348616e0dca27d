"""`troupe evaluate`: the jobs that it accepts, and the evaluations and models that it submits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.client.conftest import Run
from tests.client.project import JOB_YAML
from troupe.checkpoints.verifying import Lineage
from troupe.client.cli.jobs.evaluate import found_checkpoints, only_evaluated
from troupe.client.cli.train import TrainPlan
from troupe.job.engines.sharing import engine_groups
from troupe.job.loading import job_of
from troupe.rpc.errors import InvalidArgument, NotFound

SETS = {"gsm8k": {"queries": 4, "samples": 2}, "aime": {"queries": 2}}


@pytest.fixture
def raw() -> dict[str, Any]:
    return {**yaml.safe_load(JOB_YAML), "evaluations": SETS, "evaluation": {"queries": 3}}


@pytest.fixture
def job(tmp_path: Path, raw: dict[str, Any]) -> Path:
    """The directory of a job with checkpoints: of the solver 2, 5 and (the best) 3."""
    directory = tmp_path / "data" / "old"
    for folder, policy, version in (
        ("checkpoints", "solver", 2),
        ("checkpoints", "solver", 5),
        ("best", "solver", 3),
        ("checkpoints", "checker", 5),
    ):
        place = directory / folder / policy / f"v{version}"
        place.mkdir(parents=True)
        Lineage("old", "team", policy, version, version, "", "").write(place)
    # In the services' form, with all defaults filled in.
    text = yaml.safe_dump(job_of(raw).model_dump(mode="json"), sort_keys=False)
    (directory / "job.yaml").write_text(text)
    return directory


def test_a_job_is_its_newest_checkpoints_or_those_of_a_version(job: Path) -> None:
    source, found = found_checkpoints("old", None, job.parent)
    assert source == job / "job.yaml"
    assert {p: path.name for p, path in found.items()} == {"solver": "v5", "checker": "v5"}
    _, found = found_checkpoints(str(job), 3, job.parent)
    assert found == {"solver": job / "best" / "solver" / "v3"}
    best = job / "best" / "solver" / "v3"
    assert found_checkpoints(str(best), None, job.parent) == (job / "job.yaml", {"solver": best})
    with pytest.raises(NotFound, match="solver@2"):
        found_checkpoints("old", 9, job.parent)


def test_a_path_that_is_neither_job_nor_checkpoint_is_refused(job: Path, tmp_path: Path) -> None:
    assert found_checkpoints(str(job / "job.yaml"), None, tmp_path) == (job / "job.yaml", {})
    with pytest.raises(InvalidArgument, match="neither a job file"):
        found_checkpoints("nowhere", None, job.parent)


def test_evaluate_submits_a_job_without_steps(job: Path, raw: dict[str, Any]) -> None:
    written = yaml.safe_load((job / "job.yaml").read_text())
    for given in (raw, written):
        spec = job_of(only_evaluated(given, ["gsm8k"], {"solver": job / "v5"}))
        assert spec.pipeline.steps == 0
        assert list(spec.evaluation_sets) == ["gsm8k"]
        assert spec.policies["solver"].language_model.path == str(job / "v5")
        assert spec.policies["checker"].language_model.path == "/models/checker"
        every = job_of(only_evaluated(given, [], {}))
        assert list(every.evaluation_sets) == ["", "gsm8k", "aime"]
        assert list(job_of(only_evaluated(given, ["evaluation"], {})).evaluation_sets) == [""]


def test_a_checkpoint_is_evaluated_in_place_of_what_its_policy_began_with(
    raw: dict[str, Any], job: Path
) -> None:
    for policy in raw["policies"].values():
        policy["init_from"] = "teacher"
    spec = job_of(only_evaluated(raw, [], {"solver": job / "v5"}))
    assert spec.policies["solver"].init_from is None
    assert spec.policies["checker"].init_from is not None


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("supervised", {"tasks": {"dataset": "/data/rows.jsonl"}, "steps": 1}),
        ("preferences", {"tasks": {"dataset": "/data/pairs.jsonl"}, "steps": 1}),
        ("stop", {"metric": "evaluations/gsm8k/pass@1", "patience": 3}),
        ("curriculum", {}),
    ],
)
def test_sections_about_steps_are_left_out(
    raw: dict[str, Any], section: str, given: dict[str, Any]
) -> None:
    gsm8k = {**SETS["gsm8k"], "every": 1}
    raw = {**raw, "evaluations": {**SETS, "gsm8k": gsm8k}, section: given}
    assert getattr(job_of(raw), section)
    spec = job_of(only_evaluated(raw, ["aime"], {}))
    assert list(spec.evaluation_sets) == ["aime"]
    assert not getattr(spec, section)


def test_a_checkpoint_does_not_get_the_first_adapter_again(raw: dict[str, Any], job: Path) -> None:
    for policy in raw["policies"].values():
        policy["lora"] = {"rank": 4, "alpha": 8, "path": "/adapters/first"}
    spec = job_of(only_evaluated(raw, [], {"solver": job / "v5"}))
    lora = spec.policies["solver"].lora
    assert lora is not None
    assert (lora.rank, lora.path) == (4, None)
    kept = spec.policies["checker"].lora
    assert kept is not None
    assert kept.path == "/adapters/first"


def test_an_unknown_evaluation_is_named(run: Run, job: Path) -> None:
    status, _, err = run("evaluate", str(job / "job.yaml"), "--only", "math500")
    assert status == 2
    assert "math500" in err
    assert "The job has: evaluation, gsm8k, aime" in err


def test_set_with_a_name_is_refused_with_the_option_that_takes_names(run: Run, job: Path) -> None:
    status, _, err = run("evaluate", str(job / "job.yaml"), "--set", "gsm8k")
    assert status == 2
    assert "--set = gsm8k: is not an assignment" in err
    assert "--only gsm8k" in err


def test_a_job_without_evaluations_has_nothing_to_do(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB_YAML)
    status, _, err = run("evaluate", str(path))
    assert (status, "the job has no evaluation" in err) == (2, True)


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("pipeline", None),
        ("pipeline", ["sync"]),
        ("policies", None),
        ("policies", ["solver"]),
        ("policies", {"solver": None}),
        ("policies", {"solver": {"model": "/models/solver"}}),
        ("agents", ["solver"]),
        ("agents", {"solver": "solver"}),
        ("algorithm", "grpo"),
        ("algorithm", {"distillation": "checker"}),
        ("evaluation", ["gsm8k"]),
        ("evaluations", ["gsm8k"]),
        ("evaluations", {"gsm8k": 4}),
        ("evaluations", {"gsm8k": {"queries": 2, "contributions": "checker"}}),
    ],
)
def test_a_section_that_is_none_is_refused_as_in_any_job(
    run: Run, raw: dict[str, Any], tmp_path: Path, section: str, given: object
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**raw, section: given}))
    status, _, err = run("evaluate", str(path))
    assert status == 2
    assert err.startswith(f"error: {section}")
    assert "bug" not in err


def test_a_policy_that_only_replaces_agents_elsewhere_is_left_out(raw: dict[str, Any]) -> None:
    raw["policies"]["base"] = {"model": {"path": "/models/solver"}, "trainable": False}
    by_base = {"queries": 4, "contributions": {"by": "base", "queries": 2}}
    raw["evaluations"] = {"gsm8k": by_base, "aime": {"queries": 2}}
    assert set(job_of(only_evaluated(raw, ["aime"], {})).policies) == {"solver", "checker"}
    for names in ([], ["gsm8k"]):
        assert "base" in job_of(only_evaluated(raw, names, {})).policies
    raw = {**raw, "evaluations": {"aime": {"queries": 2}}, "evaluation": by_base}
    assert "base" not in job_of(only_evaluated(raw, ["aime"], {})).policies
    assert "base" in job_of(only_evaluated(raw, ["evaluation"], {})).policies
    # What else uses it stays.
    raw["agents"]["judge"] = {"policy": "base"}
    assert "base" in job_of(only_evaluated(raw, ["aime"], {})).policies


@pytest.mark.parametrize("replaced", [["solver"], ["checker"], ["solver", "checker"]])
def test_checkpoints_of_adapters_leave_the_group_of_their_base(
    raw: dict[str, Any], replaced: list[str]
) -> None:
    for policy in raw["policies"].values():
        policy |= {"lora": {"rank": 4}, "model": {"path": "/base"}, "engine": {"share": "team"}}
    assert engine_groups(job_of(raw))
    models = {name: Path("/merged", name) for name in replaced}
    spec = job_of(only_evaluated(raw, [], models))
    assert not engine_groups(spec)
    assert engine_groups(job_of(only_evaluated(raw, [], {})))


def test_a_version_is_of_a_job_and_not_of_a_file_or_checkpoint(job: Path) -> None:
    for target in (job / "job.yaml", job / "checkpoints" / "solver" / "v2"):
        with pytest.raises(InvalidArgument, match="--version = 3: applies to a job's id"):
            found_checkpoints(str(target), 3, job.parent)


def test_an_export_near_the_root_is_refused_as_any_other(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/tmp/export` has too few parents to be in a job's directory."""
    lineage = Lineage.read(job / "checkpoints" / "solver" / "v2")
    monkeypatch.setattr(Lineage, "read", lambda _: lineage)
    with pytest.raises(InvalidArgument, match="neither a job file"):
        found_checkpoints("/tmp", None, job.parent)


def test_the_cluster_of_an_evaluation_suits_its_job(
    run: Run, raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[TrainPlan] = []

    async def note(plan: TrainPlan, console: object) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr("troupe.client.cli.jobs.evaluate.run", note)
    path = tmp_path / "job.yaml"
    for colocate in (False, True):
        raw["pipeline"] |= {"mode": "sync", "colocate": colocate}
        path.write_text(yaml.safe_dump(raw))
        assert run("evaluate", str(path))[0] == 0
    assert [plan.settings.colocate for plan in plans] == [False, True]
    raw["policies"]["solver"]["engine"] = {"kind": "sglang", "python": "/no/python"}
    path.write_text(yaml.safe_dump(raw))
    status, _, err = run("evaluate", str(path))
    assert status == 2
    assert "/no/python" in err


@pytest.mark.parametrize(
    "section",
    [
        {"algorithm": {"distillation": {"teachers": {"solver": "base"}}}},
        {"algorithm": {"advantage": "gae", "critic": {"observes": "team"}}},
        {"algorithm": {"advantage": "gae"}},
        {"balancing": {"inter": True}},
    ],
)
def test_what_ties_models_to_each_other_does_not_tie_a_checkpoint(
    raw: dict[str, Any], section: dict[str, Any]
) -> None:
    """A checkpoint has a path, and by default a tokenizer, of its own."""
    for name in ("solver", "checker"):
        raw["policies"][name] = {"model": {"path": "/base"}, "engine": {"replicas": 2}}
    teaches = "distillation" in section.get("algorithm", {})
    if teaches:
        raw["policies"]["base"] = {"model": {"path": "/base"}, "trainable": False}
    written = job_of({**raw, **section}).model_dump(mode="json")
    for given in ({**raw, **section}, written):
        for models in ({}, {"solver": Path("/checkpoint")}):
            spec = job_of(only_evaluated(given, [], models))
            assert set(spec.policies) == {"solver", "checker"}, "a teacher is not loaded"
            assert (spec.algorithm.critic, spec.algorithm.distillation) == (None, None)
            assert spec.algorithm.advantage == job_of(given).algorithm.advantage
