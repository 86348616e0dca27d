"""Rows on their way into a table: whether they are as they must be, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from services.experience_store.records import LETTER_OF, REWARD
from services.experience_store.requests import (
    ID_LENGTH,
    ROW_BYTES,
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

_PENDING: Final = LETTER_OF[pb.SAMPLE_STATE_PENDING]


class Row(NamedTuple):
    """A sample on its way into a table: what its record begins with, read once."""

    sample: str
    policy: str
    payload: bytes
    """The sample, serialized."""
    tokens: int
    turn: int
    agent: str
    group: str
    reward: float | None
    columns: Sequence[str]
    """Sorted."""
    version: str
    """As in `Record`."""

    @staticmethod
    def of(sample: store_pb.Sample, payload: bytes | None = None) -> Row:
        """The row of `sample`, which is `payload` if that is known."""
        versions = sample.versions
        columns = sample.columns
        return Row(
            sample.sample_id,
            sample.policy,
            sample.SerializeToString() if payload is None else payload,
            sum(sample.prompt_ids.shape) + sum(sample.response_ids.shape),
            sample.turn,
            sample.agent,
            sample.group_id,
            sample.reward if sample.HasField("reward") else None,
            sorted(columns) if columns else (),
            str(min(span.version for span in versions)) if versions else "",
        )

    def record(self, query: str, trajectory: str, required: Collection[str]) -> str:
        """Its first `Record`, formatted; `required` are columns besides the reward."""
        missing = [name for name in required if name not in self.columns]
        if self.reward is None:
            missing.append(REWARD)
        reward = "" if self.reward is None else repr(self.reward)
        lacks, early = ",".join(sorted(missing)), ",".join(self.columns)
        # A `Record`, in the order of its fields; written out, as it is once per row.
        return (
            f"{_PENDING}\t{self.tokens}\t{len(self.payload)}\t{self.turn}\t{reward}\t{lacks}\t{early}"
            f"\t\t{query}\t{trajectory}\t{self.agent}\t{self.group}\t\t{self.version}\t0\t\t"
        )


def check_append(
    request: store_pb.AppendTrajectoryRequest, payloads: Sequence[bytes] = ()
) -> list[Row]:
    """An ending, and rows that belong to it: these are returned, read once. `payloads`: the
    samples, serialized, where the caller has them.

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
        if request.samples:
            raise InvalidArgument(
                "a trajectory that did not complete has no samples", field="samples"
            )
        if not request.reason:
            raise InvalidArgument("say why it did not complete", field="reason")
    query, trajectory = request.query_id, request.trajectory_id
    seen: set[str] = set()
    rows: list[Row] = []
    samples = request.samples
    known = payloads if len(payloads) == len(samples) else repeat(None)
    for index, (sample, payload) in enumerate(zip(samples, known, strict=False)):
        row = Row.of(sample, payload)
        if not _is_plain(sample, row, query, trajectory):
            _check_sample(f"samples[{index}]", request, sample, row)
        if row.sample in seen:
            raise InvalidArgument(
                "occurs twice", field=f"samples[{index}].sample_id", value=sample.sample_id
            )
        seen.add(row.sample)
        rows.append(row)
    return rows


def _is_plain(sample: store_pb.Sample, row: Row, query: str, trajectory: str) -> bool:
    """Whether nothing is wrong with `sample`, as far as one look can tell. Most are like that, and
    `_check_sample`, which says what is wrong, takes three times as long.
    """
    prompt, response, logprobs = sample.prompt_ids, sample.response_ids, sample.logprobs
    length = response.shape
    return (
        row.sample == f"{query}_{row.turn}_{trajectory}"
        and sample.query_id == query
        and sample.trajectory_id == trajectory
        and len(row.sample) <= ID_LENGTH
        and _is_plain_id(row.group)
        and _is_plain_id(row.agent)
        and (row.version == "" or row.version[0] != "-")
        and (row.reward is None or math.isfinite(row.reward))
        and prompt.dtype == response.dtype == pb.DTYPE_INT32
        and logprobs.dtype == pb.DTYPE_FLOAT32
        and len(prompt.shape) == len(length) == 1
        and logprobs.shape == length
        and len(prompt.data) == 4 * prompt.shape[0]
        and len(response.data) == len(logprobs.data) == 4 * length[0]
        and not row.columns
        and len(row.payload) <= ROW_BYTES
    )


def _is_plain_id(value: str) -> bool:
    return 0 < len(value) <= ID_LENGTH and value.isascii() and value.isprintable()


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
