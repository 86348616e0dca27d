"""Rows of an ending: checked, stored without the names that identify them, and restored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from services.experience_store.records import SampleRecord, StagedRow
from services.experience_store.server import WriteBatch, check_append
from tests.support.experience import make_sample, staged_row
from troupe import tensors
from troupe.prefixes import key_of
from troupe.rpc import InvalidArgument
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

_id_bounds = st.sampled_from([100, 2**16, 2**24, 2**31])
_names = st.text(st.characters(max_codepoint=0x17F, exclude_categories=["C"]), max_size=140)


def _ids(length: int, bound: int) -> common_pb.Tensor:
    """Return ids below `bound`, the last of which is the largest possible."""
    return tensors.ids_to_proto(np.arange(bound - length, bound).astype(np.int32))


@st.composite
def samples(draw: st.DrawFn) -> store_pb.Sample:
    query, turn = draw(_names), draw(st.integers(0, 20_000))
    response = draw(st.integers(0, 300))
    sample = store_pb.Sample(
        sample_id=f"{query}_{turn}_t" if draw(st.booleans()) else draw(_names),
        policy=draw(_names),
        query_id=query,
        trajectory_id=draw(st.sampled_from(["t", "other"])),
        agent=draw(_names),
        turn=turn,
        group_id=draw(_names),
        prompt_ids=_ids(draw(st.integers(0, 5000)), draw(_id_bounds)),
        response_ids=_ids(response, draw(_id_bounds)),
        logprobs=tensors.to_proto(np.zeros(response, dtype=np.float32)),
        versions=[
            common_pb.VersionSpan(version=draw(st.integers(-1, 2**40)), start=0, end=response)
            for _ in range(draw(st.integers(0, 2)))
        ],
        reward=draw(st.none() | st.floats()),
        temperature=draw(st.none() | st.floats(0, 2)),
        finish_reason=draw(st.sampled_from(["", "stop"])),
        chain=draw(st.sampled_from(["", "0"])),
        own_reward=draw(st.booleans()),
        earned=draw(st.none() | st.floats()),
        final_reward=draw(st.none() | st.floats()),
    )
    if draw(st.integers(0, 5)) == 0:
        sample.columns["score"].json = "1"
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(["prompt_ids", "response_ids", "logprobs"]))
        tensor = getattr(sample, name)
        match draw(st.integers(0, 3)):
            case 0:
                tensor.data = tensor.data[:-1]
            case 1:
                tensor.dtype = draw(
                    st.sampled_from([common_pb.DTYPE_INT64, common_pb.DTYPE_PACKED24])
                )
            case 2:
                tensor.shape.append(1)
            case _:
                tensor.ClearField("checksum")
    return sample


def completed(query: str) -> store_pb.AppendTrajectoryRequest:
    return store_pb.AppendTrajectoryRequest(
        query_id=query, trajectory_id="t", state=common_pb.TRAJECTORY_STATE_COMPLETED
    )


def assert_restorable(row: StagedRow, sample: store_pb.Sample, *, accepted: bool = True) -> None:
    """Check that the row in Redis and its record together give the sample."""
    first, last = row.record(()).split("\t")[:8], row.record(()).split("\t")[8:]
    record = SampleRecord(*first, sample.query_id, sample.trajectory_id, *last)
    assert int(record.size) == len(row.stored)
    named = record.named(row.sample, row.policy)
    assert (
        store_pb.Sample.FromString(
            named.SerializeToString() + bytes(row.stored)
        ).SerializeToString()
        == sample.SerializeToString()
    )
    if accepted:
        assert key_of(record.named_ancestor(row.sample, row.policy)) == key_of(sample)


@given(samples(), st.booleans())
def test_a_row_is_stored_without_its_names_and_restored_from_its_record(
    sample: store_pb.Sample, reordered: bool
) -> None:
    raw_row = sample.SerializeToString()
    if reordered:  # as another writer may serialize the row
        first = store_pb.Sample(sample_id=sample.sample_id).SerializeToString()
        raw_row = raw_row.removeprefix(first) + first
    row = staged_row(sample, raw_row)
    assert_restorable(row, sample, accepted=False)
    if not reordered:
        stored = store_pb.Sample.FromString(bytes(row.stored))
        assert not any((stored.sample_id, stored.policy, stored.agent, stored.group_id))
    try:
        accepted = check_append(completed(sample.query_id), [raw_row])
    except InvalidArgument:
        return
    assert accepted == [row]
    assert_restorable(row, sample)


def test_a_usual_row_is_accepted_whatever_its_length_and_ids() -> None:
    for turn in (0, 1, 127, 128, 16_383):
        for tokens in (4, 40, 400, 40_000):
            for reward, bound in itertools.product((None, 0.5), (2**16, 2**24, 2**31)):
                sample = make_sample("q", turn, "t", reward=reward, tokens=tokens)
                sample.prompt_ids.CopyFrom(_ids(tokens // 2, bound))
                raw_row = sample.SerializeToString()
                (row,) = check_append(completed("q"), [raw_row])
                assert_restorable(row, sample)
                assert row.names


@given(samples(), st.data())
def test_a_broken_row_is_refused_or_read_as_what_its_bytes_say(
    sample: store_pb.Sample, data: st.DataObject
) -> None:
    raw_row = bytearray(sample.SerializeToString())
    place = data.draw(st.integers(0, len(raw_row) - 1))
    raw_row[place] ^= data.draw(st.integers(1, 255))
    broken = bytes(raw_row[: data.draw(st.integers(place + 1, len(raw_row)))])
    try:
        (row,) = check_append(completed(sample.query_id), [broken])
    except InvalidArgument:
        return
    assert_restorable(row, store_pb.Sample.FromString(broken))


def test_a_batch_is_cut_where_its_parts_end() -> None:
    rows = [make_sample("q", turn, "t") for turn in range(3)]
    ending = store_pb.AppendTrajectoryRequest(request_id="a", query_id="q", samples=rows)
    request = store_pb.WriteRequest(
        request_id="w",
        endings=[ending, store_pb.AppendTrajectoryRequest(request_id="b")],
        fills=[store_pb.FillColumnsRequest(request_id="c", reward=1.0)],
    )
    text = request.SerializeToString()
    batch = WriteBatch.parse(text)
    assert (batch.request_id, list(batch.fills)) == ("w", list(request.fills))
    assert [one.request_id for one in batch.endings] == ["a", "b"]
    assert [[*map(bytes, own)] for own in batch.raw_rows] == [
        [row.SerializeToString() for row in rows],
        [],
    ]
    for broken in (text[:-1], text + b"\x0b", text[:20]):
        with pytest.raises(DecodeError):
            WriteBatch.parse(broken)


def test_a_number_where_an_ending_should_be_is_none() -> None:
    """As in protobuf, for which it is an unknown field."""
    text = store_pb.WriteRequest(request_id="w").SerializeToString() + b"\x10\x07"
    assert not store_pb.WriteRequest.FromString(text).endings
    assert not WriteBatch.parse(text).endings


def test_a_row_that_is_not_a_message_is_named() -> None:
    request = store_pb.AppendTrajectoryRequest(
        query_id="q", trajectory_id="t", state=common_pb.TRAJECTORY_STATE_COMPLETED
    )
    with pytest.raises(InvalidArgument) as refused:
        check_append(request, [b"\x0a\xff"])
    assert refused.value.field == "samples[0]"
