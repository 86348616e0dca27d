"""The twin of a cluster: its own behaviour, and the effects of the services' decisions in it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import simpy

from benchmarks.papers.actions.simulated import least
from testbed.simulator.models import Dedicated, ServedModel, SharedPool
from testbed.simulator.rollout import BatchResult, ask, play
from testbed.simulator.trace import (
    SHELL,
    TESTS,
    CodingLaw,
    ServiceRequest,
    SimulatedTurn,
    TeacherLaw,
    Trajectory,
    coding,
    teaching,
)
from testbed.twin.actions import CORES, REWARD, ElasticPool, Learned, Pods, SimulatedAction
from troupe.scheduling.elastic import Discipline, Placed, decide_over
from troupe.scheduling.elastic.order import FCFS, SHORTEST

LAW = CodingLaw(turns=4.0)
GUESSES = {TESTS: 0.9, REWARD: 0.9}


def elastic(trajectories: Sequence[Trajectory], *hosts: int, **kwargs: Any) -> BatchResult:
    capacities = [{CORES: cores} for cores in hosts]
    return play(trajectories, lambda env: ElasticPool(env, capacities, **kwargs))


def test_a_trace_is_its_seed_and_a_small_batch_begins_a_large_one() -> None:
    assert coding(4, LAW, 1) == coding(8, LAW, 1)[:4]
    assert coding(4, LAW, 1) != coding(4, LAW, 2)
    alike = dataclasses.replace(LAW, alike=0.9)
    assert coding(4, alike, 1) == coding(16, alike, 1)[:4]
    assert [len(t) for t in coding(16, alike, 1)] == [len(t) for t in coding(16, LAW, 1)]


def test_a_query_decides_as_much_of_the_spread_as_the_law_says() -> None:
    for alike in (0.5, 0.9):
        law = dataclasses.replace(CodingLaw(turns=2.0), alike=alike)
        rewards = [math.log(t[-1].call.seconds(1)) for t in coding(800, law, 1)]
        of_queries = [rewards[i : i + law.group] for i in range(0, 800, law.group)]
        within = sum(statistics.pvariance(each) for each in of_queries) / len(of_queries)
        spread = statistics.pvariance(rewards)
        assert math.sqrt(spread) == pytest.approx(law.seconds_spread, rel=0.1)
        assert within * law.group / (law.group - 1) / spread == pytest.approx(1 - alike, abs=0.08)


def test_a_sandbox_of_its_own_is_busy_as_much_as_the_law_says() -> None:
    trajectories = coding(400, CodingLaw(), 1)
    law = CodingLaw()
    busy = sum(turn.call.seconds(law.duty_cores) for t in trajectories for turn in t)
    think = sum(turn.think for t in trajectories for turn in t)
    assert busy / (busy + think) == pytest.approx(law.duty, abs=0.03)


def test_the_same_run_twice_is_the_same() -> None:
    trajectories = coding(12, LAW, 1)
    assert elastic(trajectories, 16, 16) == elastic(trajectories, 16, 16)


def test_one_action_takes_its_seconds_on_its_cores() -> None:
    call = SimulatedAction(TESTS, 1, 4, 1.0, 8.0)
    (act,) = elastic([[SimulatedTurn(5.0, call)]], 8, fractions={TESTS: 0.9}).acts
    assert act == 1.0 + 8.0 / 4
    played = elastic([[SimulatedTurn(0.0, call)]], 8, fixed=2)
    assert (played.acts, played.core_seconds) == ([5.0], 10.0)


def test_nothing_is_given_out_twice_and_all_end() -> None:
    trajectories, hosts = coding(24, LAW, 3), (8, 16)
    seen = 0

    def watch(views: Any, *args: Any) -> list[Placed]:
        nonlocal seen
        grants = decide_over(views, *args)
        for view in views:
            held = sum(running.holds[CORES] for running in view.running)
            given = sum(g.holds[CORES] for g in grants if g.host == view.name)
            assert 0 <= held + given <= hosts[int(view.name)]
            assert held + view.free[CORES] == hosts[int(view.name)]
        seen += len(grants)
        return grants

    played = elastic(trajectories, *hosts, decide=watch)
    assert seen == len(played.acts) == sum(map(len, trajectories))
    assert played.waited > 0


def test_a_trajectory_stays_on_its_host_when_it_has_files_there() -> None:
    hosts: dict[str, set[str]] = {}

    def watch(views: Any, queue: Any, *args: Any) -> list[Placed]:
        grants = decide_over(views, queue, *args)
        for grant in grants:
            hosts.setdefault(grant.action.host or "", set()).add(grant.host)
        return grants

    elastic(coding(8, LAW, 1), 4, 4, 4, decide=watch)
    assert hosts == {name: {name} for name in ("0", "1", "2")}


def test_a_pod_is_waited_for_once_and_its_cores_are_its_own() -> None:
    call = SimulatedAction(TESTS, 1, 8, 0.0, 8.0)
    trajectory = [SimulatedTurn(1.0, call), SimulatedTurn(1.0, call)]

    def make(env: simpy.Environment) -> Pods:
        return Pods(env, [{CORES: 5}], cores=4, parallelism=2)

    # One pod: 2 x (1 + 4) s, so the second waits for 10.
    assert play([trajectory, trajectory], make).acts == [4.0, 4.0, 14.0, 4.0]
    with pytest.raises(ValueError, match="cores = 8: no host has that many"):
        Pods(simpy.Environment(), [{CORES: 5}], cores=8)


def test_the_control_plane_makes_one_pod_after_another() -> None:
    trajectory = [SimulatedTurn(0.0, SimulatedAction(SHELL, 1, 1, 1.0, 0.0))]

    def make(env: simpy.Environment) -> Pods:
        return Pods(env, [{CORES: 8}], cores=1, start_seconds=3.0, made_per_second=2.0)

    assert play([trajectory] * 3, make).acts == [4.5, 5.0, 5.5]


def test_pods_that_are_held_by_groups_are_waited_for_longer() -> None:
    trajectories = coding(32, LAW, 1)

    def run(held_by: int, cores: int = 32) -> BatchResult:
        return play(trajectories, lambda env: Pods(env, [{CORES: cores}], cores=2), held_by=held_by)

    alone, grouped = run(1), run(4)
    assert len(grouped.acts) == len(alone.acts)
    assert grouped.act > alone.act
    with pytest.raises(ValueError, match="held_by = 0"):
        run(0)
    with pytest.raises(ValueError, match="held_by = 4"):
        run(4, cores=4)


def test_elastic_beats_reservations_and_more_so_the_more_trajectories_there_are() -> None:
    """ARL-Tangram's table in small: 64 cores, pods of 16."""
    gains = []
    for count in (4, 24):
        trajectories = coding(count, LAW, 1)
        static = play(trajectories, lambda env: Pods(env, [{CORES: 64}], cores=16, parallelism=2))
        gains.append(static.act / elastic(trajectories, 64, fractions=GUESSES).act)
    assert 1.5 < gains[0] < gains[1]


