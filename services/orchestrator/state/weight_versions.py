"""The record of weight versions: the present version of each policy of a job, and all earlier ones.

A policy's version moves only here: by the commit of its next step (`commit`), or back to its first
weights under the next number (`restart`). Each version has one checksum, so the same number with
different content is refused.

How a version is admitted: `pipeline.steps.StepRunner` commits it here, then
`placement.engines.Engines.update` has the rollout workers load it. `Engines.ready` names the
workers that serve it, and `pipeline.steps.StepWindow` opens a step only when every policy's served
version is recent enough (`pipeline.alpha`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from services.orchestrator.state.records import LiveJob, timestamp
from services.orchestrator.state.redis import JobKeys, RedisAccess
from troupe.rpc import FailedPrecondition, NotFound
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb


@dataclass(frozen=True)
class VersionEntry:
    """The newest version of a policy: steps done, and the weights after them."""

    done: int
    weights: common_pb.WeightsRef


class WeightVersions:
    """The weight versions of all jobs, in Redis."""

    def __init__(self, redis: RedisAccess, live: Mapping[str, LiveJob]) -> None:
        """`live`: jobs of this process by id, where their newest versions are kept for its
        metrics."""
        self._redis = redis
        self._live = live

    async def entries(self, job_id: str) -> dict[str, VersionEntry]:
        """Return the newest entry of every policy that has one."""
        found = entries_of(await self._redis.call("HGETALL", JobKeys(job_id).ledger))
        for policy, entry in found.items():
            self._show(job_id, policy, entry.weights.version)
        return found

    async def versions(self, job_id: str, policy: str = "") -> list[orchestrator_pb.PolicyVersion]:
        """Return all versions so far, oldest first, of one policy or of all."""
        rows = await self._redis.call("LRANGE", JobKeys(job_id).versions, 0, -1)
        versions = [orchestrator_pb.PolicyVersion.FromString(row) for row in rows]
        return [one for one in versions if policy in ("", one.weights.policy)]

    async def open(self, job_id: str, weights: common_pb.WeightsRef) -> VersionEntry:
        """Record a policy's weights before any step. Repeatable."""
        return await self._move(job_id, 0, weights, store_pb.STEP_OUTCOME_UNSPECIFIED)

    async def commit(self, job_id: str, commit: store_pb.StepCommit) -> VersionEntry:
        """Move a policy by the commit of its next step. Repeated and older commits change nothing.

        Raises `FailedPrecondition` if a step is skipped or the version has another checksum,
        `NotFound` for an unknown job.
        """
        weights = commit.weights
        if not weights.policy:  # the commit of a step without an update may omit them
            known = (await self.entries(job_id)).get(commit.policy)
            weights = common_pb.WeightsRef(policy=commit.policy) if known is None else known.weights
        return await self._move(job_id, commit.step + 1, weights, commit.outcome)

    async def restart(self, job_id: str, done: int, weights: common_pb.WeightsRef) -> VersionEntry:
        """Move a policy with `done` steps to its next version without a step: `weights`, its first
        ones again. A repeated call, or one after a later step, changes nothing.

        Raises like `commit`.
        """
        return await self._move(
            job_id, done, weights, store_pb.STEP_OUTCOME_UNSPECIFIED, restarted=True
        )

    async def _move(
        self,
        job_id: str,
        done: int,
        weights: common_pb.WeightsRef,
        outcome: store_pb.StepOutcome.ValueType,
        *,
        restarted: bool = False,
    ) -> VersionEntry:
        keys = JobKeys(job_id)
        entry = orchestrator_pb.PolicyVersion(
            weights=weights,
            step=done,
            published_at=timestamp(time.time()),
            outcome=outcome,
            restarted=restarted,
        )
        verdict, stored = await self._redis.run_script(
            "ledger",
            [keys.record, keys.ledger, keys.versions, keys.checksums],
            [
                weights.policy,
                done,
                str(weights.version),
                weights.checksum,
                entry.SerializeToString(),
                int(restarted),
            ],
        )
        if verdict == b"missing":
            raise NotFound(f"there is no job {job_id}", field="job_id", value=job_id)
        newest = orchestrator_pb.PolicyVersion.FromString(stored)
        if verdict == b"conflict":
            raise FailedPrecondition(
                f"version {weights.version} of policy {weights.policy} is known with another "
                f"checksum than {weights.checksum}",
                kind="checksum_conflict",
                field="weights.checksum",
                value=weights.checksum,
                remedy="The training state of that version was lost or changed; submit a new job.",
            )
        if verdict == b"gap" and restarted:
            raise FailedPrecondition(
                f"policy {weights.policy} has done {newest.step} steps and is at version "
                f"{newest.weights.version}; after {done} steps it cannot begin again as version "
                f"{weights.version}",
                kind="ledger_gap",
                field="weights.version",
                value=weights.version,
            )
        if verdict == b"gap":
            raise FailedPrecondition(
                f"policy {weights.policy} has done {newest.step} steps; a commit for step "
                f"{done - 1} cannot follow",
                kind="ledger_gap",
                field="commit.step",
                value=done - 1,
            )
        self._show(job_id, weights.policy, newest.weights.version)
        return VersionEntry(done=newest.step, weights=newest.weights)

    def _show(self, job_id: str, policy: str, version: int) -> None:
        """Show the version in the metrics; replies of Redis may arrive out of order."""
        if (job := self._live.get(job_id)) is not None:
            job.versions[policy] = max(version, job.versions.get(policy, 0))


def entries_of(fields: Mapping[bytes, bytes]) -> dict[str, VersionEntry]:
    """Return the newest entry of every policy, from the Redis hash of a job's versions."""
    found: dict[str, VersionEntry] = {}
    for name, value in fields.items():
        policy, _, kind = name.decode().rpartition(":")
        if kind == "entry":
            version = orchestrator_pb.PolicyVersion.FromString(value)
            found[policy] = VersionEntry(done=version.step, weights=version.weights)
    return found
