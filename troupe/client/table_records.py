"""What the SDK returns about the experience store: samples, tables, audits."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from troupe import tensors
from troupe.client.records import Version, word
from troupe.v1 import common_pb2
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One trainable row of one policy.

    Token ids, log-probs and columns are there until the sample's step is committed; then its
    payload is freed and they are None and empty.
    """

    id: str
    policy: str
    query_id: str
    trajectory_id: str
    agent: str
    turn: int
    group_id: str
    # "pending", "ready", "claimed", "trained", "dropped"
    state: str
    reward: float | None
    # Oldest version that drew a token of it; None when freed.
    version: int | None
    uses: int
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    logprobs: list[float] | None
    # User-defined columns: lists of numbers, JSON values, or {"ref": key} of a large one.
    columns: dict[str, Any]

    @classmethod
    def of(cls, sample: es.Sample) -> Sample:
        """From the wire. Raises `ChecksumError` for a damaged tensor."""
        there = sample.HasField("response_ids")
        return cls(
            id=sample.sample_id,
            policy=sample.policy,
            query_id=sample.query_id,
            trajectory_id=sample.trajectory_id,
            agent=sample.agent,
            turn=sample.turn,
            group_id=sample.group_id,
            state=word(common_pb2.SampleState, sample.state),
            reward=sample.reward if sample.HasField("reward") else None,
            version=min((span.version for span in sample.versions), default=None),
            uses=sample.uses,
            prompt_ids=tensors.from_proto(sample.prompt_ids).tolist() if there else None,
            response_ids=tensors.from_proto(sample.response_ids).tolist() if there else None,
            logprobs=tensors.from_proto(sample.logprobs).tolist() if there else None,
            columns={name: _value(column) for name, column in sample.columns.items()},
        )


@dataclass(frozen=True)
class TableSummary:
    """What one policy's table holds: uncommitted steps by state, totals since the job began."""

    policy: str
    # Of the newest commit; -1 before the first.
    version: int
    committed_step: int
    newest_step: int
    pending: int
    ready: int
    claimed: int
    trained: int
    dropped: int
    drop_reasons: dict[str, int]
    oldest_pending_seconds: float
    oldest_pending_sample: str
    payload_bytes: int

    @property
    def lag(self) -> int:
        """Open steps that this policy has not committed."""
        return max(0, self.newest_step - self.committed_step)


@dataclass(frozen=True)
class Tables:
    """All tables of a job, and the memory of the store that they are in."""

    tables: tuple[TableSummary, ...]
    payload_bytes: int
    # 0: no mark is set.
    high_water_bytes: int
    over_high_water: bool
    redis_bytes: int

    @classmethod
    def of(cls, reply: es.DescribeTablesResponse) -> Tables:
        """From the wire."""
        return cls(
            tables=tuple(_record(TableSummary, one) for one in reply.tables),
            payload_bytes=reply.payload_bytes,
            high_water_bytes=reply.high_water_bytes,
            over_high_water=reply.over_high_water,
            redis_bytes=reply.redis_bytes,
        )


@dataclass(frozen=True)
class PolicyAudit:
    """What became of every sample of one policy."""

    policy: str
    appended: int
    trained: int
    dropped: int
    # In steps that are not committed yet.
    live: int
    drop_reasons: dict[str, int]
    steps_applied: int
    steps_skipped: int
    steps_empty: int
    version: int
    lost: int
    duplicated: int


@dataclass(frozen=True)
class Audit:
    """Whether every sample was trained once or dropped with a reason."""

    policies: tuple[PolicyAudit, ...]
    # What contradicts the promise, in words; empty when it holds.
    violations: tuple[str, ...]
    steps: int
    trajectories_admitted: int
    trajectories_ended: int
    trajectories_by_state: dict[str, int]
    # Newest version of every policy, as the ledger holds it.
    versions: tuple[Version, ...]

    @property
    def passed(self) -> bool:
        """Nothing contradicts the promise."""
        return not self.violations and not self.lost and not self.duplicated

    @property
    def lost(self) -> int:
        """Samples that are neither trained nor dropped nor live."""
        return sum(one.lost for one in self.policies)

    @property
    def duplicated(self) -> int:
        """Uses of samples beyond what the job allows."""
        return sum(one.duplicated for one in self.policies)

    @classmethod
    def of(cls, reply: pb.AuditJobResponse) -> Audit:
        """From the wire."""
        tables = reply.tables
        return cls(
            policies=tuple(_record(PolicyAudit, one) for one in tables.policies),
            violations=tuple(reply.violations),
            steps=tables.steps,
            trajectories_admitted=tables.trajectories_admitted,
            trajectories_ended=tables.trajectories_ended,
            trajectories_by_state=dict(tables.trajectories_by_state),
            versions=tuple(Version.of(version) for version in reply.versions),
        )


def _record(kind: type[T], message: es.TableSummary | es.PolicyAudit) -> T:
    """A record whose fields are named as those of the message."""
    maps = {"drop_reasons": dict(message.drop_reasons)}
    named = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: maps.get(name, getattr(message, name)) for name in named})


def _value(column: es.Column) -> Any:
    match column.WhichOneof("value"):
        case "tensor":
            return tensors.from_proto(column.tensor).tolist()
        case "json":
            return json.loads(column.json)
        case "ref":
            return {"ref": column.ref}
    return None
