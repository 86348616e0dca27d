"""Engine groups: which policies share engines, and what is refused (`policies.X.engine.share`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from troupe.job import JobSpec, JobSpecError, parse_job
from troupe.job.compatibility import advice
from troupe.job.engines.sharing import EngineGroup, engine_groups, group_of, shared_policies

MODEL = {"path": "/models/qwen"}
LORA = {"lora": {"rank": 4}}
FROZEN = {"trainable": False}


def written(balancing: dict[str, Any] | None = None, **policies: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "team",
        "workflow": "a.b:play",
        "tasks": {"source": "a.b:Tasks"},
        "agents": {name: {"policy": name} for name in policies},
        "policies": {name: {"model": MODEL, **policy} for name, policy in policies.items()},
        "pipeline": {"mode": "sync", "steps": 3, "queries_per_step": 2},
        "balancing": balancing or {},
    }


def job(balancing: dict[str, Any] | None = None, **policies: dict[str, Any]) -> JobSpec:
    spec = parse_job(json.dumps(written(balancing, **policies)))
    # Services pass the specification on with its defaults filled in.
    assert parse_job(spec.model_dump_json()) == spec
    return spec


def groups(**policies: dict[str, Any]) -> list[EngineGroup]:
    return list(engine_groups(job(**policies)))


def fault(**policies: dict[str, Any]) -> str:
    with pytest.raises(JobSpecError) as caught:
        parse_job(json.dumps(written(**policies)))
    (problem,) = caught.value.problems
    return str(problem)


def engine(policy: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**policy, "engine": {**policy.get("engine", {}), **settings}}


def test_adapters_and_the_bare_base_share_engines_by_default() -> None:
    spec = job(
        solver={"lora": {"rank": 8}}, critic={**LORA, "optimizer": {"lr": 0.1}}, judge=FROZEN
    )
    (group,) = engine_groups(spec)
    assert group == EngineGroup("solver", ("solver", "critic", "judge"))
    assert group_of(spec, "judge") == group
    assert shared_policies(spec) == {"solver", "critic", "judge"}


def test_random_weights_of_a_frozen_policy_are_no_base_of_others() -> None:
    """They depend on the policy's name; a base under adapters has the same for all of them."""
    random = {"model": {"config": {"model_type": "qwen3"}, "tokenizer": "/models/qwen"}}
    adapter, frozen = LORA | random, FROZEN | random
    found = groups(solver=adapter, critic=adapter, judge=frozen, rater=frozen)
    assert found == [EngineGroup("solver", ("solver", "critic"))]
    message = fault(solver=engine(adapter, share="team"), judge=engine(frozen, share="team"))
    assert "random weights of 'judge'" in message


def test_frozen_policies_of_one_base_share_without_an_adapter() -> None:
    found = groups(student={}, judge=FROZEN, rater=FROZEN)
    assert found == [EngineGroup("judge", ("judge", "rater"))]


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"simulated": {}},
        {**LORA, "model": {"path": "/models/llama"}},
        {**LORA, "model": MODEL | {"revision": "v2"}},
        {**LORA, "model": MODEL | {"dtype": "bfloat16"}},
        {**FROZEN, "init_from": "earlier-job"},
        engine(LORA, max_context=64),
        engine(LORA, replicas=2),
        engine(LORA, kind="sglang"),
        engine(LORA, share="never"),
        {**LORA, "colocate": True},
    ],
)
def test_what_differs_in_base_weights_or_engines_has_engines_of_its_own(
    other: dict[str, Any],
) -> None:
    spec = job(a=LORA, b=other)
    assert engine_groups(spec) == ()
    assert group_of(spec, "a") is None
    # The others still share.
    assert engine_groups(job(a=LORA, b=other, c=LORA)) == (EngineGroup("a", ("a", "c")),)


def test_the_order_of_a_configuration_does_not_matter() -> None:
    one, other = (
        {**LORA, "model": {"config": config, "tokenizer": "/models/qwen"}}
        for config in ({"model_type": "qwen3", "rope": {"a": 1, "b": 2}},
                       {"rope": {"b": 2, "a": 1}, "model_type": "qwen3"})
    )  # fmt: skip
    assert groups(a=one, b=other) == [EngineGroup("a", ("a", "b"))]


def test_how_a_policys_text_is_read_does_not_keep_it_from_sharing() -> None:
    other = {**LORA, "model": MODEL | {"chat_template_kwargs": {"enable_thinking": False}}}
    assert groups(a=LORA, b=other) == [EngineGroup("a", ("a", "b"))]


def test_a_group_may_be_named() -> None:
    crew = engine(LORA, share="crew")
    found = groups(a=LORA, b=crew, c=crew, d=LORA)
    assert found == [EngineGroup("a", ("a", "d")), EngineGroup("crew", ("b", "c"))]


