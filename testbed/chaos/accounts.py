"""What became of every sample and every version of a job, as the services account for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from troupe.client.records import Version
from troupe.rpc.channel import connect
from troupe.rpc.errors import Internal, TroupeError, Unimplemented
from troupe.rpc.settings import ClientSettings
from troupe.v1 import orchestrator_pb2 as pb
from troupe.v1 import orchestrator_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class Accounts:
    """The audit of a job (see `AuditTables`), summed over its policies."""

    appended: int = 0
    trained: int = 0
    dropped: int = 0
    # In steps that are not committed: nobody's loss while the job runs, a loss when it has ended.
    live: int = 0
    lost: int = 0
    duplicated: int = 0
    drop_reasons: dict[str, int] = field(default_factory=dict)
    trajectories_admitted: int = 0
    trajectories_ended: int = 0
    violations: tuple[str, ...] = ()
    # Why there are no accounts.
    missing: str = ""

    @property
    def unaccounted(self) -> int:
        """Samples and trajectories that are neither trained nor dropped, once the job has ended."""
        return self.lost + self.live + self.trajectories_admitted - self.trajectories_ended


async def audit(address: str, job_id: str, settings: ClientSettings) -> Accounts:
    """The accounts of a job, from the orchestrator at `address`.

    `missing` says why where the cluster cannot give any. Raises other `TroupeError`s.
    """
    async with connect(address, settings) as channel:
        stub: pb_grpc.OrchestratorAsyncStub = pb_grpc.OrchestratorStub(channel)
        try:
            answer = await stub.AuditJob(pb.AuditJobRequest(job_id=job_id))
        except (Unimplemented, Internal) as error:
            return Accounts(missing=f"this cluster's experience store gives no audit: {error}")
        except TroupeError as error:
            if error.code is grpc.StatusCode.UNKNOWN:
                return Accounts(missing=f"the audit broke off: {error}")
            raise
    return accounts_of(answer)


def accounts_of(answer: pb.AuditJobResponse) -> Accounts:
    """From the wire."""
    tables = answer.tables
    reasons: dict[str, int] = {}
    for policy in tables.policies:
        for reason, count in policy.drop_reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Accounts(
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
    """The last entry of a policy's ledger."""
    return max(versions, key=lambda one: (one.version, one.step), default=None)
