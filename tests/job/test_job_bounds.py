"""Every number, list and mapping of the specification has a bound, which errors name."""

from __future__ import annotations

import copy
import json
import time
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tests.job.test_job_loading import JOB
from troupe.client.cli.specification import apply_assignments
from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.job.loading import job_of

LEAST = (annotated_types.Ge, annotated_types.Gt)
MOST = (annotated_types.Le, annotated_types.Lt)


def parts(annotation: Any, metadata: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Return the kinds of value that an annotation accepts, each with its bounds."""
    origin = get_origin(annotation)
    if isinstance(annotation, types.UnionType) or origin is Union:
        for one in get_args(annotation):
            yield from parts(one, metadata)
    elif origin is Annotated:
        inner, *more = get_args(annotation)
        for one in more:
            metadata = (*metadata, *(one.metadata if isinstance(one, FieldInfo) else (one,)))
        yield from parts(inner, metadata)
    else:
        yield annotation, metadata
        if origin in (list, dict, tuple):
            for one in get_args(annotation):
                if one is not ...:
                    yield from parts(one, ())


def fields(model: type[BaseModel], path: str = "", seen: frozenset[Any] = frozenset()) -> Any:
    for name, field in model.model_fields.items():
        where = f"{path}.{name}" if path else name
        yield where, field
        for kind, _ in parts(field.annotation, ()):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
                yield from fields(kind, where, seen | {kind})


def test_every_number_list_and_mapping_of_a_job_has_bounds() -> None:
    found, unbounded = 0, []
    for path, field in fields(JobSpec):
        for kind, metadata in parts(field.annotation, tuple(field.metadata)):
            origin = get_origin(kind) or kind
            if kind in (int, float):
                found += 1
                if not any(isinstance(one, LEAST) for one in metadata):
                    unbounded.append(f"{path}: no least")
                if not any(isinstance(one, MOST) for one in metadata):
                    unbounded.append(f"{path}: no largest")
            elif origin in (list, dict) or (origin is tuple and ... in get_args(kind)):
                free = origin is dict and get_args(kind)[1] is Any  # bounded by `check_json`
                if not free and not any(hasattr(one, "max_length") for one in metadata):
                    unbounded.append(f"{path}: any number of them")
    assert found > 120
    assert unbounded == []


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the job with one field changed; `*` in its path is the policy."""
    job = copy.deepcopy(JOB)
    here: Any = job
    *sections, last = path.split(".")
    for section in sections:
        here = here.setdefault(section.replace("*", "solver"), {})
    here[last] = value
    return job


@pytest.mark.parametrize(
    "path",
    [
        "pipeline.steps",
        "pipeline.queries_per_step",
        "pipeline.micro_batch_tokens",
        "evaluation.queries",
        "checkpoint.keep",
        "limits.step_seconds",
        "limits.max_concurrent_trajectories",
        "seed",
        "policies.*.optimizer.weight_decay",
        "policies.*.engine.max_context",
        "policies.*.trainer.idle_seconds",
        "balancing.drain_seconds",
    ],
)
@pytest.mark.parametrize(
    "value", [1 << 63, 10**400, -(10**5000), 1e308, True], ids=["2^63", "e400", "-e5000", "f", "b"]
)
def test_an_absurd_number_is_refused_by_name(path: str, value: Any) -> None:
    with pytest.raises(JobSpecError) as caught:
        job_of(changed(path, value))
    assert [one.field for one in caught.value.problems] == [path.replace("*", "solver")]
    assert len(str(caught.value)) < 1000


@given(
    st.sampled_from(["pipeline.steps", "seed", "limits.turn_seconds", "evaluation.every"]),
    st.one_of(st.integers(), st.floats(), st.integers(0, 5000).map(lambda n: 10**n)),
)
@settings(max_examples=100, deadline=None)
def test_every_accepted_number_fits_its_wire_type(path: str, value: Any) -> None:
    try:
        spec = job_of(changed(path, value))
    except JobSpecError:
        return
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert -(1 << 63) <= spec.seed < 1 << 63
    assert spec.pipeline.steps < 1 << 31


def test_a_step_of_too_many_trajectories_is_refused() -> None:
    pipeline = {"steps": 1, "queries_per_step": 32_768, "group_size": 8}
    assert job_of(JOB | {"pipeline": pipeline}).pipeline.group_size == 8
    for more in ({"over_sampling": 1}, {"redundant_trajectories": 1}, {"dynamic_sampling": True}):
        with pytest.raises(
            JobSpecError, match=r"queries_per_step: a step may come to 2\d\d,|5\d\d,"
        ):
            job_of(JOB | {"pipeline": pipeline | more})


def test_comparing_many_policies_takes_less_than_quadratic_time() -> None:
    policies = {f"p{n}": {"model": {"path": "/m"}, "engine": {"replicas": 2}} for n in range(256)}
    agents = {f"a{n}": {"policy": f"p{n}"} for n in range(256)}
    began = time.process_time()
    spec = job_of(JOB | {"agents": agents, "policies": policies})
    assert spec.balances
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("population", "players", "message"),
    [
        ({"algorithm": "psro"}, 17, "at most 16"),
        ({"algorithm": "self_play", "slots": 64}, 5, "320 frozen policies"),
    ],
)
def test_a_population_too_large_to_count_is_refused(
    population: dict[str, Any], players: int, message: str
) -> None:
    policies = {f"p{n}": {"model": {"path": "/m"}} for n in range(players)}
    agents = {f"a{n}": {"policy": f"p{n}"} for n in range(players)}
    with pytest.raises(JobSpecError, match=message):
        job_of(JOB | {"agents": agents, "policies": policies, "population": population})


