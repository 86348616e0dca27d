"""Records of samples, of the tables that hold them, and of their audit."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from typing import Any, Self

from troupe import tensors
from troupe.client.conversion import Record
from troupe.client.records.jobs import Version
from troupe.v1 import experience_store_pb2 as store_pb


@dataclass(frozen=True)
class Sample(Record, id_from="sample_id"):
    """One trainable row (a turn) of one policy.

    When the sample's step is committed, its contents are freed: from then on, token ids and
    log-probs are None and `columns` is empty.
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
    # The oldest policy version that generated one of its tokens; None when freed.
    version: int | None
    uses: int
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    logprobs: list[float] | None
    # User-defined columns: lists of numbers, JSON values, or {"ref": key} of a large one.
    columns: dict[str, Any]
    # What tokens of the prompt stand for: kind, media_type, sha256, position, tokens, and the
    # content: data in base64, or ref, the key of a large one.
    payloads: list[dict[str, Any]]

    @classmethod
    def of(cls, message: store_pb.Sample, **given: Any) -> Self:
        """Make a sample from the wire. Raises `ChecksumError` for a damaged tensor."""
        there = message.HasField("response_ids")
        for name in ("prompt_ids", "response_ids", "logprobs"):
            given[name] = tensors.from_proto(getattr(message, name)).tolist() if there else None
        return super().of(
            message,
            version=min((span.version for span in message.versions), default=None),
            columns={name: _column(column) for name, column in message.columns.items()},
            payloads=[_payload(one) for one in message.payloads],
            **given,
        )


@dataclass(frozen=True)
class TableSummary(Record):
    """One policy's table: samples of uncommitted steps by state, and totals since the job began."""

    policy: str
    # The version of the newest commit; -1 before the first.
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
        """The number of open steps that this policy has not committed."""
        return max(0, self.newest_step - self.committed_step)


@dataclass(frozen=True)
class Tables(Record):
    """All tables of a job, and the memory use of the experience store."""

    tables: tuple[TableSummary, ...]
    payload_bytes: int
    # Bytes of rows above which rollout is slowed down; 0: no limit.
    high_water_bytes: int
    over_high_water: bool
    redis_bytes: int


@dataclass(frozen=True)
class PolicyAudit(Record):
    """How many samples of one policy were trained, dropped, lost or used too often."""

    policy: str
    appended: int
    trained: int
    dropped: int
    # Samples of steps that are not committed yet.
    live: int
    drop_reasons: dict[str, int]
    steps_applied: int
    steps_skipped: int
    steps_empty: int
    version: int
    lost: int
    duplicated: int


@dataclass(frozen=True)
class Audit(Record, part="tables"):
    """An audit of a job: whether every sample was trained once or dropped with a reason."""

    policies: tuple[PolicyAudit, ...]
    # A description of each contradiction.
    violations: tuple[str, ...]
    steps: int
    trajectories_admitted: int
    trajectories_ended: int
    trajectories_by_state: dict[str, int]
    # Newest published version of every policy.
    versions: tuple[Version, ...]

    @property
    def passed(self) -> bool:
        """Whether no violation, lost or duplicated sample was found."""
        return not self.violations and not self.lost and not self.duplicated

    @property
    def lost(self) -> int:
        """The number of samples that are neither trained nor dropped nor live."""
        return sum(one.lost for one in self.policies)

    @property
    def duplicated(self) -> int:
        """The number of uses of samples beyond the job's limit."""
        return sum(one.duplicated for one in self.policies)


def _payload(payload: store_pb.Payload) -> dict[str, Any]:
    large = payload.HasField("ref")
    return {
        "kind": payload.kind,
        "media_type": payload.media_type,
        "sha256": payload.digest.hex(),
        "position": payload.position,
        "tokens": payload.tokens,
        **({"ref": payload.ref} if large else {"data": b64encode(payload.data).decode()}),
    }


def _column(column: store_pb.Column) -> Any:
    match column.WhichOneof("value"):
        case "tensor":
            return tensors.from_proto(column.tensor).tolist()
        case "json":
            return json.loads(column.json)
        case "ref":
            return {"ref": column.ref}
    return None
