"""Replies to claims contain stored rows unparsed; rows appended here are not read back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.experience_store.claims import Delivery, Response
from services.experience_store.database import Database
from services.experience_store.records import SampleRecord
from services.experience_store.samples import RecentRows
from services.experience_store.store import Store
from tests.support.experience import Stage, make_sample, make_stage
from troupe.rpc import new_id
from troupe.rpc.protobuf_wire import varint
from troupe.v1 import experience_store_pb2 as store_pb

_RECORD = SampleRecord(
    state="C",
    spread="",
    stem="",
    tokens="8",
    size="0",
    turn="1",
    reward="",
    missing="",
    early="",
    late="",
    query="q",
    trajectory="t",
    agent="solver",
    group="q/solver",
    reason="",
    version="0",
    uses="0",
    since="5",
    origin="",
)
_rewards = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.none() | _rewards, st.integers(0, 3), st.booleans()),
        max_size=5,
    ),
    st.lists(st.lists(_rewards, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_delivered_bytes_equal_the_serialized_message(
    rows: list[tuple[int, float | None, int, bool]], rewards: list[list[float]], data: st.DataObject
) -> None:
    made, wanted = [], Response(outcome=Response.OUTCOME_CLAIMED, claim_id="c")
    for turn, (tokens, reward, uses, returned) in enumerate(rows):
        payload = make_sample("q", turn, "t", reward=None, tokens=tokens).SerializeToString()
        record = _RECORD._replace(
            reward="" if reward is None else repr(reward),
            uses=str(uses),
            origin="3" if returned else "",
        )
        group = data.draw(st.integers(0, len(rewards) - 1))
        made.append((payload, record, group))
        item = wanted.samples.add(group_rewards=rewards[group])
        item.sample.CopyFrom(record.read(payload))
    delivery = Delivery.claimed("c", made, rewards)
    assert Response.FromString(delivery.message) == wanted
    assert delivery.samples == len(rows)
    assert delivery.outcome == Response.OUTCOME_CLAIMED


@given(st.integers(0, 2**40))
def test_lengths_are_written_as_protobuf_writes_them(number: int) -> None:
    sample = store_pb.OpenStepRequest(step=number)
    assert (sample.SerializeToString()[1:] or b"\0") == varint(number)


def test_recent_rows_are_bounded_and_leave_once() -> None:
    rows = RecentRows(limit=10)
    rows.add("j", "p", "1", [("a", b"12345"), ("b", b"12345")])
    rows.add("j", "p", "2", [("a", b"123")])
    assert rows.bytes == 8
    old, new = _RECORD._replace(since="1"), _RECORD._replace(since="2")
    assert rows.take("j", "p", [("a", old), ("b", old)]) == {"b": b"12345"}
    assert rows.take("j", "q", [("a", new)]) == {}
    # A late column is only in Redis.
    assert rows.take("j", "p", [("a", new._replace(late="score"))]) == {}
    assert (rows.bytes, rows.found) == (0, 1)
    rows.add("j", "p", "1", [("a", b"1"), ("a", b"12")])
    rows.add("k", "p", "1", [("a", b"123")])
    assert rows.bytes == 5
    rows.forget("j")
    assert rows.bytes == 3
    # Rows of one message keep the whole message until the last of them is gone.
    message = memoryview(b"12" + b"....")
    rows.add("j", "p", "1", [("a", message[:1]), ("b", message[1:2])])
    assert rows.bytes == 3 + 6
    assert rows.take("j", "p", [("a", old)]) == {"a": b"1"}
    assert rows.bytes == 3 + 6
    rows.add("k", "p", "2", [("a", b"1234")])
    assert rows.bytes == 4 + 6
    rows.add("k", "p", "3", [("a", b"1")])
    assert rows.bytes == 5
    short = RecentRows(100 * 1024)
    short.add("j", "p", "1", [(f"s{number}", b"1") for number in range(150)])
    assert short.bytes == 100, "of short rows there are no more than of those of a KiB"
    none = RecentRows(0)
    none.add("j", "p", "1", [("a", b"1")])
    assert none.bytes == 0


async def test_rows_appended_in_this_process_are_claimed_without_redis(stage: Stage) -> None:
    await stage.append_all()
    recent = stage.store.recent
    assert recent.bytes > 0
    first = await stage.claim(claim="one")
    assert recent.found == len(first.samples)
    # Again, now from Redis: the same.
    assert await stage.claim(claim="one") == first
    assert recent.found == len(first.samples)


async def test_rows_of_another_process_or_another_ending_are_read_from_redis(stage: Stage) -> None:
    query, trajectory = stage.trajectories[0]
    lost = make_sample(query, 0, trajectory, tokens=64)
    won = make_sample(query, 0, trajectory, tokens=32)
    assert await stage.append(query, trajectory, [won], attempt="won")
    kept = stage.store.recent.bytes
    assert not await stage.append(query, trajectory, [lost], attempt="lost")
    # Neither the losing ending nor the repeated one is kept.
    assert await stage.append(query, trajectory, [lost], attempt="won")
    assert stage.store.recent.bytes == kept
    stage.store.recent.forget(stage.job)
    for query, trajectory in stage.trajectories[1:]:
        await stage.append(query, trajectory)
    claimed = await stage.claim()
    assert {s.sample.sample_id for s in claimed.samples} >= {won.sample_id}
    own = next(s.sample for s in claimed.samples if s.sample.sample_id == won.sample_id)
    assert own.prompt_ids == won.prompt_ids


async def test_a_claim_is_the_same_from_memory_from_redis_and_from_both(redis_url: str) -> None:
    delivered = []
    for limit in (0, 400, 2**20):
        store = Store(Database(redis_url), recent_bytes=limit)
        await store.start()
        stage = await make_stage(store, new_id("job"))
        await stage.append_all()
        assert store.recent.bytes <= limit
        claimed = await stage.claim(claim="same")
        delivered.append(claimed.SerializeToString(deterministic=True))
        found, number = store.recent.found, len(claimed.samples)
        assert {0: found == 0, 400: 0 < found < number}.get(limit, found == number)
        await store.tables.drop(stage.job)
        await store.stop()
    assert len(set(delivered)) == 1