def test_guesses_about_functions_are_corrected() -> None:
    trajectories = coding(48, dataclasses.replace(LAW, turns=12.0), 1)
    told = elastic(trajectories, 128, fractions={TESTS: 0.98, REWARD: 0.98})
    guessed = elastic(trajectories, 128, fractions={TESTS: 0.3, REWARD: 0.3})
    assert guessed.act < 1.5 * told.act


def test_shortest_first_beats_first_come_where_it_is_crowded_and_nothing_beats_the_bound() -> None:
    law = CodingLaw(turns=4.0, reward_seconds=60.0, max_cores=2, duty_cores=1)
    for seed in range(3):
        trajectories = coding(32, law, seed)
        # With enough patience for trajectories of hours on two cores.
        orders = [Learned(Discipline(order, patience=1e5)) for order in (FCFS, SHORTEST, SHORTEST)]
        told = [False, False, True]
        acts = [
            elastic(trajectories, 2, fractions=GUESSES, learned=learned, told=knows).act
            for learned, knows in zip(orders, told, strict=True)
        ]
        assert least(trajectories, 2) < acts[2] < acts[0]
        assert acts[1] < acts[0]


def test_calls_of_a_query_that_are_alike_are_known_from_each_other() -> None:
    law = CodingLaw(turns=4.0, reward_seconds=60.0, max_cores=2, duty_cores=1)

    def gain(alike: float) -> float:
        """Return the gain of `shortest` over an order that cannot distinguish a query's
        trajectories."""
        gains = []
        for seed in range(3):
            trajectories = coding(32, dataclasses.replace(law, alike=alike), seed)
            strangers = [
                [dataclasses.replace(t, call=dataclasses.replace(t.call, query="")) for t in turns]
                for turns in trajectories
            ]
            acts = []
            for each in (strangers, trajectories):
                learned = Learned(Discipline(patience=1e5))
                elastic(each, 2, fractions=GUESSES, learned=learned)
                acts.append(elastic(each, 2, fractions=GUESSES, learned=learned).act)
            gains.append(acts[0] / acts[1])
        return sum(gains) / len(gains)

    assert gain(0.9) > 1.1
    assert gain(0.0) == 1.0


