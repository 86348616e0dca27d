"""The client SDK: submit jobs, watch them, use what they trained. Blocking and asyncio."""

from troupe.client.aio import AsyncClient
from troupe.client.cluster_records import Binding, Cluster, Engine, Service, Worker
from troupe.client.errors import JobCancelled, JobFailed
from troupe.client.events import Activity, Event, MetricsLogged, Notice, StateChanged
from troupe.client.function_records import (
    Function,
    Invocation,
    InvocationFailed,
    InvocationProgress,
    LogLine,
)
from troupe.client.functions import AsyncFunctions
from troupe.client.handle import AsyncJobHandle
from troupe.client.population_records import (
    Match,
    Member,
    MemberRating,
    MetaStrategy,
    PayoffCell,
    Pool,
    Population,
    Slot,
)
from troupe.client.records import (
    Checkpoint,
    Generation,
    Job,
    JobState,
    MetricsRow,
    Result,
    Trajectory,
    Turn,
    Version,
)
from troupe.client.sync import Client, JobHandle
from troupe.client.sync_functions import Functions
from troupe.client.table_records import Audit, PolicyAudit, Sample, Tables, TableSummary

__all__ = [
    "Activity",
    "AsyncClient",
    "AsyncFunctions",
    "AsyncJobHandle",
    "Audit",
    "Binding",
    "Checkpoint",
    "Client",
    "Cluster",
    "Engine",
    "Event",
    "Function",
    "Functions",
    "Generation",
    "Invocation",
    "InvocationFailed",
    "InvocationProgress",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobHandle",
    "JobState",
    "LogLine",
    "Match",
    "Member",
    "MemberRating",
    "MetaStrategy",
    "MetricsLogged",
    "MetricsRow",
    "Notice",
    "PayoffCell",
    "PolicyAudit",
    "Pool",
    "Population",
    "Result",
    "Sample",
    "Service",
    "Slot",
    "StateChanged",
    "TableSummary",
    "Tables",
    "Trajectory",
    "Turn",
    "Version",
    "Worker",
]
