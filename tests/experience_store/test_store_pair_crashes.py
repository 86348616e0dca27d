"""Whatever dies while sums of joint pairs are exchanged, and whenever: all attempts of all policies
at a step get the same sums, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from services.experience_store.claims import added_up
from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.experience_store.mortal import MortalLife
from tests.experience_store.test_store_pairs import bytes_of, give, given, sums_of
from tests.support.crashing import MOMENTS, CrashError, CrashingDatabase
from tests.support.experience import Response, Stage, make_stage
from tests.support.redis_server import RedisServer
from tests.support.waiting import PATIENCE
from troupe.rpc import FailedPrecondition, Unavailable, new_id
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")
POLICIES = ("checker", "judge", "solver")


async def left_of(stage: Stage) -> list[bytes]:
    """Return the keys of the job's sums."""
    keys: list[bytes] = await stage.store.database.call("KEYS", f"*{stage.job}*pair_sums*")
    return keys


class Exchange(MortalLife):
    """A step in which policies exchange sums, from the first sums to the last commit."""

    def __init__(self, url: str, fatal: int, moment: str, *, rerun: bool) -> None:
        """`rerun`: after a death the trainer begins again, too, and computes other sums."""
        super().__init__(url, 0, moment, POLICIES, ("q0",))
        self._fatal_trip, self._dies, self._rerun = fatal, moment, rerun
        # Round trips of the exchange.
        self.trips = 0

    async def give(self, policy: str) -> store_pb.ExchangePairSumsResponse:
        """Give a policy's sums, which tell by which attempt they were computed."""
        before = self.crashed
        number = POLICIES.index(policy)

        async def attempt() -> store_pb.ExchangePairSumsResponse:
            again = 0.5 * (self.crashed - before) if self._rerun else 0.0
            return await give(self.stage, policy, sums_of(("a", number + again), ("b", -1.0)))

        answer: store_pb.ExchangePairSumsResponse = await self.call(attempt)
        return answer

    async def commit(self, policy: str) -> None:
        stage = self.stage
        claim: Response = await self.call(
            partial(stage.claim, claim=f"claim-{policy}", policy=policy)
        )
        mine = sums_of(("a", 0.0))
        await self.call(partial(stage.commit, [claim.claim_id], policy=policy, sums=mine))

    async def run(self) -> list[store_pb.PairSums]:
        """Return what each policy got: at first, and when asked again after the first commit."""
        stage = self.stage
        await stage.store.tables.create(stage.job, POLICIES, [])
        await stage.open(0)
        await stage.append_all()
        begun = self.database.trips
        if self._fatal_trip:
            self.database.die(self._fatal_trip, self._dies)
        answers = [await self.give(policy) for policy in POLICIES]
        assert [list(one.missing) for one in answers] == [["judge", "solver"], ["solver"], []]
        answers += [await self.call(partial(give, stage, one, None)) for one in POLICIES]
        await self.commit("judge")
        answers += [await self.give(policy) for policy in ("checker", "solver")]
        for policy in ("checker", "solver"):
            await self.commit(policy)
        await self.call(lambda: stage.store.sweeper.sweep())
        self.trips = self.database.trips - begun
        return [one.sums for one in answers if not one.missing]


# Every other pair; the slow test has the other half.
LIVES = [
    pytest.param(moment, rerun, marks=pytest.mark.slow if (i + rerun) % 2 else ())
    for i, moment in enumerate(MOMENTS)
    for rerun in (False, True)
]


