"""Nothing is lost between the queues and the executors, whatever executors do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from services.chassis.telemetry import Telemetry
from services.reward.call import CallOutcome, FunctionCall
from services.reward.cgroups import CoreCount, CoreLease
from services.reward.dispatch.invocation import PendingInvocation
from services.reward.function import RegisteredFunction
from services.reward.gpu.manager import ModelPlacement
from services.reward.host import FunctionHost
from services.reward.quota import Budget
from services.reward.resources import MEMORY, HostResources
from services.reward.runtime import Runtime
from tests.support.places import BarePlace
from tests.support.waiting import PATIENCE
from troupe.rpc import Unavailable
from troupe.scheduling.elastic import Discipline
from troupe.scheduling.elastic.cells import Model
from troupe.scheduling.elastic.order import FCFS, SHORTEST, Order
from troupe.v1 import reward_pb2 as reward_pb

Kind = reward_pb.InvocationError


class FragilePlace(BarePlace):
    """Is lost as often as `draw` says."""

    def __init__(self, name: str, draw: random.Random) -> None:
        super().__init__(name)
        self._draw = draw

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        self.cancelled.clear()
        cold = 0.0 if self.warm else 0.001
        await asyncio.sleep(cold)
        self.warm = True
        for index, call in enumerate(calls):
            if call.dropped:
                continue
            seconds = self._draw.choice([0.0, 0.0, 0.001, 0.3 if self._draw.random() < 0.02 else 0])
            try:
                async with asyncio.timeout(seconds):
                    await self.cancelled.wait()
                kind: Any = Kind.KIND_CANCELLED
            except TimeoutError:
                kind = self._draw.choices([0, Kind.KIND_RAISED, Kind.KIND_WORKER_DIED], [20, 1, 1])[
                    0
                ]
            if kind == 0:
                # Now and then one that no message can hold.
                text = self._draw.choices(["1", "\ud800"], [50, 1])[0]
                yield index, CallOutcome(text, seconds, cold_seconds=cold)
            else:
                yield (
                    index,
                    CallOutcome(error=reward_pb.InvocationError(kind=kind, message="as drawn")),
                )
            cold = 0.0
            if kind in (Kind.KIND_CANCELLED, Kind.KIND_WORKER_DIED):
                self.warm = False
                self.restarts += 1
                return


@pytest.mark.parametrize("seed", range(2))
async def test_every_call_has_one_outcome(seed: int) -> None:
    draw = random.Random(seed)
    executors = [FragilePlace(f"place {i}", draw) for i in range(draw.choice([1, 2, 5]))]
    idle = draw.choice([0.0, 0.01, 9.0])
    host = FunctionHost("", executors, min_workers=seed % 2, idle_seconds=idle)
    runtime = Runtime([host], Telemetry())
    functions = [
        RegisteredFunction(reward_pb.FunctionSpec(name="short", kind="reward", timeout_seconds=9)),
        RegisteredFunction(
            reward_pb.FunctionSpec(name="one at a time", max_concurrency=1, timeout_seconds=9)
        ),
        RegisteredFunction(reward_pb.FunctionSpec(name="again", retries=2, timeout_seconds=9)),
        RegisteredFunction(
            reward_pb.FunctionSpec(name="alone", sandbox="bubblewrap", timeout_seconds=9)
        ),
    ]
    await runtime.dispatcher.start()
    asked: dict[str, asyncio.Future[reward_pb.InvokeResponse]] = {}
    given_up = 0

    async def caller(number: int) -> None:
        nonlocal given_up
        for turn in range(4):
            await asyncio.sleep(draw.random() * 0.03)
            names = [f"{number}-{turn}-{i}" for i in range(draw.choice([1, 1, 20]))]
            job, priority = f"job {number % 3}", draw.choice([0, 0, 1])
            calls = [(name, FunctionCall("{}", job, priority=priority)) for name in names]
            outcomes = runtime.submit(calls, draw.choice(functions))
            asked.update(zip(names, outcomes, strict=True))
            victim = draw.choice(names)
            what = draw.random()
            if what < 0.2:
                asyncio.get_running_loop().call_later(0.005, runtime.cancel, victim)
            elif what < 0.3:
                runtime.abandon(victim)
            elif what < 0.4:
                runtime.dispatcher.dispatch()

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*(caller(i) for i in range(6)))
        ended = await asyncio.gather(*asked.values(), return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, Unavailable)  # its callers left
            given_up += 1
    assert len(ended) - given_up > 50
    assert runtime.pool.busy == len(runtime.dispatcher.queues) == 0
    for function in functions:
        running = runtime.dispatcher.running(function)
        assert (function.queued, running, function.cores_held) == (0, 0, 0)
    await runtime.stop()


async def test_the_call_with_the_least_work_left_runs_first() -> None:
    def queued(order: Order) -> list[str]:
        runtime = Runtime([], Telemetry(), discipline=Discipline(order))
        test = RegisteredFunction(
            reward_pb.FunctionSpec(name="test", kind="tool", timeout_seconds=9)
        )
        score = RegisteredFunction(
            reward_pb.FunctionSpec(name="score", kind="reward", timeout_seconds=9)
        )
        for name, function, seconds in (("b", test, 5.0), ("c", test, 1.0), ("d", score, 5.0)):
            call = FunctionCall("{}", "job", f"trajectory {name}", expected_seconds=seconds)
            runtime.submit([(name, call)], function)
        return [
            waiting.invocation_id
            for waiting in runtime.dispatcher.queues.first(9, Budget({}, 0), lambda _: 9)
        ]

    assert queued(FCFS) == ["b", "c", "d"]
    # Nothing follows a reward; as much again is expected to follow tests, of a job that is new.
    assert queued(SHORTEST) == ["c", "d", "b"]


async def test_jobs_have_their_turns_whatever_their_order() -> None:
    runtime = Runtime([], Telemetry())
    function = RegisteredFunction(reward_pb.FunctionSpec(name="test", timeout_seconds=9))
    for name, job, seconds in (("a", "long", 9.0), ("b", "long", 9.0), ("c", "short", 0.1)):
        runtime.submit([(name, FunctionCall("{}", job, name, expected_seconds=seconds))], function)
    queued = runtime.dispatcher.queues.first(9, Budget({}, 0), lambda _: 9)
    first = [w.invocation_id for w in queued]
    assert first in (["a", "c", "b"], ["c", "a", "b"])


def test_an_action_is_described_again_only_after_new_measurements() -> None:
    function = RegisteredFunction(
        reward_pb.FunctionSpec(name="test", cores=1, max_cores=4, parallel_fraction=0.9)
    )
    done: asyncio.Future[reward_pb.InvokeResponse] = asyncio.Future(loop=asyncio.new_event_loop())
    told = PendingInvocation(
        "a", function, FunctionCall("{}", estimated_seconds=8.0), done, 0.0, (0.0, 0)
    )
    seen = told.action(8)
    assert told.action(8) is seen
    assert seen.elastic is not None
    assert seen.elastic.seconds[0] == pytest.approx(8.0)
    assert told.action(0).elastic is None
    function.curve = function.curve.observed(1, 2.0)
    assert told.action(8) is not seen


def test_one_call_of_a_function_explores_at_a_time() -> None:
    function = RegisteredFunction(
        reward_pb.FunctionSpec(name="test", cores=1, max_cores=8, parallel_fraction=0.9)
    )
    function.curve = function.curve.observed(8, 2.0)
    dispatcher = Runtime([], Telemetry()).dispatcher
    loop = asyncio.new_event_loop()
    calls = [
        PendingInvocation(
            f"{nth}", function, FunctionCall("{}"), loop.create_future(), 0.0, (0.0, nth)
        )
        for nth in range(64)
    ]

    def exploring() -> list[str]:
        found = []
        for one in calls:
            elastic = dispatcher.action(one, 8).elastic
            assert elastic is not None
            if len(elastic.levels) < 8:
                found.append(one.invocation_id)
        return found

    (first,) = exploring()
    assert exploring() == [first]
    function.curve = function.curve.observed(8, 2.0)  # others have ended meanwhile
    assert exploring() == [first]
    done = next(one for one in calls if one.invocation_id == first)
    done.done.cancel()  # it is not wanted any more, and has said nothing
    calls.remove(done)
    function.curve = function.curve.observed(8, 2.0)
    (second,) = exploring()
    assert second != first
    function.curve = function.curve.observed(1, 12.0)
    assert exploring() == []
    loop.close()


async def test_a_chunk_of_calls_fits_in_one_message() -> None:
    class Counting(FragilePlace):
        given: list[int] = []  # noqa: RUF012

        async def run_many(
            self,
            function: RegisteredFunction,
            calls: Sequence[FunctionCall],
            lease: CoreLease | None = None,
        ) -> AsyncGenerator[tuple[int, CallOutcome]]:
            self.given.append(sum(len(call.arguments_json) for call in calls))
            for index, _ in enumerate(calls):
                yield index, CallOutcome("1", 1e-5)

    runtime = Runtime([FunctionHost("", [Counting("place", random.Random(0))])], Telemetry())
    function = RegisteredFunction(
        reward_pb.FunctionSpec(name="reward", kind="reward", timeout_seconds=9)
    )
    for size, most in ((1 << 10, 64), (1 << 20, 4), (9 << 20, 1)):
        text = "x" * size
        (first,) = runtime.submit([(f"{size}", FunctionCall("{}"))], function)
        await first
        Counting.given.clear()
        await asyncio.gather(
            *runtime.submit([(f"{size}-{i}", FunctionCall(text)) for i in range(64)], function)
        )
        assert max(Counting.given) <= max(size, 4 << 20)
        assert max(Counting.given) == size * most, "as many as fit"
    await runtime.stop()


class WarmPlace(BarePlace):
    """Runs a call for as many seconds as its arguments say."""

    warm = True

    async def run_many(
        self,
        function: RegisteredFunction,
        calls: Sequence[FunctionCall],
        lease: CoreLease | None = None,
    ) -> AsyncGenerator[tuple[int, CallOutcome]]:
        for index, call in enumerate(calls):
            await asyncio.sleep(float(call.arguments_json))
            yield index, CallOutcome("1", 1e-3)


def _host(
    name: str, places: int, cores: int = 0, judges: int = 0, memory_mib: int = 1000
) -> FunctionHost:
    placement = ModelPlacement(1, [Model("judge", 1, concurrency=judges)]) if judges else None
    return FunctionHost(
        name,
        [WarmPlace(f"{name}/{nth}") for nth in range(places)],
        CoreCount(cores) if cores else None,
        resources=HostResources({MEMORY: memory_mib}, placement),
    )


@pytest.mark.parametrize("order", [FCFS, SHORTEST])
@pytest.mark.parametrize(
    ("needs", "hosts"),
    [
        ({"model_service": "judge"}, [("cpu", 4)]),
        ({"model_service": "judge"}, [("gpu", 2, 0, 2), ("cpu", 4)]),
        ({"model_service": "judge"}, [("", 8, 0, 2)]),
        ({"memory_mib": 2000}, [("cpu", 4)]),
        ({"memory_mib": 2000}, [("big", 1, 0, 0, 2000), ("cpu", 4)]),
        ({"cores": 8}, [("cpu", 4, 4)]),
        ({"cores": 8}, [("big", 1, 8), ("cpu", 4, 4)]),
        ({"cores": 8, "max_cores": 16}, [("cpu", 4, 4)]),
        ({"sandbox": "bubblewrap", "stateful": True}, [("", 1), ("cpu", 4)]),
    ],
)
async def test_calls_without_a_host_do_not_hold_up_others(
    order: Order, needs: dict[str, Any], hosts: list[tuple[Any, ...]]
) -> None:
    runtime = Runtime([_host(*one) for one in hosts], Telemetry(), discipline=Discipline(order))
    await runtime.dispatcher.start()
    wide = RegisteredFunction(reward_pb.FunctionSpec(name="wide", timeout_seconds=60, **needs))
    plain = RegisteredFunction(reward_pb.FunctionSpec(name="plain", timeout_seconds=60))
    for nth in range(40):
        executor = WarmPlace(f"sandbox {nth}") if wide.own_sandbox else None
        runtime.submit([(f"w{nth}", FunctionCall("60", "job"))], wide, executor)
    calls = [(f"p{nth}", FunctionCall("0", job)) for nth, job in enumerate(["job", "other"] * 20)]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*runtime.submit(calls, plain))
    await runtime.stop()


async def test_a_large_call_is_not_overtaken_for_ever() -> None:
    runtime = Runtime([_host("big", 4, 0, 4, 4000)], Telemetry(), discipline=Discipline(FCFS))
    await runtime.dispatcher.start()
    spec = reward_pb.FunctionSpec(
        name="wide", timeout_seconds=60, memory_mib=4000, model_service="judge"
    )
    small = RegisteredFunction(
        reward_pb.FunctionSpec(name="small", timeout_seconds=60, memory_mib=1000)
    )
    ended: list[str] = []

    def submit(name: str, function: RegisteredFunction) -> asyncio.Future[reward_pb.InvokeResponse]:
        (done,) = runtime.submit([(name, FunctionCall("0.01", "job"))], function)
        done.add_done_callback(lambda _: ended.append(name))
        return done

    first = [submit(f"before {nth}", small) for nth in range(4)]
    calls = [submit("wide", RegisteredFunction(spec))]
    calls += [submit(f"after {nth}", small) for nth in range(40)]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*first, *calls)
    assert ended.index("wide") == 4
    await runtime.stop()
