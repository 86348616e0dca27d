"""The public names of the client SDK, which `troupe.client` has as its own."""

from troupe.client.aio import AsyncClient
from troupe.client.comparison import Comparison
from troupe.client.functions import AsyncFunctions
from troupe.client.handle import AsyncJobHandle
from troupe.client.records.cluster import (
    Binding,
    Cluster,
    Engine,
    Service,
    Worker,
)
from troupe.client.records.events import (
    Activity,
    Event,
    MetricsLogged,
    Notice,
    StateChanged,
)
from troupe.client.records.functions import (
    Function,
    Invocation,
    InvocationFailed,
    InvocationProgress,
    LogLine,
)
from troupe.client.records.jobs import (
    Checkpoint,
    Generation,
    Job,
    JobCancelled,
    JobFailed,
    JobState,
    MetricsRow,
    Result,
    Trajectory,
    Turn,
    Version,
)
from troupe.client.records.populations import (
    Match,
    Member,
    MemberRating,
    MetaStrategy,
    PayoffCell,
    Pool,
    Population,
    Slot,
)
from troupe.client.records.samples import (
    Audit,
    PolicyAudit,
    Sample,
    Tables,
    TableSummary,
)
from troupe.client.sync import Client, Functions, JobHandle

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
    "Comparison",
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