@pytest.mark.parametrize(("moment", "rerun"), LIVES)
async def test_a_store_that_dies_at_any_round_trip_of_an_exchange_gives_all_the_same_sums(
    redis_url: str, moment: str, rerun: bool
) -> None:
    quiet = Exchange(redis_url, 0, moment, rerun=rerun)
    expected = await quiet.run()
    assert expected == [expected[0]] * 6
    assert [one.policies for one in expected[0].pairs] == [3, 3]
    await quiet.close()
    for fatal in range(1, quiet.trips + 1):
        life = Exchange(redis_url, fatal, moment, rerun=rerun)
        found = await life.run()
        assert life.crashed == 1, f"trip {fatal} of {quiet.trips}"
        assert found == [found[0]] * 6, fatal
        # Of one attempt of each policy, whichever came first.
        assert rerun or found == expected, fatal
        assert (found[0].pairs[0].chosen - expected[0].pairs[0].chosen) in (0.0, 0.5), fatal
        assert await left_of(life.stage) == [], fatal
        assert await bytes_of(life.stage) == 0, fatal
        await life.stage.store.tables.drop(life.stage.job, purge_log=True)
        await life.close()


async def test_sums_survive_a_sigkill_of_redis_while_others_are_waited_for(
    durable_redis: RedisServer,
) -> None:
    store = Store(Database(durable_redis.url))
    await store.start()
    stage = await make_stage(store, new_id("job"))
    first, second = stage.policies
    waiting = asyncio.create_task(give(stage, first, sums_of(("a", 1.0)), wait=PATIENCE))
    await stage.until_waiting()
    durable_redis.kill()
    # Its caller repeats the call while the store is unreachable.
    with pytest.raises(Unavailable):
        await waiting
    durable_redis.start()
    assert await given(stage) == {first: True, second: False}
    waiting = asyncio.create_task(give(stage, first, sums_of(("a", 7.0)), wait=PATIENCE))
    await stage.until_waiting()
    other = await give(stage, second, sums_of(("a", 2.0)))
    assert await waiting == other
    assert [one.chosen for one in other.sums.pairs] == [3.0]
    durable_redis.kill()
    durable_redis.start()
    assert await give(stage, first, None) == other
    await store.stop()


async def test_sums_that_redis_lost_with_its_last_writes_come_back_with_the_commit(
    tmp_path: Path,
) -> None:
    """Otherwise a trainer that begins again would wait for a policy that gives none any more."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        store = Store(Database(server.url))
        await store.start()
        stage = await make_stage(store, new_id("job"))
        await stage.append_all()
        first, second = stage.policies
        claimed = await stage.claim(policy=second)
        with server.client() as client:
            client.save()
        mine, theirs = sums_of(("a", 1.0)), sums_of(("a", 2.0))
        await give(stage, first, mine)
        agreed = await give(stage, second, theirs)
        assert not agreed.missing
        # Redis comes back as it was before the exchange, as after a late flush.
        server.kill()
        server.start()
        assert await given(stage) == {first: False, second: False}
        await stage.commit([claimed.claim_id], policy=second, sums=theirs)
        await stage.commit([claimed.claim_id], policy=second, sums=sums_of(("a", 9.0)))
        assert await give(stage, first, mine) == agreed
        claimed = await stage.claim(policy=first)
        await stage.commit([claimed.claim_id], policy=first, sums=mine)
        await store.sweeper.sweep()
        assert await left_of(stage) == []
        assert await bytes_of(stage) == 0
        await store.stop()
    finally:
        server.stop()


@dataclass
class Attempt:
    """An attempt of a policy's trainer at the step."""

    claimant: str
    claim: str
    sums: store_pb.PairSums
    expired: bool = False
    """Its leases ran out: it has to begin again."""
    got: store_pb.PairSums | None = None
    """The sums over all policies, once it has them."""


@dataclass
class Learner:
    """A policy in the model: its attempts, of which the last one may be alive, and what counts."""

    attempts: list[Attempt] = field(default_factory=list)
    first: store_pb.PairSums | None = None
    """The sums that it gave first."""
    committed: bool = False

    @property
    def attempt(self) -> Attempt:
        """The newest one."""
        return self.attempts[-1]