@pytest.mark.parametrize(
    ("other", "messages"),
    [
        (
            {**LORA, "model": {"path": "/models/llama"}},
            ["the bases of group 'crew' differ", "'/models/llama' in 'b'", "use `never`"],
        ),
        ({}, ["policy 'b' trains all weights", "give it `lora`"]),
        ({**FROZEN, "init_from": "earlier-job"}, ["policy 'b' begins with weights of its own"]),
        ({"simulated": {}}, ["policy 'b' is simulated"]),
        (engine(LORA, max_context=64), ["`engine.max_context` is 64 in 'b' and None in 'a'"]),
        (engine(LORA, kind="sglang", replicas=1), ["`engine.kind` is 'sglang' in 'b'"]),
        ({**LORA, "colocate": True}, ["`colocate` is True in 'b' and False in 'a'"]),
    ],
)
def test_policies_that_are_told_to_share_but_cannot_are_refused_by_field(
    other: dict[str, Any], messages: list[str]
) -> None:
    # The dtype follows from the kind of engine.
    own = {"model": MODEL | {"dtype": "float32"} | other.get("model", {})}
    said = fault(
        a=engine({**LORA, "model": MODEL | {"dtype": "float32"}}, share="crew"),
        b=engine(other | own, share="crew"),
    )
    assert said.startswith("policies.b.engine.share: ")
    for message in messages:
        assert message in said


def test_a_group_of_one_is_refused() -> None:
    said = fault(a=engine(LORA, share="crew"), b=LORA)
    assert "policies.a.engine.share: no other policy is in group 'crew'" in said


def test_a_group_cannot_have_the_name_of_another_policy() -> None:
    crew = engine(LORA, share="judge")
    said = fault(a=crew, b=crew, judge=FROZEN)
    assert "'judge' is a policy that is not in the group; choose another name" in said


def test_the_name_of_a_group_is_a_word() -> None:
    assert "policies.a.engine.share = 'A crew'" in fault(a=engine(LORA, share="A crew"), b=LORA)


def test_attached_servers_serve_the_policies_of_a_group_and_of_no_other() -> None:
    attached = engine(LORA, kind="sglang", urls=["http://gpu-1:3000"])
    slashed = engine(LORA, kind="sglang", urls=["http://GPU-1:3000/"])
    assert groups(a=attached, b=slashed) == [EngineGroup("a", ("a", "b"))]
    said = fault(a=attached, b=engine(attached, max_running=4))
    assert "policies.b.engine.urls: http://gpu-1:3000 serves policy 'a' already" in said


def test_shared_engines_do_not_move() -> None:
    two = engine(LORA, replicas=2)
    assert not job(a=two, b=two).balances
    spec = job(a=two, b=two, c=engine(LORA, replicas=2, share="never"))
    assert not spec.balances
    barred = spec.balancing.barred(spec.policies, shared_policies(spec))
    assert ("c", "a") in barred
    assert ("a", "c") in barred
    assert ("a", "b") in barred
    assert job(a=engine(two, share="never"), b=engine(two, share="never")).balances


def test_engines_that_are_to_move_are_not_shared_by_default() -> None:
    two = engine(LORA, replicas=2)
    spec = job({"inter": True}, a=two, b=two)
    assert engine_groups(spec) == ()
    assert spec.balances
    crew = engine(two, share="crew")
    said = fault_of_balancing({"inter": True}, a=crew, b=crew)
    assert "balancing.inter: all policies share engines, which never move" in said


def fault_of_balancing(balancing: dict[str, Any], **policies: dict[str, Any]) -> str:
    with pytest.raises(JobSpecError) as caught:
        parse_job(json.dumps(written(balancing, **policies)))
    return str(caught.value)


def test_slots_of_a_population_share_no_engines() -> None:
    raw = written(a=LORA, b=LORA)
    raw["population"] = {
        "algorithm": "self_play",
        "slots": 2,
        "learners": {"a": {}, "b": {}},
    }
    raw["pipeline"]["queries_per_step"] = 8
    spec = parse_job(json.dumps(raw))
    assert spec.slots
    assert all(spec.policies[one].engine.share == "never" for one in spec.slots)
    assert engine_groups(spec) == (EngineGroup("a", ("a", "b")),)
    raw["population"]["engine"] = {"share": "crew"}
    with pytest.raises(JobSpecError, match=r"population\.engine\.share"):
        parse_job(json.dumps(raw))


def test_a_summary_names_the_policies_that_share_engines() -> None:
    assert job(a=LORA, b={}).summary == "2 agents, trains a, b, 3 steps"
    said = job(a=LORA, b=LORA, c=FROZEN, d={}).summary
    assert said == "4 agents, trains a, b, d, 3 steps, a, b, c share engines (1 base instead of 3)"


def test_a_setting_that_alone_keeps_policies_over_one_base_apart_is_told() -> None:
    (said,) = advice(job(a=LORA, b=LORA, c=engine(LORA, max_context=64)))
    assert said.startswith("policies.c.engine.max_context: differs from 'a'")
    assert "set `engine.share: never`" in said
    # It is meant, or the bases differ.
    for other in (engine(LORA, max_context=64, share="never"), {**LORA, "model": {"path": "/m"}}):
        assert advice(job(a=LORA, b=other)) == []
    assert advice(job({"inter": True}, a=engine(LORA, replicas=2), b=engine(LORA))) == []
