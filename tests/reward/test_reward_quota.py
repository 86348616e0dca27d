"""Quotas that services share: the script in Redis is the arithmetic of `TokenBucket`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.reward.quota import QUOTA, LocalBuckets, QuotaManager, RedisBuckets
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE, until
from troupe.rpc import InvalidArgument, Unavailable, new_id
from troupe.scheduling.elastic.quota import QuotaGrant, QuotaLimits, TokenBucket

API = QUOTA + "api"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


STEPS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["ask", "give_back", "shut"]),
        st.lists(st.integers(1, 3), max_size=4),
        st.floats(0, 3),
    ),
    max_size=12,
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS, st.sampled_from([0.0, 0.5, 4.0]), st.integers(3, 5), st.sampled_from([0, 3, 4]))
def test_redis_answers_as_the_bucket_does(
    redis: RedisServer,
    steps: list[tuple[str, str, list[int], float]],
    rate: float,
    burst: int,
    concurrency: int,
) -> None:
    limits = QuotaLimits(rate, burst, concurrency)
    name, patience, begin = new_id(), 5.0, 1000.0
    bucket = TokenBucket(limits, begin)

    async def compare() -> None:
        theirs = {who: RedisBuckets(redis.url, {name: limits}, who) for who in "abc"}
        now = begin
        for who, what, wishes, pause in steps:
            now += pause
            if what == "ask":
                mine = bucket.ask(who, wishes, now, patience)
                granted, wait = await theirs[who]._run(name, what, patience, *wishes, now=now)
                seconds = float(wait) if float(wait) >= 0 else math.inf
                assert int(granted) == mine.granted
                assert seconds == pytest.approx(mine.wait, abs=1e-6)
            elif what == "give_back":
                units = sum(wishes) or 1
                bucket.give_back(who, units, now, unused=units - 1)
                await theirs[who]._run(name, what, 0, units, units - 1, now=now)
            else:
                bucket.shut(now + pause, now)
                await theirs[who]._run(name, what, 0, pause, now=now)
        for one in theirs.values():
            await one.close()

    asyncio.run(compare())


class Service:
    """A quota manager and its waiting calls, as in the runtime."""

    def __init__(self, buckets: LocalBuckets | RedisBuckets, limits: QuotaLimits) -> None:
        self.queue: list[int] = []
        self.begun: list[float] = []
        self.changed = asyncio.Event()
        self.manager = QuotaManager({"api": limits}, buckets, self.dispatch)

    def dispatch(self) -> None:
        while self.queue and self.manager.free()[API] >= self.queue[0]:
            self.manager.take({API: self.queue.pop(0)})
            self.begun.append(time.monotonic())
        self.manager.wish({API: self.queue})
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.begun) < count:
                await self.changed.wait()
                self.changed.clear()


@pytest_asyncio.fixture(params=["process", "redis"])
async def services(
    request: pytest.FixtureRequest, redis: RedisServer
) -> AsyncIterator[list[Service]]:
    """One service alone, or two that share a Redis."""
    limits = {"api": QuotaLimits(rate=50.0, burst=4, concurrency=3)}
    name = new_id()
    if request.param == "process":
        made = [Service(LocalBuckets(limits), limits["api"])]
    else:
        buckets = [RedisBuckets(redis.url, limits, f"{name}-{i}") for i in range(2)]
        await buckets[0]._redis.call("FLUSHDB")
        made = [Service(each, limits["api"]) for each in buckets]
    yield made
    for service in made:
        await service.manager.stop()


async def test_calls_at_once_and_per_second_are_bounded_for_all_together(
    services: list[Service],
) -> None:
    each = 24 // len(services)
    for service in services:
        service.queue = [1] * each
        service.dispatch()
    most = 0
    async with asyncio.timeout(PATIENCE):
        while any(len(service.begun) < each for service in services):
            await asyncio.sleep(0.01)
            running = [len(s.begun) - getattr(s, "ended", 0) for s in services]
            most = max(most, sum(running))
            for service, count in zip(services, running, strict=True):
                service.ended = getattr(service, "ended", 0) + count  # type: ignore[attr-defined]
                for _ in range(count):
                    service.manager.give_back({API: 1})
    assert 1 <= most <= 3
    begun = sorted(moment for service in services for moment in service.begun)
    # 24 calls: a burst of 4, then 50 a second.
    assert begun[-1] - begun[0] >= (24 - 4) / 50 - 0.05


@pytest.mark.slow
async def test_a_refused_call_shuts_the_quota_for_all_services(services: list[Service]) -> None:
    first, last = services[0], services[-1]
    first.queue = [1]
    first.dispatch()
    await first.until(1)
    shut = time.monotonic()
    first.manager.shut({API: 1}, 0.4)
    first.manager.give_back({API: 1})
    # Redis knows before the other asks.
    await until(lambda: not first.manager._feeds["api"]._to_shut)
    last.queue = [1]
    last.dispatch()
    assert "takes no calls" in first.manager.why({API: 1})
    await last.until(len(last.begun) + 1)
    assert last.begun[-1] - shut >= 0.39


async def test_fetched_units_without_a_waiting_call_are_returned(services: list[Service]) -> None:
    first, last = services[0], services[-1]
    # Wished, fetched, and by then its caller has left.
    first.manager.wish({API: [3]})
    await until(lambda: first.manager.free()[API] == 3)
    await until(lambda: first.manager.free()[API] == 0)
    last.queue = [3]
    last.dispatch()
    await last.until(1)


async def test_a_call_that_could_never_begin_is_refused(services: list[Service]) -> None:
    manager = services[0].manager
    with pytest.raises(InvalidArgument, match="between 1 and 3"):
        manager.check("api", 4)
    with pytest.raises(InvalidArgument, match="declared: api"):
        manager.check("other", 1)


async def test_a_redis_that_is_away_is_said_and_waited_for(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    limits = QuotaLimits(concurrency=2)
    buckets = RedisBuckets(server.url, {"api": limits}, "a")
    with pytest.raises(Unavailable, match="does not answer"):
        await buckets.give_back("api", 1)
    service = Service(buckets, limits)
    service.queue = [1]
    service.dispatch()
    await until(lambda: "does not answer" in service.manager.why({API: 1}))
    server.start()
    try:
        await service.until(1)
    finally:
        await service.manager.stop()
        server.kill()


def test_a_clock_that_is_set_back_holds_nothing_up(redis: RedisServer) -> None:
    limits = QuotaLimits(rate=1.0, burst=2, concurrency=2)
    name, late, early = new_id(), 10_000.0, 10_000.0 - 3600

    async def play() -> None:
        one, two = (RedisBuckets(redis.url, {name: limits}, who) for who in "ab")
        assert int((await one._run(name, "ask", 5.0, 1, 1, now=late))[0]) == 2
        # `a` died with both units, and the clock was set back an hour: its hold ends after its
        # patience, and tokens flow as if the clock had gone on.
        granted, wait = await two._run(name, "ask", 5.0, 1, now=early)
        assert (int(granted), float(wait)) == (0, pytest.approx(1.0))
        assert int((await two._run(name, "ask", 5.0, 1, now=early + 4))[0]) == 0
        assert int((await two._run(name, "ask", 5.0, 1, now=early + 5))[0]) == 1
        # The same of a limit that the interface outside set.
        await one._run(name, "shut", 0, 30.0, now=early + 6)
        granted, wait = await one._run(name, "ask", 5.0, 1, now=early - 3594)
        assert (int(granted), float(wait)) == (0, pytest.approx(31.0))
        await one.close()
        await two.close()

    asyncio.run(play())


def test_answers_of_the_bucket_are_values() -> None:
    assert TokenBucket(QuotaLimits(), 0.0).ask("a", [1], 0.0, 1.0) == QuotaGrant(1, 0.0)
