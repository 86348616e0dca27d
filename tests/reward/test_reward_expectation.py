"""How long a call is expected to take: as its function declares, its caller says, others took."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import structlog

from services.chassis.telemetry import Telemetry
from services.reward.call import CallOutcome, FunctionCall
from services.reward.function import RegisteredFunction, declared_seconds, expect, learn
from services.reward.quota import Budget
from services.reward.runtime import Runtime
from troupe.scheduling.elastic import Discipline
from troupe.v1 import reward_pb2 as reward_pb


def spec(**fields: Any) -> reward_pb.FunctionSpec:
    return reward_pb.FunctionSpec(name="f", timeout_seconds=100.0, **fields)


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ({"tests": ["a", "b", "c"]}, 7.0),
        ({"tests": 10}, 21.0),
        ({"tests": "four"}, 9.0),
        ({"tests": {"a": 1}, "query": {"data": {"size": 0.5}}}, 3.5),
        ({}, 1.0),
        ({"tests": None, "query": {"data": [1]}}, 1.0),
        ({"tests": -3}, 1.0),
        ({"tests": 10**400}, 100.0),
        ({"tests": [0] * 1000}, 100.0),
        ([1], 1.0),
    ],
)
def test_a_declared_estimate_follows_the_arguments(arguments: Any, seconds: float) -> None:
    given = spec(expected_seconds=1.0, seconds_per={"tests": 2.0, "query.data.size": 1.0})
    assert declared_seconds(given, json.dumps(arguments)) == seconds


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"tests": NaN}', '{"tests": 1e999}'])
def test_invalid_arguments_are_left_to_the_worker(text: str) -> None:
    given = spec(expected_seconds=1.0, seconds_per={"tests": 2.0})
    assert declared_seconds(given, text) in (1.0, 100.0)


def test_arguments_too_long_to_be_parsed_in_the_event_loop_add_nothing() -> None:
    given = spec(expected_seconds=1.0, seconds_per={"tests": 2.0})
    assert declared_seconds(given, json.dumps({"tests": 1, "text": "x" * 2**22})) == 1.0


@pytest.mark.parametrize("size", ["NaN", "Infinity", "1e999"])
def test_a_zero_cost_per_item_adds_nothing_for_infinite_counts(size: str) -> None:
    given = spec(expected_seconds=1.0, seconds_per={"tests": 0.0})
    assert declared_seconds(given, f'{{"tests": {size}}}') == 1.0


@pytest.mark.parametrize(
    ("said", "meant"), [(sys.float_info.max, 100.0), (1e-310, 1e-6), (3.0, 3.0), (0.0, 0.0)]
)
def test_a_call_is_said_to_take_no_longer_than_it_may(said: float, meant: float) -> None:
    call = FunctionCall("{}", expected_seconds=said)
    expect(RegisteredFunction(spec()), call, Discipline())
    assert call.expected_seconds == meant


def test_a_function_is_declared_to_take_no_longer_than_it_may() -> None:
    assert RegisteredFunction(spec(expected_seconds=1e300)).seconds == pytest.approx(100.0)


def test_a_declared_time_is_where_learning_begins() -> None:
    for cores in (1, 2):
        function = RegisteredFunction(
            spec(expected_seconds=30.0, parallel_fraction=0.9, cores=cores)
        )
        assert function.seconds == pytest.approx(30.0)
        call, discipline = FunctionCall("{}"), Discipline()
        expect(function, call, discipline)
        assert (call.expected_seconds, call.estimated_seconds) == (0.0, 0.0)
        for _ in range(20):
            function.curve = learn(function, call, 6.0, cores, discipline)
        assert function.seconds == pytest.approx(6.0)


def test_the_caller_goes_before_the_declaration_and_runs_correct_both() -> None:
    function = RegisteredFunction(spec(seconds_per={"tests": 2.0}))
    discipline = Discipline()
    declared, said = (
        FunctionCall('{"tests": 4}'),
        FunctionCall('{"tests": 4}', expected_seconds=5.0),
    )
    for call, seconds in ((declared, 8.0), (said, 5.0)):
        expect(function, call, discipline)
        assert (call.expected_seconds, call.estimated_seconds) == (seconds, seconds)
    # This machine is ten times as fast as the one on which it was declared.
    for tests in range(1, 50):
        call = FunctionCall(json.dumps({"tests": tests}), "job", f"{tests}")
        expect(function, call, discipline)
        function.curve = learn(function, call, 0.2 * tests, 1, discipline)
    call = FunctionCall('{"tests": 45}')
    expect(function, call, discipline)
    assert call.estimated_seconds == pytest.approx(9.0, rel=0.02)


def test_runs_with_more_cores_tell_of_the_fewest() -> None:
    function = RegisteredFunction(spec(parallel_fraction=1.0, max_cores=4))
    discipline = Discipline()
    for query, seconds in (("slow", 8.0), ("fast", 2.0)) * 8:
        call = FunctionCall("{}", "job", new_trajectory(), query)
        function.curve = learn(function, call, seconds / 4, 4, discipline)
    known = {}
    for query in ("slow", "fast"):
        call = FunctionCall("{}", "job", "another", query)
        expect(function, call, discipline)
        known[query] = call.estimated_seconds
    assert known["slow"] == pytest.approx(8.0, rel=0.2)
    assert known["fast"] == pytest.approx(2.0, rel=0.2)
    # Equal names of another job are independent.
    call = FunctionCall("{}", "other job", "another", "slow")
    expect(function, call, discipline)
    assert call.estimated_seconds == 0.0


_trajectories = iter(range(10**6))


def new_trajectory() -> str:
    return f"trajectory {next(_trajectories)}"


async def test_the_longest_function_of_a_query_runs_last() -> None:
    runtime = Runtime([], Telemetry())
    function = RegisteredFunction(reward_pb.FunctionSpec(name="score", kind="reward"))

    def submit(name: str, query: str) -> None:
        runtime.submit([(name, FunctionCall(f'"{name}"', "job", name, query))], function)

    for number in range(20):
        query, seconds = ("slow", 9.0) if number % 2 else ("fast", 1.0)
        submit(f"{number}", query)
        (waiting,) = runtime.dispatcher.queues.first(9, Budget({}, 0), lambda _: 9)
        runtime.dispatcher.queues.remove(waiting)
        runtime.attempt_ended(waiting, CallOutcome("1.0", seconds))
    for name, query in (("a", "slow"), ("b", "fast"), ("c", "slow"), ("d", "fast")):
        submit(name, query)
    first = [
        w.invocation_id for w in runtime.dispatcher.queues.first(9, Budget({}, 0), lambda _: 9)
    ]
    assert [sorted(first[:2]), sorted(first[2:])] == [["b", "d"], ["a", "c"]]


@pytest.mark.parametrize("said", [sys.float_info.max, 1e-310])
async def test_an_absurd_declared_duration_leaves_other_calls_ranks_finite(said: float) -> None:
    runtime, function = Runtime([], Telemetry()), RegisteredFunction(spec())
    queues = runtime.dispatcher.queues
    for number in range(20):
        call = FunctionCall("{}", "job", f"{number}", expected_seconds=0.0 if number % 3 else said)
        (done,) = runtime.submit([(f"{number}", call)], function)
        (waiting,) = queues.first(9, Budget({}, 0), lambda _: 9)
        queues.remove(waiting)
        runtime.attempt_ended(waiting, CallOutcome("1.0", 1.0))
        assert math.isfinite(waiting.rank[0])
        assert done.result().result_json == "1.0"


async def test_a_call_has_its_result_although_its_duration_cannot_be_learned() -> None:
    runtime, function = Runtime([], Telemetry()), RegisteredFunction(spec())
    (done,) = runtime.submit([("one", FunctionCall("{}", "job"))], function)
    (waiting,) = runtime.dispatcher.queues.first(1, Budget({}, 0), lambda _: 9)
    runtime.dispatcher.queues.remove(waiting)
    with structlog.testing.capture_logs() as lines:
        runtime.attempt_ended(waiting, CallOutcome("1.0", math.nan))
    assert done.result().result_json == "1.0"
    assert [line["event"] for line in lines] == ["learning"]
