"""What Prometheus is told about the store."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from services.chassis.telemetry import Telemetry
from services.experience_store.database import Database
from troupe.rpc import TroupeError
from troupe.v1 import experience_store_pb2 as store_pb

_PERIOD_SECONDS: Final = 5.0


class Meters:
    """Counters that the servicer moves, and gauges of Redis itself."""

    def __init__(self, telemetry: Telemetry, database: Database) -> None:
        self._database = database
        self._task: asyncio.Task[None] | None = None
        self._trajectories = telemetry.counter(
            "troupe_store_trajectories", "Endings of trajectories.", ["state", "accepted"]
        )
        self._appended = telemetry.counter(
            "troupe_store_samples_appended", "Samples in accepted endings.", ["policy"]
        )
        self._claims = telemetry.counter(
            "troupe_store_claims", "Answers to ClaimMicroBatch.", ["policy", "outcome"]
        )
        self._claimed = telemetry.counter(
            "troupe_store_samples_claimed", "Samples leased.", ["policy"]
        )
        self._commits = telemetry.counter(
            "troupe_store_commits", "Steps ended.", ["policy", "outcome"]
        )
        self._redis_up = telemetry.gauge("troupe_store_redis_up", "1 while Redis answers.")
        self._redis_bytes = telemetry.gauge("troupe_store_redis_bytes", "Memory that Redis uses.")

    def start(self) -> None:
        """Begin to ask Redis about itself."""
        self._task = asyncio.create_task(self._observe_forever(), name="meters")

    async def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    def appended(
        self, state: str, accepted: bool, request: store_pb.AppendTrajectoryRequest
    ) -> None:
        """An ending was decided."""
        self._trajectories.labels(state.lower(), str(accepted).lower()).inc()
        if accepted:
            for sample in request.samples:
                self._appended.labels(sample.policy).inc()

    def claimed(self, policy: str, response: store_pb.ClaimMicroBatchResponse) -> None:
        """A claim was answered."""
        outcome = store_pb.ClaimMicroBatchResponse.Outcome.Name(response.outcome)
        self._claims.labels(policy, outcome.removeprefix("OUTCOME_").lower()).inc()
        self._claimed.labels(policy).inc(len(response.samples))

    def committed(self, commit: store_pb.StepCommit) -> None:
        """A step ended."""
        outcome = store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_")
        self._commits.labels(commit.policy, outcome.lower()).inc()

    async def _observe_forever(self) -> None:
        while True:
            try:
                info = await self._database.info()
                self._redis_bytes.set(int(info["used_memory"]))
                self._redis_up.set(1)
            except TroupeError:
                self._redis_up.set(0)
            await asyncio.sleep(_PERIOD_SECONDS)
