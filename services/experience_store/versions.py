"""Weight versions: for each policy of a job the list of its versions, their only source of truth.

Scripts add to the list, each atomically and repeatably: `open` records a policy's first weights, a
commit adds the result of the next step (`claims.Claims.commit`), and `restart` returns to the first
weights under the next number. A version has one checksum, so the same number with other content is
refused.

The list outlives the tables of its job, and goes with their log (`log.Log.purge`).
"""

from __future__ import annotations

import re
import time
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from services.experience_store.database import Database
from services.experience_store.records import JobTableKeys, PolicyKeys
from services.experience_store.tables import TableRegistry
from troupe.rpc import FailedPrecondition, InvalidArgument
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb

_NONE: Final = -1
# A page token: the place of the page's first entry in the list.
_PLACE: Final = re.compile(r"[1-9][0-9]{0,17}")


class PolicyVersions:
    """The weight versions of all jobs."""

    def __init__(self, database: Database, tables: TableRegistry) -> None:
        self._database = database
        self._tables = tables

    async def open(self, job: str, weights: common_pb.WeightsRef) -> store_pb.PolicyVersion:
        """Record a policy's first weights, unless it has a version; return the newest version.

        Raises `FailedPrecondition` of kind `checksum_conflict` if the version has another checksum.
        """
        await self._tables.get(job)
        # First of all, so that `newest` and `Log.purge` find the list that is written after it.
        await self._database.call("SADD", JobTableKeys(job).versioned, weights.policy)
        entry = store_pb.PolicyVersion(weights=weights, published_at=_now())
        return await self._add("open_version", job, entry)

    async def restart(
        self, job: str, steps_done: int, weights: common_pb.WeightsRef
    ) -> store_pb.PolicyVersion:
        """Move a policy to its next version without a step: `weights`, its first ones again.

        Returns the newest version. A repeated call changes nothing. Raises `FailedPrecondition`:
        `version_gap` if it is not the next version of a policy that has done `steps_done` steps,
        `checksum_conflict` if the version has another checksum.
        """
        await self._tables.get(job)
        entry = store_pb.PolicyVersion(
            weights=weights, step=steps_done, published_at=_now(), restarted=True
        )
        return await self._add("restart_version", job, entry)

    async def _add(
        self, script: str, job: str, entry: store_pb.PolicyVersion
    ) -> store_pb.PolicyVersion:
        weights = entry.weights
        outcome, newest = await self._database.run(
            script,
            PolicyKeys(job, weights.policy).base,
            entry.step,
            weights.version,
            weights.checksum,
            entry.SerializeToString(),
        )
        found = _parse(newest)
        if outcome == b"conflict":
            raise checksum_conflict(weights)
        if outcome == b"gap":
            what = f"after {entry.step} steps it cannot restart as version {weights.version}"
            raise version_gap(weights, found.step if newest else _NONE, found.weights.version, what)
        return found

    async def newest(self, job: str) -> list[store_pb.PolicyVersion]:
        """Return the newest version of every policy that has one, by name."""
        names = await self._database.call("SMEMBERS", JobTableKeys(job).versioned)
        policies = sorted(name.decode() for name in names)
        found = await self._database.call_each(
            [("LINDEX", PolicyKeys(job, policy).versions, -1) for policy in policies]
        )
        return [_parse(entry) for entry in found if entry is not None]

    async def page(
        self, job: str, policy: str, size: int, token: str = ""
    ) -> tuple[list[store_pb.PolicyVersion], str]:
        """Return up to `size` versions, oldest first, and the token of the next page."""
        if token and not _PLACE.fullmatch(token):
            raise InvalidArgument(
                "not a page token of ListPolicyVersions",
                field="page_token",
                value=token,
                remedy="Use next_page_token of the page before, or leave it empty.",
            )
        start = int(token or 0)
        key = PolicyKeys(job, policy).versions
        entries, count = await self._database.call_each(
            [("LRANGE", key, start, start + size - 1), ("LLEN", key)]
        )
        more = start + size < count
        return [_parse(entry) for entry in entries], str(start + size) if more else ""

    async def all(self, job: str, policy: str) -> list[store_pb.PolicyVersion]:
        """Return all versions of a policy, oldest first."""
        entries = await self._database.call("LRANGE", PolicyKeys(job, policy).versions, 0, -1)
        return [_parse(entry) for entry in entries]


def version_of_commit(commit: store_pb.StepCommit) -> bytes:
    """Return the entry, serialized, that a commit adds to the versions of its policy."""
    return store_pb.PolicyVersion(
        weights=commit.weights,
        step=commit.step + 1,
        published_at=_now(),
        outcome=commit.outcome,
    ).SerializeToString()


def checksum_conflict(weights: common_pb.WeightsRef) -> FailedPrecondition:
    """Return the error for a version that is known with other content."""
    return FailedPrecondition(
        f"version {weights.version} of policy {weights.policy} is known with another checksum than "
        f"{weights.checksum}",
        kind="checksum_conflict",
        field="weights.checksum",
        value=weights.checksum,
        remedy="The training state of that version was lost or changed; submit a new job.",
    )


def version_gap(
    weights: common_pb.WeightsRef, steps_done: int, version: int, what: str
) -> FailedPrecondition:
    """Return the error for a version that does not follow the newest one.

    `steps_done` and `version`: of the newest one; -1 steps if there is none.
    """
    if steps_done == _NONE:
        return FailedPrecondition(
            f"policy {weights.policy} has no version: {what}",
            kind="version_gap",
            field="weights.version",
            value=weights.version,
            remedy="Record the policy's first weights with OpenVersion.",
        )
    return FailedPrecondition(
        f"policy {weights.policy} has done {steps_done} steps and is at version {version}: {what}",
        kind="version_gap",
        field="weights.version",
        value=weights.version,
        remedy="Bind the policy at its newest version, and do its next step.",
    )


def _parse(entry: bytes) -> store_pb.PolicyVersion:
    """Return the version whose stored form is `<steps done> <version> NEWLINE <bytes>`."""
    return store_pb.PolicyVersion.FromString(entry.partition(b"\n")[2])


def _now() -> Timestamp:
    now = Timestamp()
    now.FromNanoseconds(time.time_ns())
    return now