class Walk(RuleBasedStateMachine):
    """An exchange of two or three policies in any order of calls, among which trainers begin again,
    suspended ones go on, earlier attempts speak up late, leases run out and stores die."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        # Not started: only the calls below change state.
        self.database = CrashingDatabase(self.url)
        self.store = Store(self.database)
        # Names and values must be the same in every run of an example.
        self.numbers = itertools.count()
        self.agreed: store_pb.PairSums | None = None
        self.swept = False

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    @initialize(policies=st.integers(2, 3))
    def open(self, policies: int) -> None:
        self.learners = {name: Learner() for name in POLICIES[:policies]}
        self.stage = self.do(
            make_stage(
                self.store, new_id("job"), policies=tuple(self.learners), queries=("q0", "q1")
            )
        )
        self.do(self.stage.append_all())

    def teardown(self) -> None:
        self.finish()
        self.do(self.stage.store.tables.drop(self.stage.job, purge_log=True))
        assert self.do(self.database.call("KEYS", f"*{self.stage.job}*")) == []
        self.do(self.database.close())
        self.runner.close()

    def finish(self) -> None:
        """Whatever has happened, the step can be ended, and leaves nothing behind."""
        open_ones = [name for name, one in self.learners.items() if not one.committed]
        for name in open_ones:
            self.begin(name)
            self.exchange(name, self.learners[name].attempt, gives=True)
        for name in open_ones:
            self.exchange(name, self.learners[name].attempt, gives=False)
            self.commit(name)
        self.do(self.stage.store.sweeper.sweep())
        assert self.do(left_of(self.stage)) == []
        assert self.do(bytes_of(self.stage)) == 0
        assert self.do(given(self.stage)) == dict.fromkeys(self.learners, True)
        report = self.do(self.stage.store.audit.check(self.stage.job))
        assert list(report.violations) == []

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Make one of the calls that are possible now, more likely if it is named more often."""
        actions: list[tuple[str, str]] = [("sweep", ""), ("restart", "")]
        for name, one in self.learners.items():
            if not one.committed:
                actions.append(("begin", name))
            if one.attempts:
                actions += [("give", name)] * 3 + [("ask", name), ("die_giving", name)]
            if len(one.attempts) > 1:
                actions.append(("speak_up_late", name))
            if one.attempts and not one.committed:
                actions.append(("expire", name))
                actions += [("commit", name)] * (2 if one.attempt.got else 0)
        if sum(1 for one in self.learners.values() if one.attempts) > 1:
            actions += [("give_together", "")] * 2
        action, name = data.draw(st.sampled_from(actions), "action")
        calls = {
            "give": lambda: self.exchange(name, self.learners[name].attempt, gives=True),
            "ask": lambda: self.exchange(name, self.learners[name].attempt, gives=False),
            "die_giving": lambda: self.die_giving(
                name, data.draw(st.integers(1, 3)), data.draw(st.sampled_from(MOMENTS))
            ),
            "begin": lambda: self.begin(name),
            "speak_up_late": lambda: self.speak_up_late(name),
            "expire": lambda: self.expire(name),
            "commit": lambda: self.commit(name),
            "give_together": self.give_together,
            "sweep": self.sweep,
            "restart": self.restart,
        }
        calls[action]()

    # -- trainers

    def begin(self, name: str) -> None:
        """Begin (again): earlier attempts are superseded."""
        number = next(self.numbers)
        claimant, claim = f"trainer-{number}", f"claim-{number}"
        self.do(self.stage.release("", policy=name))
        response = self.do(self.stage.claim(claimant, claim=claim, policy=name))
        assert len(response.samples) == 4
        # Which attempt it is of shows in every sum that it is part of.
        mine = sums_of(("a", float(2**number)), ("b", 1.0))
        self.learners[name].attempts.append(Attempt(claimant, claim, mine))

    def exchange(self, name: str, attempt: Attempt, *, gives: bool) -> None:
        """Give or ask; the model tells the answer."""
        one = self.learners[name]
        call = give(self.stage, name, attempt.sums if gives else None, claimant=attempt.claimant)
        if one.committed or attempt.expired or attempt is not one.attempt:
            with pytest.raises(FailedPrecondition) as refused:
                self.do(call)
            assert refused.value.kind == "claim_lost"
            return
        if gives:
            one.first = one.first or attempt.sums
        self.check(attempt, self.do(call))

    def check(self, attempt: Attempt, answer: store_pb.ExchangePairSumsResponse) -> None:
        """Compare an answer with the model's; what is agreed once holds for all."""
        assert list(answer.missing) == self.missing
        if answer.missing:
            assert not answer.HasField("sums")
            return
        if self.agreed is None:
            self.agreed = self.sums_of_first()
        assert answer.sums == self.agreed == self.sums_of_first()
        attempt.got = answer.sums

    @property
    def missing(self) -> list[str]:
        return [name for name, one in self.learners.items() if one.first is None]

    def sums_of_first(self) -> store_pb.PairSums:
        firsts: Sequence[Any] = [one.first for one in self.learners.values()]
        return added_up(one.SerializeToString() for one in firsts)

    def give_together(self) -> None:
        """Have the present attempts of all policies give at the same time."""
        live = {
            name: one
            for name, one in self.learners.items()
            if one.attempts and not one.committed and not one.attempt.expired
        }
        calls = [
            give(self.stage, name, one.attempt.sums, claimant=one.attempt.claimant)
            for name, one in live.items()
        ]

        async def together() -> list[store_pb.ExchangePairSumsResponse]:
            return await asyncio.gather(*calls)

        answers = self.do(together())
        for one in live.values():
            one.first = one.first or one.attempt.sums
        for one, answer in zip(live.values(), answers, strict=True):
            # Some may have been asked before others had given theirs.
            assert set(answer.missing) >= set(self.missing)
            if not answer.missing:
                self.check(one.attempt, answer)

    def die_giving(self, name: str, after: int, moment: str) -> None:
        """Have the store die in a call that gives sums; the trainer does not repeat it yet."""
        one = self.learners[name]
        attempt = one.attempt
        self.database.die(after, moment)
        with contextlib.suppress(CrashError, FailedPrecondition):
            self.do(give(self.stage, name, attempt.sums, claimant=attempt.claimant))
        self.restart()
        if one.first is None and self.do(given(self.stage))[name]:
            assert not attempt.expired
            one.first = attempt.sums

    def speak_up_late(self, name: str) -> None:
        """Have an earlier attempt give its sums: a message that was long under way."""
        self.exchange(name, self.learners[name].attempts[-2], gives=True)

    def expire(self, name: str) -> None:
        attempt = self.learners[name].attempt
        leases = f"troupe:{{{self.stage.job}/{name}}}:{self.stage.step}:leases"
        self.do(self.database.call("ZADD", leases, "XX", 0, attempt.claim))
        attempt.expired = True

    def commit(self, name: str) -> None:
        one = self.learners[name]
        call = self.stage.commit(
            [one.attempt.claim], one.attempt.claimant, policy=name, sums=one.attempt.sums
        )
        if one.attempt.expired:
            with pytest.raises(FailedPrecondition) as refused:
                self.do(call)
            assert refused.value.kind == "claim_lost"
            return
        self.do(call)
        one.committed = True

    # -- stores

    def sweep(self) -> None:
        self.do(self.stage.store.sweeper.sweep())
        self.swept = all(one.committed for one in self.learners.values())

    def restart(self) -> None:
        """Let another process serve: it knows what is in Redis."""
        self.do(self.database.close())
        self.database = CrashingDatabase(self.url)
        self.stage.store = Store(self.database)

    @invariant()
    def sums_are_kept_while_they_may_be_asked_for(self) -> None:
        if not hasattr(self, "stage"):
            return
        kept = {key.decode().split("/")[1].split("}")[0] for key in self.do(left_of(self.stage))}
        first = {name for name, one in self.learners.items() if one.first is not None}
        assert kept == (set() if self.swept else first)


def test_all_attempts_get_the_same_sums_in_any_order_of_calls_and_deaths(redis_url: str) -> None:
    Walk.url = redis_url
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
