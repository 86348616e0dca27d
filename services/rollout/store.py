"""The experience store as rollout uses it: one ending per trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from troupe.experience import ExperienceWriter
from troupe.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from troupe.rpc.ids import new_id
from troupe.v1 import common_pb2 as common
from troupe.v1 import experience_store_pb2 as pb

log = structlog.get_logger(__name__)

State: TypeAlias = common.TrajectoryState.ValueType
_FAILED = common.TRAJECTORY_STATE_FAILED
_ABORTED = common.TRAJECTORY_STATE_ABORTED


@dataclass(frozen=True)
class Place:
    """Where a trajectory's ending goes. `seconds`: how long the store may keep us waiting: it may
    be restarting, or full until a step is committed."""

    job_id: str
    step: int
    query_id: str
    trajectory_id: str
    seconds: float


@dataclass(frozen=True)
class End:
    """How a trajectory ended, and why. `group_complete`: its group has all its members, and the
    redundant trajectories of its query were ended. `repeated`: it had ended before."""

    state: State
    reason: str = ""
    group_complete: bool = False
    repeated: bool = False


class TrajectoryLog:
    """Writes endings; those of about the same time travel together (troupe.experience). The store
    keeps the first one of a trajectory.

    All raise `TroupeError` when the store could not be asked within `Place.seconds`, or does not
    know the step.
    """

    def __init__(self, writer: ExperienceWriter) -> None:
        self._writer = writer

    async def complete(self, at: Place, samples: Sequence[pb.Sample]) -> End:
        """Store the rows of a completed trajectory, all or none.

        Rows that the store can never take (larger than a message or a row may be) end it as
        FAILED. One whose query has left its step, or has a complete group without it, ends as
        ABORTED.
        """
        try:
            return await self._end(at, common.TRAJECTORY_STATE_COMPLETED, "", samples)
        except (ResourceExhausted, InvalidArgument) as error:
            if error.kind not in ("message_too_large", "row_too_large"):
                raise
            return await self.fail(at, f"rows_too_large: {error.message}")

    async def fail(self, at: Place, reason: str) -> End:
        """Store that the trajectory has no rows, and why."""
        return await self._end(at, _FAILED, reason)

    async def abort(self, at: Place, reason: str) -> bool:
        """Store that the trajectory was aborted. False when it had ended already, by itself."""
        try:
            return not (await self._end(at, _ABORTED, reason)).repeated
        except (FailedPrecondition, NotFound) as error:
            # Who drops a query, or a whole job, does so before he aborts what runs of it.
            log.info("nothing to abort in the store", error=str(error))
            return True

    async def _end(
        self, at: Place, state: State, reason: str, samples: Sequence[pb.Sample] = ()
    ) -> End:
        response = await self._writer.append(
            pb.AppendTrajectoryRequest(
                request_id=new_id("append"),
                job_id=at.job_id,
                step=at.step,
                query_id=at.query_id,
                trajectory_id=at.trajectory_id,
                state=state,
                reason=reason,
                samples=samples,
            ),
            at.seconds,
        )
        if response.step != at.step:
            log.info("its query was carried over", asked=at.step, step=response.step)
        if response.drop_reason:
            # Its query has left the step, or its group was complete without it.
            reason = reason if state == _ABORTED else response.drop_reason
            return End(_ABORTED, reason, response.group_complete)
        if not response.accepted:
            log.info("the trajectory had ended before")
        return End(state, reason, response.group_complete, repeated=not response.accepted)
