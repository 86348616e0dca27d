"""`replicas: auto` and `gang: auto`: open fields, and the numbers that follow from devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.cluster.inventory import NodeShares, assign, fill
from troupe.devices import parse_devices
from troupe.job import JobSpec, JobSpecError
from troupe.job.automatic import Decision, JobDevices, decide, is_open, with_values
from troupe.job.loading import job_of
from troupe.job.sections.balancing import engine_count
from troupe.job.sizing import setup_of, shapes_of
from troupe.scheduling.memory import SLEEPING_SERVER_BYTES, rank_memory

GIB = 1 << 30
SERVED: dict[str, Any] = {"engine": {"kind": "sglang"}}


def job(over: dict[str, Any] | None = None, **policies: dict[str, Any]) -> JobSpec:
    """A job of one agent per policy; a policy's `path` and `tokens` are its model and its agent's
    `max_new_tokens`."""
    raw: dict[str, Any] = {
        "name": "j",
        "workflow": "a:b",
        "tasks": {"source": "a:b"},
        "agents": {},
        "policies": {},
        "pipeline": {"steps": 1, "queries_per_step": 4},
    }
    for name, fields in policies.items():
        policy = {"model": {"path": f"Qwen/{fields.pop('path', 'Qwen3-0.6B')}"}} | fields
        sampling = {"max_new_tokens": policy.pop("tokens", 512)}
        raw["agents"][name] = {"policy": name, "sampling": sampling}
        raw["policies"][name] = policy
    for field, value in (over or {}).items():
        section, _, leaf = field.partition(".")
        raw[section] = (raw.get(section) or {}) | {leaf: value}
    return job_of(raw)


def numbers(spec: JobSpec, devices: JobDevices) -> dict[str, int]:
    values = decide(spec, devices, shapes_of(spec)).values
    return {field.removeprefix("policies."): value for field, value in values.items()}


def trainers(*devices: int, engines: int = 4, memory: int = 80 * GIB) -> JobDevices:
    return JobDevices(engines, devices, memory)


def test_servers_fill_the_machine_by_default_and_other_engines_are_one() -> None:
    spec = job(
        launched=dict(SERVED),
        attached={"engine": {"kind": "sglang", "urls": ["http://h:1"]}},
        pooled={"engine": {"kind": "sglang", "pools": [{"device_class": "h100", "replicas": 2}]}},
        embedded={},
        frozen={**SERVED, "trainable": False},
        given={"engine": {"kind": "sglang", "replicas": 2}, "trainer": {"gang": 4}},
        pretended={**SERVED, "simulated": {}},
    )
    found = {n: (p.engine.replicas, p.trainer.gang) for n, p in spec.policies.items()}
    assert found == {
        "launched": ("auto", "auto"),
        "attached": (None, "auto"),
        "pooled": (None, "auto"),
        "embedded": (None, None),
        "frozen": ("auto", None),
        "given": (2, 4),
        "pretended": (None, None),
    }
    assert is_open(spec)
    assert not is_open(job(one={}))
    # Until it is decided, such a field counts as one.
    launched = spec.policies["launched"]
    assert (engine_count(launched), launched.trainer.ranks) == (1, 1)
    again = JobSpec.model_validate_json(spec.model_dump_json())
    assert again == spec


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"engine": {"kind": "sglang", "replicas": 0}}, "policies.a.engine.replicas"),
        ({"engine": {"kind": "sglang", "replicas": "most"}}, "policies.a.engine.replicas"),
        ({"trainer": {"gang": 4097}}, "policies.a.trainer.gang"),
        ({"trainer": {"gang": 3, "context_parallel": 2}}, "policies.a.trainer"),
        ({"engine": {}, "trainer": {"context_parallel": 2}}, "policies.a"),
    ],
)
def test_other_values_than_numbers_and_auto_are_refused_by_field(
    policy: dict[str, Any], field: str
) -> None:
    with pytest.raises(JobSpecError) as refused:
        job(a=SERVED | policy)
    assert refused.value.problems[0].field.startswith(field)


def test_engines_and_gangs_are_in_proportion_to_the_work() -> None:
    spec = job(
        big={**SERVED, "path": "Qwen3-4B", "tokens": 512},
        small={**SERVED, "path": "Qwen3-0.6B", "tokens": 128},
    )
    assert numbers(spec, trainers(1, 1, 1, 1)) == {
        "big.engine.replicas": 3,
        "small.engine.replicas": 1,
        "big.trainer.gang": 3,
        "small.trainer.gang": 1,
    }
    # Equal work is divided equally; for unknown models the tokens count.
    unknown = job(a={**SERVED, "path": "some"}, b={**SERVED, "path": "other"})
    assert set(numbers(unknown, trainers(1, 1, 1, 1)).values()) == {2}


def test_given_numbers_stay_and_the_rest_is_filled() -> None:
    spec = job(
        a={"engine": {"kind": "sglang", "replicas": 3}, "trainer": {"gang": 2}}, b=dict(SERVED)
    )
    assert numbers(spec, trainers(1, 1, 1, 1, engines=8)) == {
        "b.engine.replicas": 5,
        "b.trainer.gang": 2,
    }
    wide = job(a={"engine": {"kind": "sglang", "tensor_parallel": 2}})
    assert numbers(wide, trainers(1, engines=8))["a.engine.replicas"] == 4


def test_a_gang_gets_the_memory_that_it_needs() -> None:
    spec = job(a={**SERVED, "path": "Qwen3-4B"}, b={**SERVED, "path": "Qwen3-0.6B", "tokens": 8192})
    found = numbers(spec, trainers(1, 1, 1, 1))
    assert found["a.trainer.gang"] == 2  # one device has too little, although b works longer
    assert found["b.trainer.gang"] == 2
    sources = decide(spec, trainers(1, 1, 1, 1), shapes_of(spec)).sources
    assert "at least 2 by the memory model" in sources["policies.a.trainer.gang"]


def test_policies_that_share_workers_take_all_devices_of_one() -> None:
    three = job(a=dict(SERVED), b=dict(SERVED), c=dict(SERVED))
    found = numbers(three, trainers(4, 4))
    assert [found[f"{name}.trainer.gang"] for name in "abc"] == [4, 4, 4]
    # More trainers than policies: a gang spans several.
    one = job(a=dict(SERVED))
    assert numbers(one, trainers(4, 4))["a.trainer.gang"] == 8
    apart = JobDevices(4, (4, 4), 80 * GIB, joins=False)
    assert numbers(one, apart)["a.trainer.gang"] == 4


def test_a_gang_is_a_multiple_of_what_divides_passes_and_experts() -> None:
    mixture = {"path": "Qwen3-30B-A3B"} | SERVED
    for divided, gang in (({"expert_parallel": 8}, 8), ({"context_parallel": 3}, 9)):
        found = numbers(job(big=mixture | {"trainer": divided}), trainers(11))
        assert found["big.trainer.gang"] == gang
    with pytest.raises(JobSpecError, match="2 devices divide the experts, but `gang` is 1"):
        job(big={"trainer": {"expert_parallel": 2}})


def test_a_gang_has_no_more_ranks_than_samples() -> None:
    spec = job({"pipeline.micro_batch_samples": 3}, a=dict(SERVED))
    decision = decide(spec, trainers(*[1] * 8), shapes_of(spec))
    assert decision.values["policies.a.trainer.gang"] == 3
    assert any("5 of 8 devices of trainers stay idle" in note for note in decision.notes)
    sliced = job(
        {"pipeline.micro_batch_samples": 3}, a={**SERVED, "trainer": {"context_parallel": 2}}
    )
    assert numbers(sliced, trainers(*[1] * 8))["a.trainer.gang"] == 6


def test_without_devices_and_in_deterministic_jobs_a_gang_is_one() -> None:
    nothing = JobDevices(0, ())
    assert set(numbers(job(a=dict(SERVED)), nothing).values()) == {1}
    exact = job({"pipeline.deterministic": True}, a=dict(SERVED))
    assert numbers(exact, trainers(1, 1))["a.trainer.gang"] == 1


@pytest.mark.parametrize("field", ["context_parallel", "expert_parallel"])
@pytest.mark.parametrize("trainable", [True, False])
def test_without_devices_a_gang_is_as_small_as_what_divides_it(field: str, trainable: bool) -> None:
    divided = {"trainable": trainable, "trainer": {"gang": "auto", field: 2}}
    spec = job(a={**SERVED, **divided}, b=dict(SERVED))
    decision = decide(spec, trainers(), shapes_of(spec))
    assert decision.values["policies.a.trainer.gang"] == 2
    # Workers read the job with these numbers.
    decided = with_values(spec, decision.values)
    assert JobSpec.model_validate_json(decided.model_dump_json()) == decided


@pytest.mark.parametrize("field", ["context_parallel", "expert_parallel"])
def test_a_deterministic_job_does_not_divide_passes(field: str) -> None:
    divided = {"trainer": {"gang": "auto", field: 2}}
    with pytest.raises(JobSpecError, match=f"policies.a.trainer.{field}: several devices"):
        job({"pipeline.deterministic": True}, a={**SERVED, **divided})


def test_idle_and_missing_devices_are_reported_with_a_remedy() -> None:
    half = job(a={"engine": {"kind": "sglang", "replicas": 2}, "trainer": {"gang": 2}})
    notes = decide(half, trainers(1, 1, 1, 1), shapes_of(half)).notes
    assert [note.split(" (")[0] for note in notes] == [
        "2 of 4 devices of a rollout worker stay idle",
        "2 of 4 devices of trainers stay idle",
    ]
    assert all("auto" in note for note in notes)
    many = job(a=dict(SERVED), b=dict(SERVED))
    (note,) = decide(many, trainers(1, engines=1), shapes_of(many)).notes
    assert "its engines need 2 devices, and a rollout worker has 1" in note
    # An embedded engine computes in the rollout worker and needs no devices.
    plain = job(a={})
    assert decide(plain, trainers(1, 1), shapes_of(plain)).notes == ()


def test_a_policy_gets_the_minimum_engines_of_balancing() -> None:
    spec = job(
        {"balancing.minimum": {"b": 3}},
        a={**SERVED, "tokens": 4096},
        b={**SERVED, "tokens": 16},
    )
    found = numbers(spec, trainers(1, engines=8))
    assert found["b.engine.replicas"] == 3
    assert found["a.engine.replicas"] == 5


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 16),
    policies=st.lists(
        st.tuples(st.sampled_from(["Qwen3-0.6B", "Qwen3-1.7B"]), st.integers(16, 2048)),
        min_size=1,
        max_size=3,
    ),
)
def test_a_machine_is_used_whole_wherever_every_policy_fits(
    count: int, policies: list[tuple[str, int]]
) -> None:
    named = {
        f"p{n}": {**SERVED, "path": path, "tokens": tokens}
        for n, (path, tokens) in enumerate(policies)
    }
    spec = job(**named)
    devices = parse_devices(f"{count}xH100-80GB")
    shares, decision = fill(spec, devices, NodeShares())
    given_ = assign(devices, shares)
    assert fill(spec, devices, NodeShares()) == (shares, decision)
    engines, training = len(given_.rollouts[0]), sum(map(len, given_.trainers))
    assert engines + training == count
    assert decision.engines_used == (engines if engines >= len(policies) else len(policies))
    assert decision.trainers_used == training
    _fits(with_values(spec, decision.values), given_.trainers, decision)


def _fits(spec: JobSpec, workers: Any, decision: Decision) -> None:
    """Check that gangs use equally many devices of some workers, as the binder forms them."""
    (each,) = {len(one) for one in workers}
    for policy in spec.policies.values():
        size = policy.trainer.ranks
        assert size <= each or size % each == 0
    assert not is_open(spec)


def test_sleeping_servers_count_where_engines_and_trainers_take_turns() -> None:
    turns = job({"pipeline.mode": "sync", "pipeline.colocate": True}, a=dict(SERVED))
    split = job({"pipeline.mode": "sync"}, a=dict(SERVED))
    shape = shapes_of(turns)["a"]
    assert shape is not None
    needed = [
        rank_memory(
            shape,
            setup_of(one, "a", shape, device="cuda", ranks=1),
        ).total
        for one in (turns, split)
    ]
    assert needed[0] - needed[1] == SLEEPING_SERVER_BYTES


ADAPTED: dict[str, Any] = {**SERVED, "lora": {"rank": 4}}


def test_policies_that_share_engines_take_their_devices_once() -> None:
    spec = job(solver=dict(ADAPTED), critic=dict(ADAPTED), judge={**SERVED, "trainable": False})
    found = decide(spec, trainers(1, 1, engines=4), shapes_of(spec))
    for name in spec.policies:
        field = f"policies.{name}.engine.replicas"
        assert found.values[field] == 4
        assert found.sources[field].endswith("shared by solver, critic, judge")
    assert found.engines_used == 4
    assert not any("stay idle" in note and "rollout" in note for note in found.notes)


def test_shared_engines_get_devices_for_the_work_of_all_their_policies() -> None:
    apart = {"engine": {"kind": "sglang", "share": "never"}, "lora": {"rank": 4}}
    spec = job(a=dict(ADAPTED), b=dict(ADAPTED), c=dict(ADAPTED), d=apart)
    found = numbers(spec, trainers(1, engines=8))
    engines = {name: found[f"{name}.engine.replicas"] for name in spec.policies}
    assert engines == {"a": 6, "b": 6, "c": 6, "d": 2}


def test_the_devices_that_shared_engines_lack_are_counted_once() -> None:
    tall = {"engine": {"kind": "sglang", "tensor_parallel": 4}, "lora": {"rank": 4}}
    spec = job(a=dict(tall), b=dict(tall))
    assert not decide(spec, trainers(2, engines=4), {}).notes
    (note,) = decide(spec, trainers(2, engines=2), {}).notes
    assert "its engines need 4 devices, and a rollout worker has 2" in note
