"""Records of a trajectory in the experience store: its turns as samples, its end.

The chain of one sample: `GeneratedTurn` (what an engine draws and a workflow reads) -> `TurnRecord`
(with prompt and reply) -> `SampleRow` (what an algorithm needs of the turn) -> `Sample` in an
`AppendTrajectoryRequest` (wire).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import structlog

from troupe.contracts import kinds
from troupe.contracts.payloads import INLINE_BYTES, Payload, add_payloads
from troupe.experience import ExperienceWriter
from troupe.job.sections.algorithm import ROUTES_COLUMN, TEAM_COLUMN
from troupe.prefixes import PrefixIndex
from troupe.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from troupe.rpc.ids import new_id
from troupe.tensors import ids_to_proto, to_proto
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import rollout_pb2 as rollout_pb
from troupe.workflow import TurnRecord
from troupe.workflow.samples import SampleRow

log = structlog.get_logger(__name__)

State: TypeAlias = common_pb.TrajectoryState.ValueType


@dataclass
class LargeColumns:
    """Columns and payloads of one trajectory that are too large for a row, until `put` into
    transfer."""

    transfer: Transfer
    job_id: str
    large: dict[str, Any] = field(default_factory=dict)
    """Arrays by the transfer key that a row refers to."""

    def columns_of(self, sample_id: str, values: Mapping[str, Any]) -> dict[str, store_pb.Column]:
        """Return the columns of one sample as messages; large ones become references."""
        return {name: self._column(sample_id, name, value) for name, value in values.items()}

    async def put(self) -> None:
        """Publish the large values before any reader can know their keys.

        Raises `TransferError`. Repeatable: a trajectory that runs again replaces its values.
        """
        for key, value in self.large.items():
            await asyncio.to_thread(self.transfer.set, key, {"value": _as_tensor(value)})

    async def discard(self) -> None:
        """Delete the large values of a trajectory that was not stored."""
        for key in list(self.large):
            await asyncio.to_thread(self.transfer.delete, key)

    def payload_key(self, sample_id: str, payload: Payload) -> str:
        """Return the key of a sample's payload that is too large for a row, and add its content to
        `large`."""
        key = f"{self.job_id}/payloads/{sample_id}/{payload.digest.hex()}"
        self.large[key] = np.frombuffer(bytearray(payload.data), np.uint8)
        return key

    def _column(self, sample_id: str, name: str, value: Any) -> store_pb.Column:
        if not hasattr(value, "dtype"):
            return store_pb.Column(json=json.dumps(value, allow_nan=False))
        if value.nbytes <= INLINE_BYTES:
            return store_pb.Column(tensor=to_proto(value))
        key = f"{self.job_id}/columns/{sample_id}/{name}"
        self.large[key] = value
        return store_pb.Column(ref=key)


def _as_tensor(value: Any) -> Any:
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True)
class RowDestination:
    """The place in the store of a trajectory's end. `seconds`: how long an append may take, since
    the store may be restarting, or full until a step is committed."""

    job_id: str
    step: int
    query_id: str
    trajectory_id: str
    seconds: float


@dataclass(frozen=True)
class End:
    """How and why the store ended a trajectory. `group_complete`: its group has all its members,
    and redundant trajectories of its query were ended. `repeated`: it had already ended."""

    state: State
    reason: str = ""
    group_complete: bool = False
    repeated: bool = False


class TrajectoryLog:
    """A writer of the ends of trajectories to the store, which keeps the first end of each.
    Concurrent ends share a message (troupe.experience).

    All methods raise `TroupeError` if the store does not answer within `RowDestination.seconds`, or
    does not know the step.
    """

    def __init__(self, writer: ExperienceWriter) -> None:
        self._writer = writer

    async def complete(
        self, at: RowDestination, samples: Sequence[store_pb.Sample], *, solved: bool = False
    ) -> End:
        """Store all rows of a completed trajectory, or none; `solved`: for the job's curriculum.

        Rows that the store can never take (larger than a message or a row may be) end it as FAILED.
        It ends as ABORTED if its query has left the step, or if its group was complete without it.
        """
        try:
            return await self._end(at, common_pb.TRAJECTORY_STATE_COMPLETED, "", samples, solved)
        except (ResourceExhausted, InvalidArgument) as error:
            if error.kind not in (kinds.MESSAGE_TOO_LARGE, kinds.ROW_TOO_LARGE):
                raise
            return await self.fail(at, f"rows_too_large: {error.message}")

    async def fail(self, at: RowDestination, reason: str) -> End:
        """Store that the trajectory has no rows, with the reason."""
        return await self._end(at, common_pb.TRAJECTORY_STATE_FAILED, reason)

    async def abort(self, at: RowDestination, reason: str) -> bool:
        """Store that the trajectory was aborted; return False if it had already ended."""
        try:
            return not (await self._end(at, common_pb.TRAJECTORY_STATE_ABORTED, reason)).repeated
        except (FailedPrecondition, NotFound) as error:
            # The orchestrator drops a query, or a whole job, before it aborts the trajectories.
            log.info("nothing to abort in the store", error=str(error))
            return True

    async def _end(
        self,
        at: RowDestination,
        state: State,
        reason: str,
        samples: Sequence[store_pb.Sample] = (),
        solved: bool = False,
    ) -> End:
        response = await self._writer.append(
            store_pb.AppendTrajectoryRequest(
                request_id=new_id("append"),
                job_id=at.job_id,
                step=at.step,
                query_id=at.query_id,
                trajectory_id=at.trajectory_id,
                state=state,
                reason=reason,
                samples=samples,
                solved=solved,
            ),
            at.seconds,
        )
        if response.step != at.step:
            log.info("its query was carried over", asked=at.step, step=response.step)
        if response.drop_reason:
            # Its query has left the step, or its group was complete without it.
            reason = reason if state == common_pb.TRAJECTORY_STATE_ABORTED else response.drop_reason
            return End(common_pb.TRAJECTORY_STATE_ABORTED, reason, response.group_complete)
        if not response.accepted:
            log.info("the trajectory had ended before")
        return End(state, reason, response.group_complete, repeated=not response.accepted)


def samples_of(
    rows: Sequence[SampleRow], *, ticket: rollout_pb.Ticket, shelf: LargeColumns
) -> list[store_pb.Sample]:
    """Return the rows of a trajectory as messages, which carry each token once
    (troupe/prefixes.py). Columns too large for a row are added to `shelf`."""
    samples = []
    earlier = PrefixIndex()
    for row in rows:
        turn, reply = row.turn, row.turn.reply
        assert reply is not None  # rows are made of answered turns
        columns = dict(reply.columns)
        if row.context is not None:
            columns[TEAM_COLUMN] = np.array(row.context, np.int32)
        routes = None if turn.generation is None else turn.generation.routed_experts
        if routes is not None:
            # A reply cut at a stop string is shorter than the drawn response.
            columns[ROUTES_COLUMN] = routes[: len(turn.prompt_ids) + len(reply.response) - 1]
        prompt, response = turn.prompt_ids.array, reply.response.array
        own = earlier.add(
            turn.role.policy, turn.position, prompt, response, columns, turn.prompt_ids.payloads
        )
        samples.append(
            store_pb.Sample(
                sample_id=row.sample_id,
                policy=turn.role.policy,
                query_id=ticket.query_id,
                trajectory_id=ticket.trajectory_id,
                agent=turn.role.name,
                turn=turn.position,
                group_id=row.group_id,
                prompt_ids=ids_to_proto(own.prompt),
                response_ids=ids_to_proto(response),
                logprobs=to_proto(np.array(reply.response_logprobs, np.float32)),
                versions=spans_of(turn),
                reward=row.reward,
                finish_reason=reply.finish_reason,
                temperature=turn.sampling.temperature,
                columns=shelf.columns_of(row.sample_id, own.columns),
                chain=row.chain,
                own_reward=row.own_reward,
                earned=row.earned,
                final_reward=row.final,
                stem=own.stem,
            )
        )
        if own.payloads:
            add_payloads(samples[-1], own.payloads, partial(shelf.payload_key, row.sample_id))
    return samples


def spans_of(turn: TurnRecord) -> list[common_pb.VersionSpan]:
    """Return the versions that drew a turn's tokens."""
    spans = turn.generation.versions if turn.generation else ()
    return [common_pb.VersionSpan(version=s.version, start=s.start, end=s.end) for s in spans]