def test_a_long_action_is_not_overtaken_for_ever() -> None:
    """One core, and always a trajectory with little work: one with much waits until its patience
    ends."""
    env, began = simpy.Environment(), dict[str, float]()
    learned = Learned(Discipline(patience=50.0))
    pool = ElasticPool(env, [{CORES: 1}], learned=learned, told=True)

    def one(name: str, at: float, seconds: float) -> Any:
        yield env.timeout(at)
        yield from pool.run(SimulatedAction(SHELL, 1, 1, seconds, 0.0))
        began[name] = env.now - seconds

    env.process(one("first", 0.0, 1.0))
    env.process(one("much", 0.5, 500.0))
    for i in range(200):
        env.process(one(f"{i}", 0.6 + i, 1.0))
    env.run(until=1000)
    assert 20 < began["much"] < 55


# Model services.


SERVICES = [ServedModel("a", 4), ServedModel("b", 4)]


def shared(devices: int, calls: Sequence[ServiceRequest]) -> list[float]:
    def make(env: simpy.Environment) -> SharedPool:
        return SharedPool(env, SERVICES, devices=devices, restore_seconds=2.0)

    return ask(calls, ["a", "b"], make).acts


def test_a_model_is_restored_when_it_is_asked_and_stays_until_another_is() -> None:
    calls = [
        ServiceRequest(0.0, 0, 1.0),
        ServiceRequest(10.0, 0, 1.0),
        ServiceRequest(20.0, 1, 1.0),
        ServiceRequest(30.0, 0, 1.0),
    ]
    assert shared(4, calls) == [3.0, 1.0, 3.0, 3.0]
    assert shared(8, calls) == [3.0, 1.0, 3.0, 1.0]


def test_the_model_needed_last_is_evicted_if_the_future_is_known() -> None:
    calls = [ServiceRequest(10.0 * i, service, 1.0) for i, service in enumerate((0, 1, 2, 0, 1, 0))]

    def restores(next_call: Any) -> int:
        made: list[SharedPool] = []

        def pool(env: simpy.Environment) -> SharedPool:
            services = [ServedModel(name, 4) for name in "abc"]
            made.append(
                SharedPool(env, services, devices=8, restore_seconds=1.0, next_call=next_call)
            )
            return made[0]

        ask(calls, "abc", pool)
        return made[0].restores

    def known(name: str, now: float) -> float:
        later = (call.at for call in calls if "abc"[call.service] == name and call.at > now)
        return min(later, default=1e9)

    # a, b, c for b, a stays, b for c, a stays.
    assert (restores(known), restores(None)) == (4, 5)


def test_a_busy_model_is_not_evicted() -> None:
    # b waits until a has ended (5 s), then for its own restoring.
    assert sorted(shared(4, [ServiceRequest(0.0, 0, 3.0), ServiceRequest(1.0, 1, 1.0)])) == [
        5.0,
        7.0,
    ]


def test_devices_of_its_own_are_waited_for_only_while_it_is_at_work() -> None:
    calls = [ServiceRequest(0.0, 0, 3.0), ServiceRequest(1.0, 0, 1.0), ServiceRequest(1.0, 1, 1.0)]
    played = ask(calls, ["a", "b"], lambda env: Dedicated(env, SERVICES))
    assert sorted(played.acts) == [1.0, 3.0, 3.0]


def test_a_pool_for_all_models_is_dedicated_after_their_first_calls() -> None:
    law = TeacherLaw(services=2, step_seconds=100.0)
    calls = teaching(3, law, 1)
    assert len(calls) == 3 * law.calls_per_step
    acts = sum(shared(8, calls))
    own = sum(ask(calls, ["a", "b"], lambda env: Dedicated(env, SERVICES)).acts)
    assert 0 < acts - own < 2 * 2.0 * len(SERVICES)
