"""The twin of a cluster: the duration of its steps, and that nothing is lost in them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.twin.cluster import PublishedTwin
from testbed.twin.faults import NodeFaults
from tests.twin.jobs import (
    ENGINE,
    TRAINER,
    constant,
    disturbed_team,
    published,
    team,
    two_policies,
)
from troupe.rpc import InvalidArgument
from troupe.scheduling.balancing import BalancingRules
from troupe.scheduling.binding import RankWorker
from troupe.twin.cluster import Twin, TwinRun
from troupe.twin.costs import (
    DEVICES,
    device_costs,
    engine_rates,
    engine_turns,
    model_shape,
    trainer_rates,
)
from troupe.twin.engines import TwinEnvironment
from troupe.twin.job import EngineFleet, TwinJob, TwinPolicy
from troupe.twin.workload import Lengths, Replayed, TwinTrajectory, TwinTurn


def rows(job: TwinJob, steps: int) -> int:
    """Tokens of the rows of the first steps."""
    return sum(
        turn.prompt + turn.response
        for index in range(job.queries_per_step * steps)
        for trajectory in job.workload(index)
        for turn in trajectory.turns
    )


def check(run: TwinRun, steps: int) -> None:
    """Every row of every step is trained once, and the shares of time add up."""
    job, last = run.job, run.steps[-1]
    assert last.trained_tokens == rows(job, steps)
    assert len(run.steps) == steps
    shares = last.rollout_alone + last.both + last.training_alone + last.neither
    assert shares == pytest.approx(last.at)
    for one, other in itertools.pairwise(run.steps):
        assert one.at <= other.at


def test_the_seconds_of_a_step_follow_by_arithmetic() -> None:
    policy = TwinPolicy((EngineFleet(1, ENGINE),), TRAINER)
    job = TwinJob(
        policies={"p": policy},
        workload=constant,
        trainers=[RankWorker("t")],
        mode="sync",
        queries_per_step=1,
        micro_batch=2,
    )
    run = Twin(job).run(2)
    # Two prompts of 0.1 s, 100 steps of 21 ms; 2,200 tokens trained, a step, weights loaded.
    seconds = 0.2 + 2.1 + 2200 / 20_000 + 0.5 + 0.5
    # In the first step the policy's state is loaded, too.
    assert run.means(0).seconds == pytest.approx(seconds + 0.3 / 2)
    assert run.means(1).seconds == pytest.approx(seconds)
    assert run.means(1).rollout_alone == pytest.approx(2.3)
    assert run.means(1).training_alone == pytest.approx(0.61)
    assert run.means(1).response_tokens_per_second == pytest.approx(200 / seconds)
    check(run, 2)


def test_the_modes_are_in_the_order_of_what_they_overlap() -> None:
    seconds = {}
    for mode in ("serial", "sync", "micro_batch", "async"):
        late = 1 if mode == "async" else 0
        run = Twin(two_policies(mode=mode)).run(3 + late)
        check(run, 3 + late)
        means = run.means(1, late)
        seconds[mode] = means.seconds
        assert (means.both > 0) == (mode in ("micro_batch", "async"))
        assert means.staleness <= (1 if mode == "async" else 0)
    assert seconds["serial"] > seconds["sync"] > seconds["micro_batch"] > seconds["async"]


def test_policies_without_a_trainer_of_their_own_take_turns() -> None:
    alone = Twin(two_policies(mode="micro_batch", trainers=2)).run(3)
    shared = Twin(two_policies(mode="micro_batch", trainers=1)).run(3)
    check(shared, 3)
    assert alone.swaps == 0
    assert shared.swaps >= 2
    assert shared.means().seconds > alone.means().seconds


def test_policies_of_a_group_share_engines_and_their_turns_wait_in_one_queue() -> None:
    skewed = team(own_response={"big": Lengths(400.0, 0.3), "small": Lengths(10.0, 0.3)})
    apart = two_policies(engines=1, workload=skewed, mode="sync", in_flight=48)
    # As many engines in all, which each of the two may fill.
    one = TwinPolicy((EngineFleet(2, ENGINE, limit=8),), TRAINER, state_bytes=1)
    both = dataclasses.replace(
        apart, policies={"big": one, "small": one}, groups=[("big", "small")]
    )
    twin = Twin(both)
    ran, still = twin.run(2), Twin(apart).run(2)
    check(ran, 2)
    assert ran.engines == still.engines == 2
    assert twin.routers[0]["big"] is twin.routers[0]["small"]
    assert ran.means(0).seconds < still.means(0).seconds
    # They never move under any rules.
    rules = BalancingRules(threshold=0.5, hysteresis=0.1, sustain_seconds=0.0, cooldown_seconds=0.0)
    assert not Twin(dataclasses.replace(both, balancing=rules)).run(2).moves


def test_adapters_load_while_turns_go_on() -> None:
    def exposed(*, adapters: bool) -> float:
        fleet = EngineFleet(2, ENGINE, limit=8, adapters=adapters)
        job = two_policies(mode="async", in_flight=48)
        policies = {
            name: dataclasses.replace(one, engines=(fleet,)) for name, one in job.policies.items()
        }
        run = Twin(dataclasses.replace(job, policies=policies)).run(4)
        check(run, 4)
        return run.means(1).exposed

    assert exposed(adapters=True) == 0 < exposed(adapters=False)


def test_engines_move_to_the_policy_that_needs_them() -> None:
    skewed = team(own_response={"big": Lengths(400.0, 0.3), "small": Lengths(10.0, 0.3)})
    rules = BalancingRules(threshold=2.0, hysteresis=0.5, sustain_seconds=1.0, cooldown_seconds=5.0)
    fixed = two_policies(engines=3, workload=skewed, mode="sync", in_flight=48)
    still = Twin(fixed).run(2)
    moving = Twin(dataclasses.replace(fixed, balancing=rules)).run(2)
    check(moving, 2)
    assert moving.moves > 0
    assert moving.means(0).seconds < still.means(0).seconds


def test_spare_queries_shorten_a_step_with_stalls() -> None:
    stalls = disturbed_team(stalls=0.02, stall_seconds=120.0)
    plain = Twin(two_policies(mode="sync", workload=stalls, in_flight=96)).run(3)
    spare = Twin(two_policies(mode="sync", workload=stalls, in_flight=96, spare=6)).run(3)
    assert spare.means(0).seconds < plain.means(0).seconds
    assert spare.steps[-1].trained_tokens > 0


def test_a_batch_of_environments_waits_for_the_slowest() -> None:
    slow = dataclasses.replace(team(), wait=Lengths(5.0, 1.0))
    job = published(mode="sync", workload=slow, in_flight=48)
    batch = PublishedTwin(dataclasses.replace(job, barrier=True)).run(2)
    check(batch, 2)
    assert batch.means(0).seconds > PublishedTwin(job).run(2).means(0).seconds


def test_broken_environments_run_again() -> None:
    run = PublishedTwin(published(workload=disturbed_team(faults=0.3))).run(2)
    check(run, 2)
    assert run.events > sum(
        len(trajectory.turns) for index in range(24) for trajectory in team()(index)
    )


@settings(max_examples=15, deadline=None)
@given(
    mode=st.sampled_from(["serial", "sync", "micro_batch", "async"]),
    trainers=st.integers(1, 3),
    workers=st.integers(1, 3),
    micro_batch=st.integers(1, 20),
    in_flight=st.integers(1, 64),
    balanced=st.booleans(),
    mtbf=st.sampled_from([0.0, 40.0, 200.0]),
    seed=st.integers(0, 5),
)
def test_every_row_is_trained_in_spite_of_faults(
    mode: Any,
    trainers: int,
    workers: int,
    micro_batch: int,
    in_flight: int,
    balanced: bool,
    mtbf: float,
    seed: int,
) -> None:
    faults = NodeFaults(mtbf, down_seconds=10.0, seed=seed) if mtbf else None
    job = published(
        mode=mode,
        trainers=trainers,
        rollout_workers=workers,
        micro_batch=micro_batch,
        in_flight=in_flight,
        balancing=BalancingRules() if balanced else None,
        faults=faults,
        queries_per_step=5,
        workload=team(seed=seed),
    )
    twin = PublishedTwin(job)
    run = twin.run(2)
    # What a dead gang had computed is computed again.
    assert run.steps[-1].trained_tokens >= rows(job, 2)
    if not twin.failures:
        check(run, 2)


def test_the_same_job_gives_the_same_run() -> None:
    job = published(mode="async", balancing=BalancingRules(), faults=NodeFaults(100.0, 5.0))
    assert PublishedTwin(job).run(4).steps == PublishedTwin(job).run(4).steps


def test_a_recorded_workload_begins_anew_after_its_last_query() -> None:
    one = TwinTrajectory((TwinTurn("p", 1, 1),))
    workload = Replayed([[one], [one, one]])
    assert [len(workload(n)) for n in range(4)] == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="queries"):
        Replayed([])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policies": {}}, "policies"),
        ({"trainers": []}, "trainers"),
        ({"queries_per_step": 0}, "queries_per_step = 0"),
        ({"in_flight": -1}, "in_flight = -1"),
        ({"rollout_workers": 0}, "rollout_workers = 0"),
        ({"groups": [("big", "other")]}, "big, other are not policies with equal engines"),
        ({"groups": [("big", "small"), ("small", "big")]}, "in one group at most"),
    ],
)
def test_a_job_that_cannot_run_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Twin(dataclasses.replace(two_policies(), **change))


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_rates_that_are_not_positive_are_refused(rate: float) -> None:
    slow = dataclasses.replace(ENGINE, prefill_tokens_per_second=rate)
    policy = TwinPolicy((EngineFleet(1, slow),), TRAINER)
    with pytest.raises(ValueError, match="prefill_tokens_per_second"):
        Twin(dataclasses.replace(two_policies(), policies={"big": policy}))
    slow_trainer = dataclasses.replace(TRAINER, backward_tokens_per_second=rate)
    policy = TwinPolicy((EngineFleet(1, ENGINE),), slow_trainer)
    with pytest.raises(ValueError, match="backward_tokens_per_second"):
        Twin(dataclasses.replace(two_policies(), policies={"big": policy}))
    with pytest.raises(ValueError, match="steps = 0"):
        Twin(two_policies()).run(0)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-0.6B", 0.60, 0.60),
        ("Qwen3-14B", 14.8, 14.0),
        ("Qwen3-32B", 32.8, 32.0),
        ("Qwen3-30B-A3B", 30.5, 3.0),
        ("Qwen3-235B-A22B", 235.1, 21.6),
    ],
)
def test_models_have_the_parameters_that_are_published(
    name: str, billions: float, active: float
) -> None:
    shape = model_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_costs_follow_the_device() -> None:
    shape = model_shape("Qwen3-8B")
    h100, h20 = DEVICES["H100"], DEVICES["H20"]
    one = engine_rates(shape, h100)
    # 15.1 GB of weights without the embedding, at 60 % of 3.35 TB/s.
    assert one.decode_seconds == pytest.approx(15.1e9 / (0.6 * 3.35e12) + 1.5e-3, rel=0.02)
    assert engine_rates(shape, h100, tensor_parallel=4).decode_seconds < one.decode_seconds
    # H20: little arithmetic, much bandwidth.
    assert engine_rates(shape, h20).decode_seconds < one.decode_seconds
    assert engine_rates(shape, h20).prefill_tokens_per_second < one.prefill_tokens_per_second / 5
    two = trainer_rates(shape, h100, ranks=2)
    assert trainer_rates(shape, h100, ranks=8).backward_tokens_per_second == pytest.approx(
        4 * two.backward_tokens_per_second
    )
    # A mixture reads few experts for one turn and nearly all for many.
    mixture = model_shape("Qwen3-30B-A3B")
    alone, many = (engine_rates(mixture, h100, running=n).decode_seconds for n in (1, 256))
    assert alone < many / 3
    assert engine_turns(shape, h100, tensor_parallel=1, context=4096) > 50
    assert not engine_turns(model_shape("Qwen3-235B-A22B"), h100, tensor_parallel=4, context=4096)


def test_unknown_devices_and_models_are_refused_with_what_is_missing() -> None:
    with pytest.raises(InvalidArgument, match="device class 'X9' is unknown"):
        device_costs("X9", memory=1 << 36)
    made = device_costs("X9", memory=1 << 36, tflops=500, gigabytes_per_second=2000)
    assert (made.flops, made.bandwidth) == (500e12, 2e12)
    assert device_costs("h100").bandwidth == 3.35e12
    for rates in ({"tflops": -1.0}, {"gigabytes_per_second": float("inf")}):
        with pytest.raises(InvalidArgument, match="above 0"):
            device_costs("H100", **rates)
    with pytest.raises(InvalidArgument, match="dimensions of the model"):
        model_shape("Qwen3-9000B")


@given(
    seed=st.integers(0, 2**32),
    mean=st.floats(1e-3, 1e6),
    sigma=st.floats(0, 5, exclude_min=True),
    draws=st.integers(1, 20),
)
def test_lognormal_draws_are_those_of_random(
    seed: int, mean: float, sigma: float, draws: int
) -> None:
    rng, reference = random.Random(seed), random.Random(seed)
    location = math.log(mean) - sigma * sigma / 2
    for _ in range(draws):
        assert Lengths(mean, sigma).draw(rng) == reference.lognormvariate(location, sigma)
        assert rng.getstate() == reference.getstate()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_plain_calls_and_events_happen_in_the_order_of_time_then_of_their_start(
    starts: list[tuple[int, bool]],
) -> None:
    """simpy's own order, which plain calls share."""
    env, happened = TwinEnvironment(), list[tuple[float, int]]()

    def happen(number: int) -> None:
        happened.append((env.now, number))

    for number, (seconds, plain) in enumerate(starts):
        if plain:
            env.clock.call(float(seconds), happen, number)
        else:
            timeout = env.timeout(float(seconds))
            timeout.callbacks.append(lambda _, number=number: happen(number))
    env.clock.run_to(env, env.timeout(4.0))
    assert happened == sorted((float(at), number) for number, (at, _) in enumerate(starts))
    with pytest.raises(RuntimeError, match="no events are left"):
        env.clock.run_to(env, env.event())
