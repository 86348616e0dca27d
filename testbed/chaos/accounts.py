"""A job's audit of samples and weight versions, as reported by the services."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from troupe.client.records.jobs import Version
from troupe.rpc.channel import connect
from troupe.rpc.errors import Internal, TroupeError, Unimplemented
from troupe.rpc.settings import ClientSettings
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc


@dataclass(frozen=True)
class SampleAudit:
    """Counts of a job's samples by outcome (`AuditTables`), summed over its policies."""

    appended: int = 0
    trained: int = 0
    dropped: int = 0
    # In uncommitted steps: lost if the job has ended, else still in use.
    live: int = 0
    lost: int = 0
    duplicated: int = 0
    drop_reasons: dict[str, int] = field(default_factory=dict)
    trajectories_admitted: int = 0
    trajectories_ended: int = 0
    violations: tuple[str, ...] = ()
    # The reason why the audit could not be read; empty if it was read.
    missing: str = ""

    @property
    def unaccounted(self) -> int:
        """Samples and trajectories of an ended job that were neither trained nor dropped."""
        return self.lost + self.live + self.trajectories_admitted - self.trajectories_ended


async def audit(address: str, job_id: str, settings: ClientSettings) -> SampleAudit:
    """Read a job's audit from the orchestrator at `address`.

    `missing` says why if the cluster has no audit. Raises every other `TroupeError`.
    """
    async with connect(address, settings) as channel:
        stub: orchestrator_grpc.OrchestratorAsyncStub = orchestrator_grpc.OrchestratorStub(channel)
        try:
            answer = await stub.AuditJob(orchestrator_pb.AuditJobRequest(job_id=job_id))
        except (Unimplemented, Internal) as error:
            return SampleAudit(missing=f"this cluster's experience store has no audit: {error}")
        except TroupeError as error:
            if error.code is grpc.StatusCode.UNKNOWN:
                return SampleAudit(missing=f"the audit broke off: {error}")
            raise
    return audit_of(answer)


def audit_of(answer: orchestrator_pb.AuditJobResponse) -> SampleAudit:
    """Convert the RPC's response."""
    tables = answer.tables
    reasons: dict[str, int] = {}
    for policy in tables.policies:
        for reason, count in policy.drop_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return SampleAudit(
        appended=sum(p.appended for p in tables.policies),
        trained=sum(p.trained for p in tables.policies),
        dropped=sum(p.dropped for p in tables.policies),
        live=sum(p.live for p in tables.policies),
        lost=sum(p.lost for p in tables.policies),
        duplicated=sum(p.duplicated for p in tables.policies),
        drop_reasons=reasons,
        trajectories_admitted=tables.trajectories_admitted,
        trajectories_ended=tables.trajectories_ended,
        violations=tuple(answer.violations),
    )


def newest(versions: list[Version]) -> Version | None:
    """Return the newest of a policy's weight versions, or None."""
    return max(versions, key=lambda one: (one.version, one.step), default=None)
