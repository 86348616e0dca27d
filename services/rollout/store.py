"""The experience store as rollout uses it: one ending per trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from troupe.rpc.errors import InvalidArgument, ResourceExhausted
from troupe.rpc.ids import new_id
from troupe.v1 import common_pb2 as common
from troupe.v1 import experience_store_pb2 as pb

if TYPE_CHECKING:
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub

log = structlog.get_logger(__name__)

# The store may be restarting with a Redis behind it; a finished trajectory is worth waiting for.
APPEND_SECONDS = 180.0


class TrajectoryLog:
    """Writes endings. The store keeps the first one of a trajectory."""

    def __init__(self, stub: ExperienceStoreAsyncStub) -> None:
        self._stub = stub

    async def complete(
        self,
        job_id: str,
        step: int,
        query_id: str,
        trajectory_id: str,
        samples: Sequence[pb.Sample],
    ) -> str:
        """Store the rows of a completed trajectory, all or none. Returns "" or why it has none.

        Rows that the store can never take (larger than a message or a row may be) end the
        trajectory as failed. Raises `TroupeError` when the store could not be asked.
        """
        request = pb.AppendTrajectoryRequest(
            request_id=new_id("append"),
            job_id=job_id,
            step=step,
            query_id=query_id,
            trajectory_id=trajectory_id,
            state=common.TRAJECTORY_STATE_COMPLETED,
            samples=samples,
        )
        try:
            response = await self._stub.AppendTrajectory(request, timeout=APPEND_SECONDS)
        except (ResourceExhausted, InvalidArgument) as error:
            if error.kind not in ("message_too_large", "row_too_large"):
                raise
            reason = f"rows_too_large: {error.message}"
            await self.fail(job_id, step, query_id, trajectory_id, reason)
            return reason
        if not response.accepted:
            log.info("the trajectory had ended before", trajectory_id=trajectory_id)
        return ""

    async def fail(
        self, job_id: str, step: int, query_id: str, trajectory_id: str, reason: str
    ) -> None:
        """Store that the trajectory has no rows, and why. Raises `TroupeError`."""
        await self._stub.AppendTrajectory(
            pb.AppendTrajectoryRequest(
                request_id=new_id("append"),
                job_id=job_id,
                step=step,
                query_id=query_id,
                trajectory_id=trajectory_id,
                state=common.TRAJECTORY_STATE_FAILED,
                reason=reason,
            ),
            timeout=APPEND_SECONDS,
        )
