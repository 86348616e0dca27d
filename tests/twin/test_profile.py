"""The profile of a job: its measurements, its size, its owner, and its use by planners."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.twin.test_planner import FEW, job
from troupe.devices import parse_devices
from troupe.job import JobSpec
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.twin.costs import device_costs
from troupe.twin.planner import plan_job
from troupe.twin.profile import EngineTimes, JobProfile, LogHistogram, MeasuredTurn

READ, STEP, PER_TURN = 1 / 20_000, 0.02, 0.0005


def turn(rng: random.Random, agent: str, prompt: int, scale: float = 1.0) -> MeasuredTurn:
    """A turn of an engine whose pace is known, with 20 % of noise."""
    response, concurrency = rng.randint(50, 400), float(rng.randint(1, 60))
    seconds = prompt * READ + response * (STEP + PER_TURN * concurrency)
    noise = rng.lognormvariate(0, 0.2)
    return MeasuredTurn(
        agent, agent, prompt, response, 0, 0.1, scale * seconds * noise, concurrency
    )


def measured(spec: JobSpec, steps: int = 4, queries: int = 8, scale: float = 1.0) -> JobProfile:
    """The profile of some steps of a job, whose agents speak three times."""
    rng = random.Random(1)
    found = JobProfile.of_spec(spec)
    for step in range(steps):
        for index in range(queries):
            for _ in range(4):
                turns: list[MeasuredTurn] = []
                said = dict.fromkeys(spec.agents, 0)
                for _ in range(3):
                    for agent in spec.agents:
                        one = turn(rng, agent, said[agent] + rng.randint(100, 200), scale)
                        said[agent] = one.prompt + one.response
                        turns.append(one)
                seconds = sum(one.queue_seconds + one.generate_seconds for one in turns) + 3.0
                found.add(f"q{index}", step, seconds, turns, whole=True)
        found.end_step({f"{name}/train/seconds": 10.0 for name in spec.policies})
    return found


def test_a_histogram_knows_mean_and_quantiles_of_what_it_counted() -> None:
    rng, one = random.Random(0), LogHistogram()
    values = sorted(rng.lognormvariate(5, 1) for _ in range(5000))
    for value in (*values, -1.0, float("inf"), float("nan")):
        one.add(value)
    assert one.count == 5000
    assert one.mean == pytest.approx(sum(values) / 5000)
    for fraction in (0.1, 0.5, 0.9):
        assert one.quantile(fraction) == pytest.approx(values[int(5000 * fraction)], rel=0.1)
    again = LogHistogram.of(json.loads(json.dumps(one.to_values())))
    assert again.quantile(0.5) == one.quantile(0.5)


def test_faded_values_count_less_and_are_forgotten_in_the_end() -> None:
    one = LogHistogram()
    one.add(1.0)
    for _ in range(8):
        one.fade()
    assert one.count == pytest.approx(0.5)
    one.add(100.0)
    assert one.quantile(0.9) == pytest.approx(100, rel=0.1)
    for _ in range(100):
        one.fade()
    assert not one.buckets


def test_an_engines_pace_is_found_in_its_turns() -> None:
    rng, times = random.Random(0), EngineTimes()
    for _ in range(3000):
        times.add(turn(rng, "solver", rng.randint(100, 4000)))
    speed = times.speed()
    assert speed is not None
    assert speed.read_seconds == pytest.approx(READ, rel=0.25)
    assert speed.decode_seconds == pytest.approx(STEP, rel=0.25)
    assert speed.decode_seconds_per_turn == pytest.approx(PER_TURN, rel=0.25)


def test_an_engine_that_always_ran_as_many_turns_is_known_at_that_number() -> None:
    times = EngineTimes()
    for response in range(50, 300):
        seconds = response * (STEP + PER_TURN * 32)
        times.add(MeasuredTurn("a", "a", 100, response, 100, 0.0, seconds, 32.0))
    speed = times.speed()
    assert speed is not None
    at = speed.decode_seconds + 32 * speed.decode_seconds_per_turn
    assert at == pytest.approx(STEP + PER_TURN * 32, rel=0.01)
    assert EngineTimes().speed() is None


def test_a_profile_is_bounded_and_survives_being_stored() -> None:
    spec = JobSpec.model_validate(job())
    profile = measured(spec, steps=40, queries=64)
    assert profile.steps == 40
    assert profile.trajectories * 6 <= 4096
    stored = profile.pack()
    assert len(stored) < 64 * 1024
    again = JobProfile.unpack(stored)
    assert again.to_json() == profile.to_json()
    # What is added next is treated the same.
    for one in (profile, again):
        one.add("q", 41, 9.0, [MeasuredTurn("solver", "solver", 9, 9)], whole=True)
    assert again.to_json() == profile.to_json()
    # Mostly of newer steps.
    steps = [int(name.partition("/")[0]) for name in profile._queries]
    assert sum(step >= 20 for step in steps) > 3 * sum(step < 20 for step in steps)


def test_the_kept_trajectories_are_a_workload_with_shared_prefixes() -> None:
    spec = JobSpec.model_validate(job())
    workload = measured(spec).workload(6)
    for trajectory in workload(0):
        assert [one.policy for one in trajectory.turns] == ["solver", "checker"] * 3
        first, later = trajectory.turns[0], trajectory.turns[2]
        assert first.shared == 0
        assert later.shared == first.prompt + first.response
        assert sum(one.after for one in trajectory.turns) == pytest.approx(3.0, abs=0.01)
    assert len(workload(0)) == 6


def test_planning_uses_measurements_and_lists_assumptions() -> None:
    spec = JobSpec.model_validate(job())
    given = parse_devices("8xH100-80GB")
    costs = device_costs("H100")
    assumed = plan_job(spec, given, costs, habits=FEW, more=False)
    assert not assumed.measured
    assert "turns, lengths and waits" in assumed.assumed
    seconds = []
    for scale in (1.0, 3.0):
        profile = measured(spec, scale=scale)
        profile.device_classes = dict.fromkeys(spec.policies, "H100")
        found = plan_job(spec, given, costs, profile=profile, more=False)
        seconds.append(found.best.means.seconds)
        told = "; ".join(found.measured)
        assert "trajectories of 4 steps" in told
        assert "solver: an engine's" in told
        assert "solver: its trainer's" in told
        assert "solver: weights' transfer" in found.assumed
    # Engines that were three times as slow.
    assert seconds[1] > 1.5 * seconds[0]
    # Speeds of other devices do not apply to these.
    profile.device_classes = dict.fromkeys(spec.policies, "L40S")
    other = plan_job(spec, given, costs, profile=profile, more=False)
    assert any("measured on L40S" in line for line in other.assumed)
    assert len(other.measured) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policies": {"solver": {"model": {"path": "Qwen/Qwen3-4B"}}}}, "policies differ"),
        ({"agents": {"third": {"policy": "solver"}}}, "agents differ in third"),
        ({"policies": {"solver": {"lora": {"rank": 8}}}}, "LoRA rank 8"),
    ],
)
def test_a_profile_of_another_job_is_refused(change: dict[str, Any], said: str) -> None:
    own = JobSpec.model_validate(job())
    other = job()
    for section, parts in change.items():
        for name, fields in parts.items():
            other[section][name] = {**other[section].get(name, {}), **fields}
    with pytest.raises(InvalidArgument, match=said) as caught:
        measured(own).check(JobSpec.model_validate(other))
    assert caught.value.field == "profile"


def test_an_invalid_profile_is_refused_by_field() -> None:
    spec = JobSpec.model_validate(job())
    with pytest.raises(FailedPrecondition, match="no trajectories yet"):
        JobProfile.of_spec(spec).check(spec)
    for text in ("", "[]", "{}", '{"format": 99}', "null"):
        with pytest.raises(InvalidArgument, match="not a profile"):
            JobProfile.of_json(text)
    for name, value in (("train_seconds", -1.0), ("rows", float("nan"))):
        values = json.loads(measured(spec, steps=1).to_json())
        values["policies"]["solver"][name] = value
        with pytest.raises(InvalidArgument, match=f"{name} of policy solver") as caught:
            JobProfile.of_json(json.dumps(values))
        assert caught.value.field == f"profile.policies.solver.{name}"
