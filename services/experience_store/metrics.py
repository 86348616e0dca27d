"""Prometheus metrics of the store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from services.chassis.telemetry import Telemetry
from services.experience_store.claims import Delivery
from services.experience_store.notices import Background
from services.experience_store.records import JOBS
from services.experience_store.store import Store
from services.experience_store.tables import DAMAGED
from services.experience_store.trajectories import Append
from troupe.rpc import TroupeError
from troupe.v1 import experience_store_pb2 as store_pb

_PERIOD_SECONDS: Final = 5.0


class Meters:
    """Counters incremented by the servicer, and gauges of tables and Redis."""

    def __init__(self, telemetry: Telemetry, store: Store) -> None:
        self._store = store
        self._background = Background()
        counter, gauge = telemetry.counter, telemetry.gauge
        self._trajectories = counter(
            "troupe_store_trajectories", "Endings of trajectories.", ["state", "accepted"]
        )
        self._appended = counter(
            "troupe_store_samples_appended", "Samples in accepted endings.", ["policy"]
        )
        self._claims = counter(
            "troupe_store_claims", "Answers to ClaimMicroBatch.", ["policy", "outcome"]
        )
        self._claimed = counter("troupe_store_samples_claimed", "Samples leased.", ["policy"])
        self._commits = counter("troupe_store_commits", "Steps ended.", ["policy", "outcome"])
        self.pushed_back = counter(
            "troupe_store_pushed_back", "Endings refused above the high-water mark."
        )
        table = ["job_id", "policy"]
        self._samples = gauge("troupe_store_samples", "Samples of live jobs.", [*table, "state"])
        self._lag = gauge("troupe_store_lag_steps", "Steps opened and not committed.", table)
        self._oldest = gauge(
            "troupe_store_oldest_pending_seconds", "Age of the oldest waiting sample.", table
        )
        self._table_bytes = gauge(
            "troupe_store_table_bytes", "Bytes of rows in a table of a live job.", table
        )
        self._bytes = gauge("troupe_store_payload_bytes", "Bytes of rows of all jobs.")
        self._over = gauge(
            "troupe_store_over_high_water", "1 while rows take more than the high-water mark."
        )
        self._recent_bytes = gauge(
            "troupe_store_recent_bytes", "Bytes of rows kept in this process for claims."
        )
        self._recent_found = gauge(
            "troupe_store_recent_found", "Claimed rows that were not read from Redis."
        )
        self._redis_up = gauge("troupe_store_redis_up", "1 while Redis answers.")
        self._redis_bytes = gauge("troupe_store_redis_bytes", "Memory that Redis uses.")

    def start(self) -> None:
        """Start to observe Redis and the tables."""
        self._background.start(self._observe_forever(), "meters")

    async def stop(self) -> None:
        """Stop observing."""
        await self._background.stop()

    def appended(self, append: Append, accepted: bool) -> None:
        """Count a decided ending, and its samples if it was accepted."""
        self._trajectories.labels(append.ending.state.lower(), str(accepted).lower()).inc()
        if accepted:
            for policy, rows in append.by_policy.items():
                self._appended.labels(policy).inc(len(rows))

    def claimed(self, policy: str, delivery: Delivery) -> None:
        """Count an answered claim."""
        outcome = store_pb.ClaimMicroBatchResponse.Outcome.Name(delivery.outcome)
        self._claims.labels(policy, outcome.removeprefix("OUTCOME_").lower()).inc()
        self._claimed.labels(policy).inc(delivery.samples)

    def committed(self, commit: store_pb.StepCommit) -> None:
        """Count a committed step."""
        outcome = store_pb.StepOutcome.Name(commit.outcome).removeprefix("STEP_OUTCOME_")
        self._commits.labels(commit.policy, outcome.lower()).inc()

    async def observe(self) -> None:
        """Set the gauges. Raises `TroupeError` when Redis does not answer."""
        store = self._store
        self._recent_bytes.set(store.recent.bytes)
        self._recent_found.set(store.recent.found)
        info = await store.database.info()
        self._redis_bytes.set(int(info["used_memory"]))
        await store.high_water.look(at_most_every=_PERIOD_SECONDS / 2)
        self._bytes.set(store.high_water.payload_bytes)
        self._over.set(int(store.high_water.over))
        found: dict[str, store_pb.DescribeTablesResponse] = {}
        for name in await store.database.call("SMEMBERS", JOBS):
            job = name.decode()
            # There may be many finished jobs, and they do not change.
            if await store.steps.live(job):
                with contextlib.suppress(TroupeError, *DAMAGED):
                    found[job] = await store.descriptions.describe(job)
        for gauge in (self._samples, self._lag, self._oldest, self._table_bytes):
            gauge.clear()
        for job, description in found.items():
            for table in description.tables:
                self._show(job, table)

    def _show(self, job: str, table: store_pb.TableSummary) -> None:
        for state in ("pending", "ready", "claimed", "trained", "dropped"):
            self._samples.labels(job, table.policy, state).set(getattr(table, state))
        self._lag.labels(job, table.policy).set(table.newest_step - table.committed_step)
        self._oldest.labels(job, table.policy).set(table.oldest_pending_seconds)
        self._table_bytes.labels(job, table.policy).set(table.payload_bytes)

    async def _observe_forever(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.observe()
                self._redis_up.set(1)
            except TroupeError:
                self._redis_up.set(0)
            # Large stores are observed rarely, so that appends and claims come first.
            await asyncio.sleep(max(_PERIOD_SECONDS, 10 * (time.monotonic() - began)))
