"""A conversation's tokens are stored once, stay while a sample needs them, and no longer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
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

from services.experience_store import claims
from services.experience_store.database import Database
from services.experience_store.records import NEEDED, PolicyKeys, SampleRecord
from services.experience_store.server import check_append
from services.experience_store.store import Store
from services.trainer.claims import RecentClaims
from tests.experience_store.test_store_high_water import counted, held
from tests.support.conversations import (
    Conversation,
    Said,
    assert_same_ids,
    assert_same_tokens,
    cumulative,
)
from tests.support.experience import Response, Stage, ids_of, make_stage
from troupe import prefixes
from troupe.rpc import FailedPrecondition, InvalidArgument, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

T = TypeVar("T")
POLICIES = ("checker", "solver")


async def payloads_of(stage: Stage, policy: str = "solver") -> set[tuple[str, int]]:
    """Return (key of rows, turn) of every payload in Redis."""
    pattern = f"{PolicyKeys(stage.job, policy).base}:*:rows:*".replace("{", "\\{")
    found = set()
    for key in await stage.store.database.call("KEYS", pattern):
        rows = await stage.store.database.call("HGETALL", key)
        needed = rows.pop(NEEDED.encode(), b"").decode()
        turns = {int(name) for name in rows if b"\t" not in name}
        # Only existing rows are counted.
        numbers = dict(one.split("=") for one in needed.split(",")[1:])
        assert turns >= set(map(int, numbers))
        assert all(int(number) > 1 for number in numbers.values())
        found |= {(key.decode(), turn) for turn in turns}
    return found


async def needed_of(stage: Stage, policy: str = "solver") -> set[tuple[str, int]]:
    """(key of rows, turn) of every payload that a sample needs which can still be trained."""
    keys, found = PolicyKeys(stage.job, policy), set()
    for book in await stage.store.database.call("KEYS", f"{keys.base}:*:book".replace("{", "\\{")):
        step = int(book.decode().split(":")[-2])
        committed = await stage.store.database.call("HEXISTS", keys.commits, step)
        texts = {} if committed else await stage.store.database.call("HGETALL", book)
        for text in texts.values():
            record = SampleRecord.parse(text.decode())
            if record.state in "PRC":
                for turn in [*record.ancestor_turns(), int(record.turn)]:
                    found.add((keys.rows(step, record.rows), turn))
        leaving = await stage.store.database.call("HGETALL", keys.step(step, "leaving"))
        for name, text in leaving.items():
            if name.startswith(b"\t"):
                continue
            record = SampleRecord.parse(text.decode())
            # Not renamed yet: in its first step it is stored under its trajectory's own name.
            origin = "" if record.origin == str(step) else record.origin
            rows = keys.rows(step, record._replace(origin=origin).rows)
            found |= {(rows, turn) for turn in [*record.ancestor_turns(), int(record.turn)]}
    return found


def restored(response: Response) -> list[store_pb.Sample]:
    """Return the whole samples of a claim."""
    return [item.sample for item in prefixes.restore(response.samples, response.stems)]


async def test_a_claim_brings_the_stems_of_its_samples(stage: Stage) -> None:
    made = cumulative("q0", "q0-s0-t0", 5)
    await stage.append("q0", "q0-s0-t0", made.samples)
    await stage.fail("q0", "q0-s0-t1")
    first = await stage.claim("a", claim="c1", samples=2)
    assert (ids_of(first), list(first.stems)) == (["q0_0_q0-s0-t0", "q0_1_q0-s0-t0"], [])
    assert_same_tokens(restored(first), made.whole)
    # Another claimant gets the rows that the first one holds.
    second = await stage.claim("b", claim="c2", samples=2)
    assert [one.turn for one in second.stems] == [0, 1]
    assert_same_tokens(restored(second), made.whole)
    # The first one does not get it if it reports that it still has it.
    await stage.release("b")
    third = await stage.claim("a", claim="c3", samples=3, known=["c1"])
    assert list(third.stems) == []
    recent = RecentClaims()
    recent.complete(first)
    recent.complete(third)
    assert_same_tokens(restored(third), made.whole)
    again = await stage.claim("a", claim="c3", samples=3)
    assert [one.turn for one in again.stems] == [0, 1], "it may have lost its memory"


async def test_a_restarted_store_reads_stems_from_redis(stage: Stage, redis_url: str) -> None:
    made = cumulative("q0", "q0-s0-t0", 4)
    await stage.append("q0", "q0-s0-t0", made.samples)
    await stage.fail("q0", "q0-s0-t1")
    stage.store = Store(Database(redis_url), keep_steps=2)
    try:
        await stage.claim("a", samples=3)
        claim = await stage.claim("b", samples=1)
        assert [one.turn for one in claim.stems] == [0, 1, 2]
        assert_same_tokens(restored(claim), made.whole)
        listed, _ = await stage.store.samples.page(stage.job, "solver", None, None, 10, "")
        assert len(listed) == 4
        assert_same_tokens(listed, made.whole)
    finally:
        await stage.store.database.close()


async def test_dropped_samples_stay_while_others_begin_with_them(stage: Stage) -> None:
    made = cumulative("q0", "q0-s0-t0", 4, reward=None)
    await stage.append("q0", "q0-s0-t0", made.samples)
    names = [sample.sample_id for sample in made.samples]
    for dropped in names[1], names[0], names[2]:
        await stage.fill(dropped, drop_reason="reward_timeout: 1 s")
        assert {turn for _, turn in await payloads_of(stage)} == {0, 1, 2, 3}
        assert await counted(stage) == await held(stage)
    await stage.fill(names[3], reward=1.0)
    await stage.fail("q0", "q0-s0-t1")
    claim = await stage.claim(claim="c1", samples=1)
    assert ids_of(claim) == names[3:]
    assert_same_tokens(restored(claim), made.whole)
    # The last sample that needs them frees them all.
    await stage.store.claims.drop_gone(stage.job, "solver", 0, "trainer", "c1", [names[3]])
    assert await payloads_of(stage) == set()
    assert set((await counted(stage)).values()) == {0}


async def test_agents_of_another_policy_share_nothing(stage: Stage) -> None:
    made = Conversation("q0", "q0-s0-t0")
    for turn, policy in enumerate(["solver", "checker", "solver", "checker"]):
        made.say(Said(turn - 1 if turn else None, 0, 40, 40, policy=policy))
    await stage.append("q0", "q0-s0-t0", made.samples)
    await stage.fail("q0", "q0-s0-t1")
    # Each policy's first turn is whole, though the other's is its beginning.
    assert [sample.HasField("stem") for sample in made.samples] == [False, False, True, True]
    for policy in POLICIES:
        claim = await stage.claim(policy=policy, samples=2)
        assert [item.sample.policy for item in claim.samples] == [policy] * 2
        assert_same_tokens(restored(claim), made.whole)


async def test_a_stem_that_names_no_earlier_sample_is_refused() -> None:
    made = cumulative("q", "t", 3)
    request = store_pb.AppendTrajectoryRequest(
        query_id="q", trajectory_id="t", state=common_pb.TRAJECTORY_STATE_COMPLETED
    )

    def check(samples: list[store_pb.Sample]) -> None:
        check_append(request, [sample.SerializeToString() for sample in samples])

    check(made.samples)
    for wrong in (made.samples[1:], made.samples[::-1]):
        with pytest.raises(InvalidArgument, match="earlier sample of the same policy"):
            check(wrong)
    made.samples[1].stem.tokens = 81
    with pytest.raises(InvalidArgument, match="turn 0 has 80 tokens") as caught:
        check(made.samples)
    assert caught.value.field == "samples[1].stem.tokens"
    made.samples[1].stem.tokens = 40
    made.samples[2].policy = "other"
    with pytest.raises(InvalidArgument, match="same policy"):
        check(made.samples)


async def test_claims_are_bounded_with_the_stems_that_they_may_bring(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "CLAIM_BYTES", 32_000)
    stage = await make_stage(store, new_id("job"), policies=("solver",), queries=("q0",))
    for _, trajectory in stage.trajectories:
        made = cumulative("q0", trajectory, 3, new=2000, reply=10)
        await stage.append("q0", trajectory, made.samples)
    # 8 KB each: turn 2 alone may need all three turns of its trajectory.
    sizes = []
    while (claim := await stage.claim(samples=6)).outcome == Response.OUTCOME_CLAIMED:
        sizes.append(claim.ByteSize())
    assert len(sizes) > 1
    assert max(sizes) < 32_000


class Conversations(RuleBasedStateMachine):
    """Calls in any order, on trees of turns of two policies, over steps with reused samples."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.database = Database(self.url)
        self.store = Store(self.database, keep_steps=2)
        self.whole: dict[str, store_pb.Sample] = {}
        self.at: dict[str, int] = {}
        self.ended: set[str] = set()
        self.claims: dict[str, tuple[str, str, list[str]]] = {}
        self.recent: dict[tuple[str, str], RecentClaims] = {}
        self.numbers = itertools.count()
        self.versions = dict.fromkeys(POLICIES, 0)

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            assert list(self.do(self.store.audit.check(self.stage.job)).violations) == []
            self.do(self.store.tables.drop(self.stage.job, purge_log=True))
        self.do(self.database.close())
        self.runner.close()

    @initialize(max_uses=st.integers(1, 3), clustered=st.booleans(), memory=st.booleans())
    def begin(self, max_uses: int, clustered: bool, memory: bool) -> None:
        self.database.clustered = clustered
        if not memory:
            self.store.recent._limit = 0
        self.stage = Stage(self.store, new_id("job"), POLICIES, (), 2)
        self.do(self.store.tables.create(self.stage.job, POLICIES, [], max_uses=max_uses))
        self.do(self.open(0))
        self.do(self.open(1))
        self.stage.step = 0

    async def open(self, step: int) -> None:
        queries = [f"s{step}q0", f"s{step}q1"]
        await self.stage.open(step, 0, held_open=True, queries=queries)
        self.at |= dict.fromkeys(queries, step)

    def live(self, policy: str, states: str) -> list[str]:
        book = PolicyKeys(self.stage.job, policy).step(self.stage.step, "book")
        texts = self.do(self.database.call("HGETALL", book))
        return sorted(name.decode() for name, t in texts.items() if t.decode()[0] in states)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        actions = ["append"] * 4 + ["fill", "drop"] * 2 + ["claim"] * 4
        actions += ["release", "drop_gone", "leave", "finish"]
        getattr(self, data.draw(st.sampled_from(actions), "action"))(data)

    def append(self, data: st.DataObject) -> None:
        places = [
            (query, f"{query}-t{number}")
            for query, step in self.at.items()
            for number in range(2)
            if step == self.stage.step and f"{query}-t{number}" not in self.ended
        ]
        if not places:
            return
        query, trajectory = data.draw(st.sampled_from(places))
        made = Conversation(query, trajectory)
        for turn in range(data.draw(st.integers(0, 5))):
            parents = [None, *range(turn)] if turn else [None]
            said = Said(
                data.draw(st.sampled_from([*parents, *parents[-1:] * 3])),
                data.draw(st.sampled_from([0, 0, 0, 1, 45])),
                data.draw(st.sampled_from([1, 40])),
                data.draw(st.sampled_from([1, 40])),
                data.draw(st.sampled_from(["solver", "solver", "checker"])),
                data.draw(st.sampled_from([None, 1.0])),
            )
            made.say(said)
        self.ended.add(trajectory)
        if self.do(self.stage.append(query, trajectory, made.samples)):
            self.whole |= made.whole

    def fill(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(POLICIES))
        if names := self.live(policy, "P"):
            column = store_pb.Column(json='"late"')
            columns = data.draw(st.sampled_from([{}, {"judge": column}]))
            name = data.draw(st.sampled_from(names))
            self.do(self.stage.fill(name, policy=policy, reward=0.5, columns=columns))

    def drop(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(POLICIES))
        if names := self.live(policy, "P"):
            name = data.draw(st.sampled_from(names))
            self.do(self.stage.fill(name, policy=policy, drop_reason="late: 1 s"))

    def claim(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(POLICIES))
        claimant = data.draw(st.sampled_from(["alice", "bob"]))
        self.claim_as(policy, claimant, data.draw(st.integers(1, 4)), data.draw(st.booleans()))

    def claim_as(self, policy: str, claimant: str, size: int, remembers: bool = True) -> bool:
        name = f"c{next(self.numbers)}"
        recent = self.recent.setdefault((policy, claimant), RecentClaims())
        known = recent.claim_ids if remembers else []
        try:
            call = self.stage.claim(claimant, claim=name, policy=policy, samples=size, known=known)
            response = self.do(call)
        except FailedPrecondition:
            return False
        if response.outcome != Response.OUTCOME_CLAIMED:
            return False
        names = ids_of(response)
        assert not {one.sample_id for one in response.stems} & set(names), "no token twice"
        recent.complete(response)
        for sample in restored(response):
            assert sample.policy == policy
            assert_same_ids(sample, self.whole[sample.sample_id])
        self.claims[name] = policy, claimant, names
        return True

    def release(self, data: st.DataObject) -> None:
        policy = data.draw(st.sampled_from(POLICIES))
        self.do(self.stage.release(data.draw(st.sampled_from(["alice", "bob"])), policy=policy))

    def drop_gone(self, data: st.DataObject) -> None:
        if not self.claims:
            return
        name = data.draw(st.sampled_from(sorted(self.claims)))
        policy, claimant, names = self.claims[name]
        gone = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
        job, step = self.stage.job, self.stage.step
        with contextlib.suppress(FailedPrecondition):
            self.do(self.store.claims.drop_gone(job, policy, step, claimant, name, gone))

    def leave(self, data: st.DataObject) -> None:
        """Remove a query from its step: for good, or to the next step with its rows."""
        query = data.draw(st.sampled_from(sorted(self.at)))
        if self.at[query] != self.stage.step:
            return
        if data.draw(st.booleans()):
            if not self.do(self.stage.amend(drop=[query], reason="slow")):
                del self.at[query]
        elif not self.do(self.stage.amend(carry=[query], carry_to=self.stage.step + 1)):
            self.at[query] += 1
        self.do(self.stage.counts())

    def finish(self, data: st.DataObject) -> None:
        """Commit the step; the next one begins with the reused samples."""
        stage, step = self.stage, self.stage.step
        for query in [query for query, at in self.at.items() if at == step]:
            for number in range(2):
                if f"{query}-t{number}" not in self.ended:
                    self.do(stage.fail(query, f"{query}-t{number}"))
            del self.at[query]
        self.do(stage.amend(close=True))
        outcome = store_pb.STEP_OUTCOME_APPLIED
        if data.draw(st.integers(0, 3)) == 0:
            outcome = store_pb.STEP_OUTCOME_SKIPPED
        for policy in POLICIES:
            for name in self.live(policy, "P"):
                self.do(stage.fill(name, policy=policy, reward=0.0))
            self.do(stage.release("", policy=policy))
            number = next(self.numbers)
            made_of = []
            while self.claim_as(policy, f"carol{number}", 3):
                made_of.append(f"c{next(self.numbers) - 1}")
            made = outcome if made_of else store_pb.STEP_OUTCOME_EMPTY
            self.versions[policy] += made == store_pb.STEP_OUTCOME_APPLIED
            version = self.versions[policy]
            self.do(
                stage.commit(
                    made_of, f"carol{number}", policy=policy, version=version, outcome=made
                )
            )
        self.claims.clear()
        self.recent.clear()
        self.do(self.open(step + 2))
        stage.step = step + 1
        self.do(stage.counts())

    @invariant()
    def payloads_are_those_that_are_needed(self) -> None:
        if not hasattr(self, "stage"):
            return
        for policy in POLICIES:
            assert self.do(payloads_of(self.stage, policy)) == self.do(
                needed_of(self.stage, policy)
            )
        assert self.do(counted(self.stage)) == self.do(held(self.stage))


@pytest.mark.parametrize("examples", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_tokens_stay_exactly_as_long_as_they_are_needed(redis_url: str, examples: int) -> None:
    Conversations.url = redis_url
    run_state_machine_as_test(
        Conversations,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
