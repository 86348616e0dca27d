"""Samples that carry each token once are those that they stand for, to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.claims import RecentClaims, refs_of
from services.trainer.learning.samples import column_of
from tests.support.conversations import Conversation, Said, assert_same_tokens, cumulative
from troupe import prefixes
from troupe.job.sections.algorithm import ROUTES_COLUMN
from troupe.rpc import DataLoss
from troupe.tensors import ChecksumError, from_proto, to_proto
from troupe.v1 import experience_store_pb2 as store_pb

_POLICIES = st.sampled_from(["solver", "solver", "checker"])


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    made = Conversation("q", f"t{draw(st.integers(0, 9))}")
    routes: list[Any] = []
    random = np.random.default_rng(draw(st.integers(0, 99)))
    for turn in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([None, *range(turn), *[turn - 1] * 4])) if turn else None
        said = Said(
            parent,
            draw(st.sampled_from([0, 0, 1, 33])),
            draw(st.sampled_from([1, 5, 40])),
            draw(st.sampled_from([1, 40])),
            draw(_POLICIES),
        )
        before = made._tokens[parent] if parent is not None else []
        length = max(0, len(before) - said.cut) + said.new + said.reply - 1
        own = random.integers(0, 8, (length, 2, 3), dtype=np.uint8)
        if parent is not None:
            # An engine that keeps its cache says the same of the beginning; one that does not may
            # differ anywhere.
            same = min(len(routes[parent]), length, draw(st.sampled_from([0, 17, 1000])))
            own[:same] = routes[parent][:same]
        routes.append(own)
        score = np.full(said.reply, turn, np.float32)
        made.say(said, {ROUTES_COLUMN: own, "score": score})
    return made


def claimed(samples: list[store_pb.Sample]) -> list[store_pb.ClaimedSample]:
    return [store_pb.ClaimedSample(sample=sample, group_rewards=[1.0]) for sample in samples]


@given(conversations(), st.data())
def test_whole_samples_come_back_in_any_order_and_number(
    made: Conversation, data: st.DataObject
) -> None:
    samples = data.draw(st.permutations(made.samples))
    some = samples[: data.draw(st.integers(1, len(samples)))]
    stems = prefixes.stems_of(some, {prefixes.key_of(one): one for one in made.samples})
    assert not {one.turn for one in stems} & {one.turn for one in some}
    sent = [one.SerializeToString() for one in some]
    whole = prefixes.restore(claimed(some), stems)
    assert_same_tokens([item.sample for item in whole], made.whole)
    assert sent == [one.SerializeToString() for one in some], "what came is not changed"
    # A micro-batch that is kept is shared again among its own samples.
    kept = prefixes.share(whole)
    assert [one.sample.sample_id for one in kept] == [one.sample_id for one in some]
    assert_same_tokens([one.sample for one in prefixes.restore(kept)], made.whole)
    assert sum(one.ByteSize() for one in kept) <= sum(one.ByteSize() for one in whole)


def test_each_token_and_each_route_is_sent_once() -> None:
    made = Conversation("q", "t")
    routes = np.random.default_rng(0).integers(0, 8, (40 * 20, 2, 3), dtype=np.uint8)
    for turn in range(10):
        own = routes[: 80 * (turn + 1) - 1]
        made.say(Said(turn - 1 if turn else None, 0, 40, 40), {ROUTES_COLUMN: own})
    assert sum(one.prompt_ids.shape[0] for one in made.samples) == 10 * 40
    assert sum(one.response_ids.shape[0] for one in made.samples) == 10 * 40
    shapes = [one.columns[ROUTES_COLUMN].tensor.shape[0] for one in made.samples]
    assert sum(shapes) == 10 * 80 - 1


def test_replies_to_one_prompt_refer_to_the_first_and_not_to_each_other() -> None:
    made = Conversation("q", "t")
    made.say(Said(None, 0, 50, 10))
    for _ in range(3):
        made.say(Said(0, 10, 1, 10))
    assert [one.stem.turn for one in made.samples[1:]] == [0, 0, 0]
    short = Conversation("q", "t")
    short.say(Said(None, 0, 10, 10))
    short.say(Said(0, 0, 10, 10))
    assert not short.samples[1].HasField("stem"), "not worth it"


@pytest.mark.parametrize("large", [{0}, {0, 1, 2}, {1}, {2}, set()])
def test_a_column_is_read_from_references_and_parts_of_messages(large: set[int]) -> None:
    routes = np.random.default_rng(0).integers(0, 8, (240, 2, 3), dtype=np.uint8)
    made, values = Conversation("q", "t"), {}
    for turn in range(3):
        own = routes[: 80 * (turn + 1) - 1]
        sample = made.say(Said(turn - 1 if turn else None, 0, 40, 40), {ROUTES_COLUMN: own})
        column = sample.columns[ROUTES_COLUMN]
        if turn in large:
            values[f"k{turn}"] = from_proto(column.tensor)
            column.ref = f"k{turn}"
    whole = [item.sample for item in prefixes.restore(claimed(made.samples))]
    for turn, sample in enumerate(whole):
        read = column_of(sample, ROUTES_COLUMN, values.__getitem__)
        assert read is not None
        assert np.array_equal(read, routes[: 80 * (turn + 1) - 1])
        # What is deleted with a sample is its own part.
        assert list(refs_of([sample])) == [f"k{turn}"] * (turn in large)
    if large == {0}:
        values["k0"] = values["k0"][::-1]
        with pytest.raises(ChecksumError):
            column_of(whole[2], ROUTES_COLUMN, values.__getitem__)


def test_wrong_parts_are_noticed() -> None:
    made = cumulative("q", "t", 3)
    with pytest.raises(DataLoss, match="turn 0, which is missing") as caught:
        prefixes.restore(claimed(made.samples[1:]))
    assert caught.value.kind == "stem_missing"
    with pytest.raises(DataLoss, match="turn 1, which is missing"):
        prefixes.stems_of(made.samples[2:], {})
    other = store_pb.Sample()
    other.CopyFrom(made.samples[0])
    other.response_ids.CopyFrom(to_proto(np.zeros(40, np.int32)))
    (item,) = prefixes.restore(claimed(made.samples[1:2]), [other])
    with pytest.raises(ChecksumError):
        from_proto(item.sample.prompt_ids)
    made.samples[0].stem.turn = 2
    with pytest.raises(DataLoss):
        prefixes.restore(claimed(made.samples))


def test_a_trainer_keeps_few_claims_and_few_bytes() -> None:
    made = cumulative("q", "t", 40)

    def claim(turn: int) -> store_pb.ClaimMicroBatchResponse:
        return store_pb.ClaimMicroBatchResponse(
            claim_id=f"c{turn}", samples=claimed(made.samples[turn : turn + 1])
        )

    recent = RecentClaims()
    for turn in range(16):
        recent.complete(claim(turn))
    assert recent.claim_ids == [f"c{turn}" for turn in range(16)]
    response = claim(16)
    recent.complete(response)
    assert sorted(one.turn for one in response.stems) == [*range(16)]
    assert len(recent.claim_ids) == 16
    with pytest.raises(DataLoss):
        recent.complete(claim(17))  # of turn 0 it has nothing any more
    small = RecentClaims(limit=2500)
    small.complete(claim(0))
    assert small.claim_ids == ["c0"]
    small.complete(
        store_pb.ClaimMicroBatchResponse(
            claim_id="big", samples=claimed(list(made.whole.values())[10:11])
        )
    )
    assert small.claim_ids == []
