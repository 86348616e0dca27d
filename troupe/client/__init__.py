"""The client SDK: submit jobs, watch them, use what they trained. Blocking and asyncio."""

from troupe.client.aio import AsyncClient
from troupe.client.cluster_records import Binding, Cluster, Engine, Service, Worker
from troupe.client.errors import JobCancelled, JobFailed
from troupe.client.events import Activity, Event, MetricsLogged, Notice, StateChanged
from troupe.client.handle import AsyncJobHandle
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
from troupe.client.table_records import Audit, PolicyAudit, Sample, Tables, TableSummary

__all__ = [
    "Activity",
    "AsyncClient",
    "AsyncJobHandle",
    "Audit",
    "Binding",
    "Checkpoint",
    "Client",
    "Cluster",
    "Engine",
    "Event",
    "Generation",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobHandle",
    "JobState",
    "MetricsLogged",
    "MetricsRow",
    "Notice",
    "PolicyAudit",
    "Result",
    "Sample",
    "Service",
    "StateChanged",
    "TableSummary",
    "Tables",
    "Trajectory",
    "Turn",
    "Version",
    "Worker",
]