def test_thousands_of_faults_make_a_short_error_in_no_time() -> None:
    began = time.process_time()
    policy = {f"x{n}": n for n in range(200)}
    with pytest.raises(JobSpecError, match="49,980 more fields are wrong") as caught:
        job_of(JOB | {"policies": {f"p{n}": policy for n in range(250)}})
    assert len(caught.value.problems) == 21
    assert time.process_time() - began < 10


def test_values_of_free_shape_are_bounded() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    itself: dict[str, Any] = {}
    itself["x"] = itself
    for value in (deep, itself, {"x": 10**5000}, {"x": "\ud800"}, {"\ud800": 1}, {"x": 1e400}):
        with pytest.raises(JobSpecError, match=r"tasks.args|job:"):
            job_of(changed("tasks.args", {"x": value}))


SWITCHES = {
    "compile": {"on": "on", "off": "off"},
    "kernels": {"off": "off"},
}
ON, OFF = ("on", "yes", "y", "true", "On", "YES"), ("off", "no", "n", "false", "Off", "NO")


def trainers(word: str, field: str) -> list[JobSpec]:
    """Return the job with the word as written in YAML, in `--set`, and in JSON."""
    file = yaml.safe_dump(JOB)
    written = file.replace(
        "solver:\n    model:", f"solver:\n    trainer: {{{field}: {word}}}\n    model:"
    )
    assert written != file
    way = [
        parse_job(written),
        job_of(apply_assignments(file, [f"policies.solver.trainer.{field}={word}"])),
    ]
    loaded = yaml.safe_load(word)
    return [*way, parse_job(json.dumps(changed(f"policies.*.trainer.{field}", loaded)))]


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("word", [*ON, *OFF])
def test_words_of_yaml_1_1_are_read_as_meant_by_every_switch(field: str, word: str) -> None:
    meant = SWITCHES[field].get("on" if word in ON else "off")
    if meant is None:
        with pytest.raises(JobSpecError, match=rf"trainer.{field} = .*'auto' or 'off'"):
            trainers(word, field)
    else:
        for spec in trainers(word, field):
            assert getattr(spec.policies["solver"].trainer, field) == meant


def test_every_boolean_takes_the_words_and_every_number_refuses_them() -> None:
    booleans = [
        path
        for path, field in fields(JobSpec)
        if bool in {kind for kind, _ in parts(field.annotation, ())}
    ]
    assert len(booleans) > 10
    for field in ("deterministic", "balance_tokens", "early_start", "dynamic_sampling"):
        for word in (*ON, *OFF):
            written = yaml.safe_dump(JOB).replace("pipeline:\n", f"pipeline:\n  {field}: {word}\n")
            assert getattr(parse_job(written).pipeline, field) is (word in ON)
    for word in (*ON, *OFF):
        for path in ("pipeline.steps", "limits.turn_seconds", "seed"):
            with pytest.raises(JobSpecError, match=f"{path} = "):
                job_of(apply_assignments(yaml.safe_dump(JOB), [f"{path}={word}"]))


def test_yaml_words_are_names_in_name_fields_and_booleans_in_free_values() -> None:
    text = """
name: on
workflow: a.b:play
tasks: {source: "a.b:Tasks", args: {shuffle: no, no: [yes, {off: On}], lr: 1e-5, at: 12:30}}
agents: {no: {policy: off, system_prompt: Yes}, 1: {policy: off, sampling: {stop: [no, Yes]}}}
policies: {off: {model: {path: /m}}}
pipeline: {steps: 1, queries_per_step: 1}
"""
    spec = parse_job(text)
    assert (spec.name, sorted(spec.agents), list(spec.policies)) == ("on", ["1", "no"], ["off"])
    assert spec.agents["no"].system_prompt == "Yes"
    assert spec.agents["1"].sampling.stop == ["no", "Yes"]
    assert spec.tasks is not None
    free = {"shuffle": False, "no": [True, {"off": True}], "lr": 1e-5, "at": "12:30"}
    assert spec.tasks.args == free
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    one = apply_assignments(text, ["tasks.args.shuffle=yes", "agents.no.policy=off"])
    assert job_of(one).tasks.args["shuffle"] is True  # type: ignore[union-attr]
