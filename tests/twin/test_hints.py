"""Hints of a job's measured steps about its split, compared with the twin's for other splits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.twin.jobs import ENGINE, TRAINER, two_policies
from troupe.twin.cluster import PlayedTrajectory, Twin, TwinRun
from troupe.twin.costs import TrainerRates
from troupe.twin.hints import (
    IDLE_ENGINES,
    IDLE_TRAINERS,
    PolicyUse,
    StepUse,
    split_hint,
    split_metrics,
)
from troupe.twin.job import EngineFleet, TwinJob, TwinPolicy
from troupe.twin.profile import EngineSpeed

SPEED = EngineSpeed(
    1 / ENGINE.prefill_tokens_per_second,
    ENGINE.decode_seconds,
    ENGINE.decode_seconds_per_turn,
    concurrency=6.0,
)
STEPS = 5


def played(monkeypatch: pytest.MonkeyPatch, job: TwinJob) -> tuple[TwinRun, float]:
    """A run of the twin, and the mean seconds of its trajectories."""
    began: dict[str, float] = {}
    seconds: list[float] = []
    begin, ended = PlayedTrajectory.begin, Twin.trajectory_ended

    def noted(self: PlayedTrajectory) -> None:
        began[self.key] = self.twin.env.now
        begin(self)

    def over(self: Twin, one: PlayedTrajectory) -> None:
        seconds.append(self.env.now - began[one.key])
        ended(self, one)

    with monkeypatch.context() as patch:
        patch.setattr(PlayedTrajectory, "begin", noted)
        patch.setattr(Twin, "trajectory_ended", over)
        run = Twin(job).run(STEPS)
    return run, sum(seconds) / len(seconds)


def used(job: TwinJob, run: TwinRun, trajectory_seconds: float) -> list[StepUse]:
    """The steps of a run as the orchestrator measures them."""
    found = []
    for number in range(1, STEPS):
        first = number * job.queries_per_step
        drawn, read, turns = (dict.fromkeys(job.policies, 0.0) for _ in range(3))
        rows, wait, count = dict.fromkeys(job.policies, 0.0), 0.0, 0
        for index in range(first, first + job.queries_per_step):
            for trajectory in job.workload(index):
                count += 1
                for turn in trajectory.turns:
                    drawn[turn.policy] += turn.response
                    read[turn.policy] += turn.prompt - turn.shared
                    turns[turn.policy] += 1
                    rows[turn.policy] += turn.prompt + turn.response
                    wait += turn.after
        now, before = run.steps[number], run.steps[number - 1]
        policies = {
            name: PolicyUse(
                one.engines[0].count,
                one.engines[0].limit,
                turns[name],
                read[name],
                drawn[name],
                rows[name] / one.trainer.backward_tokens_per_second + one.trainer.step_seconds,
            )
            for name, one in job.policies.items()
        }
        rollout = now.rollout_alone + now.both - before.rollout_alone - before.both
        found.append(
            StepUse(now.at - before.at, rollout, count, trajectory_seconds, wait / count, policies)
        )
    return found


def with_engines(job: TwinJob, **counts: int) -> TwinJob:
    """The job with other numbers of engines."""
    policies = {
        name: TwinPolicy(
            (EngineFleet(counts.get(name, one.engines[0].count), ENGINE, limit=8),),
            one.trainer,
            state_bytes=1,
        )
        for name, one in job.policies.items()
    }
    return replace(job, policies=policies)


@pytest.mark.parametrize("mode", ["sync", "micro_batch", "async"])
def test_the_gain_of_an_engine_is_near_what_the_twin_gains(
    monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    job = two_policies(engines=1, mode=mode, in_flight=32, queries_per_step=24)
    run, seconds = played(monkeypatch, job)
    before = run.means(1).seconds
    metrics = split_metrics(
        used(job, run, seconds),
        dict.fromkeys(job.policies, SPEED),
        mode=mode,
        in_flight=job.in_flight,
        trainers=2,
    )
    for name in job.policies:
        more = Twin(with_engines(job, **{name: 2})).run(STEPS).means(1).seconds
        gain = metrics[f"split/gain/engine/{name}"]
        assert gain == pytest.approx(max(0.0, 1 - more / before), abs=0.12), name
    assert 0 <= metrics[IDLE_TRAINERS] <= 1
    assert metrics[IDLE_ENGINES] < 0.5


def test_the_gain_of_a_shared_engine_counts_it_once_with_the_turns_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = two_policies(engines=1, mode="sync", in_flight=32, queries_per_step=24)
    job = replace(job, groups=[("big", "small")])
    run, seconds = played(monkeypatch, job)
    before = run.means(1).seconds
    steps = [replace(one, groups=job.groups) for one in used(job, run, seconds)]
    speeds = dict.fromkeys(job.policies, SPEED)
    settings: dict[str, Any] = {"mode": "sync", "in_flight": job.in_flight, "trainers": 2}
    metrics = split_metrics(steps, speeds, **settings)
    wider = with_engines(job, big=2, small=2)
    more = Twin(wider).run(STEPS).means(1).seconds
    gain = metrics["split/gain/engine/big.small"]
    assert gain == pytest.approx(1 - more / before, abs=0.12)
    assert gain > 0.1
    assert not any(name.startswith("split/gain/engine/big/") for name in metrics)
    assert "one more engine for `big` and `small` would shorten" in split_hint(metrics)
    # One engine that is busy: apart, each of two would have been half idle.
    assert (
        metrics[IDLE_ENGINES]
        < split_metrics(used(job, run, seconds), speeds, **settings)[IDLE_ENGINES]
    )
    lacking = {"engine/big.small": "device"}
    metrics = split_metrics(steps, speeds, **settings, lacking=lacking)
    assert "steps wait for the engines of `big` and `small`, and no device is free" in split_hint(
        {name: value for name, value in metrics.items() if "gain" not in name}
    )


def test_nothing_is_gained_where_engines_wait_for_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = two_policies(engines=4, trainers=1, mode="micro_batch", in_flight=48)
    slow = TrainerRates(2_000.0, TRAINER.step_seconds)
    job = replace(
        job, policies={name: replace(one, trainer=slow) for name, one in job.policies.items()}
    )
    run, seconds = played(monkeypatch, job)
    metrics = split_metrics(
        used(job, run, seconds),
        dict.fromkeys(job.policies, SPEED),
        mode="micro_batch",
        in_flight=job.in_flight,
        trainers=1,
    )
    assert all(metrics[f"split/gain/engine/{name}"] == 0 for name in job.policies)
    wider = replace(job, trainers=two_policies(trainers=2).trainers)
    gain = 1 - Twin(wider).run(STEPS).means(1).seconds / run.means(1).seconds
    assert metrics["split/gain/trainer"] == pytest.approx(gain, abs=0.15)
    said = split_hint(metrics)
    assert said.startswith("engines idle")
    assert "one more trainer worker would shorten the step by about" in said


def step(seconds: float, train: float = 1.0) -> StepUse:
    """A step whose engine is saturated: 64 turns, 16 of them at once."""
    use, rollout = PolicyUse(1, 16, 64, 6400, 64 * 100, train), seconds - train
    return StepUse(seconds, rollout, 64, 0.5 * rollout, 0.5, {"solver": use})


def said_of(steps: list[StepUse], mode: str = "sync") -> str:
    return split_hint(split_metrics(steps, {"solver": SPEED}, mode=mode, in_flight=32, trainers=1))


def test_a_saturated_engine_is_named_with_what_one_more_would_bring() -> None:
    text = said_of([step(12.0)] * 4)
    assert text.startswith("trainers idle 92%: one more engine for `solver` would shorten the step")


def test_little_measured_or_much_noise_says_nothing() -> None:
    assert not said_of([step(12.0)] * 2)
    rng = random.Random(0)
    assert not said_of([step(rng.choice((2.0, 40.0))) for _ in range(4)])
    assert not split_metrics([step(12.0)] * 4, {}, mode="sync", in_flight=32, trainers=1)
    assert not split_hint({"loss": 1.0})
    assert not split_hint({})


def test_a_policy_alone_on_its_trainer_would_need_a_larger_gang() -> None:
    slow = [step(40.0, train=30.0)] * 4
    text = said_of(slow, mode="serial")
    assert "a gang of twice as many devices for `solver`" in text


@pytest.mark.parametrize("missing", ["core", "device"])
def test_an_engine_for_which_nothing_is_free_is_not_advised_but_named_as_the_bound(
    missing: str,
) -> None:
    metrics = split_metrics(
        [step(12.0)] * 4,
        {"solver": SPEED},
        mode="sync",
        in_flight=32,
        trainers=1,
        lacking={"engine/solver": missing},
    )
    assert "split/gain/engine/solver" not in metrics
    assert metrics[f"split/no_{missing}/engine/solver"] > 0.1
    assert split_hint(metrics) == (
        f"steps wait for the engines of `solver`, and no {missing} is free for more"
    )


def test_a_change_for_which_something_is_free_goes_before_one_for_which_nothing_is() -> None:
    metrics = {"split/no_core/engine/solver": 0.4, "split/gain/trainer": 0.2}
    assert "one more trainer worker would shorten" in split_hint(metrics)
    assert not split_hint({"split/no_core/engine/solver": 0.0})
