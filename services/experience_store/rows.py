"""Rows on their way into a table: whether they are as they must be, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from services.experience_store.plain import PlainRows
from services.experience_store.records import Payload, Row
from services.experience_store.requests import (
    check_columns,
    check_id,
    check_not_negative,
    check_reward,
    check_size,
    check_vector,
    enum_name,
    printable,
)
from troupe.rpc import InvalidArgument
from troupe.v1 import common_pb2 as pb
from troupe.v1 import experience_store_pb2 as store_pb


def check_append(
    request: store_pb.AppendTrajectoryRequest, payloads: Sequence[Payload]
) -> list[Row]:
    """An ending, and rows that belong to it (`payloads`, whether `request` has them too or not):
    these are returned, read once.

    `query_id` and `trajectory_id` are checked already.
    """
    ends = (
        pb.TRAJECTORY_STATE_COMPLETED,
        pb.TRAJECTORY_STATE_FAILED,
        pb.TRAJECTORY_STATE_ABORTED,
    )
    if request.state not in ends:
        raise InvalidArgument(
            "is not the end of a trajectory",
            field="state",
            value=enum_name(pb.TrajectoryState, request.state),
            remedy="Send COMPLETED, FAILED or ABORTED.",
        )
    if request.state != pb.TRAJECTORY_STATE_COMPLETED:
        if payloads:
            raise InvalidArgument(
                "a trajectory that did not complete has no samples", field="samples"
            )
        if not request.reason:
            raise InvalidArgument("say why it did not complete", field="reason")
    plain = PlainRows(request.query_id, request.trajectory_id)
    seen: set[str] = set()
    rows: list[Row] = []
    for index, payload in enumerate(payloads):
        row = plain.read(payload) or _read(f"samples[{index}]", request, payload)
        if row.sample in seen:
            raise InvalidArgument(
                "occurs twice", field=f"samples[{index}].sample_id", value=row.sample
            )
        seen.add(row.sample)
        rows.append(row)
    return rows


def _read(field: str, request: store_pb.AppendTrajectoryRequest, payload: Payload) -> Row:
    """The row that `payload` is; says what is wrong with it."""
    try:
        sample = store_pb.Sample.FromString(bytes(payload))
    except DecodeError as error:
        raise InvalidArgument(f"is no Sample: {error}", field=field) from error
    row = Row.of(sample, payload)
    _check_sample(field, request, sample, row)
    return row


def _check_sample(
    field: str, request: store_pb.AppendTrajectoryRequest, sample: store_pb.Sample, row: Row
) -> None:
    for name, ours, theirs in (
        ("query_id", sample.query_id, request.query_id),
        ("trajectory_id", sample.trajectory_id, request.trajectory_id),
        (
            "sample_id",
            sample.sample_id,
            f"{request.query_id}_{sample.turn}_{request.trajectory_id}",
        ),
    ):
        if ours != theirs:
            raise InvalidArgument(
                f"must be {theirs}", field=f"{field}.{name}", value=printable(ours)
            )
    check_id(f"{field}.sample_id", sample.sample_id)
    check_id(f"{field}.group_id", sample.group_id)
    check_id(f"{field}.agent", sample.agent)
    for span in sample.versions:
        check_not_negative(f"{field}.versions", span.version)
    if sample.HasField("reward"):
        check_reward(f"{field}.reward", sample.reward)
    for name, tensor, dtype in (
        ("prompt_ids", sample.prompt_ids, pb.DTYPE_INT32),
        ("response_ids", sample.response_ids, pb.DTYPE_INT32),
        ("logprobs", sample.logprobs, pb.DTYPE_FLOAT32),
    ):
        check_vector(f"{field}.{name}", tensor, dtype)
    if sample.logprobs.shape != sample.response_ids.shape:
        raise InvalidArgument(
            f"must have one value per response token ({sample.response_ids.shape[0]})",
            field=f"{field}.logprobs",
            value=sample.logprobs.shape[0],
        )
    check_columns(f"{field}.columns", sample.columns)
    check_size(field, len(row.payload))
