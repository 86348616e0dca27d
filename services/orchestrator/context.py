"""State that all jobs of an orchestrator share, and the context of one job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.orchestrator.crash_loops import SharedDeaths
from services.orchestrator.jobs.queue import JobQueue
from services.orchestrator.placement.nodes import NodeRegistry
from services.orchestrator.placement.trainer_scheduler import TrainerScheduler
from services.orchestrator.placement.workers import WorkerRegistry
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.host_history import HostHistory
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.records import JobRecord
from services.orchestrator.state.trajectories import KeptTrajectories
from services.orchestrator.state.weight_versions import WeightVersions
from troupe.job import JobSpec
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

if TYPE_CHECKING:  # types only
    from services.orchestrator.populations.state import PopulationStore
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub


@dataclass(frozen=True)
class Shared:
    """Durable state, workers and clients of other services, used by all jobs."""

    settings: OrchestratorSettings
    store: JobStore
    weight_versions: WeightVersions
    log: EventLog
    trajectories: KeptTrajectories
    populations: PopulationStore
    workers: WorkerRegistry
    nodes: NodeRegistry
    hosts: HostHistory
    trainer_scheduler: TrainerScheduler
    experience: ExperienceStoreAsyncStub
    reward: RewardAsyncStub
    # Trajectories in flight by job id.
    in_flight: dict[str, int]
    queue: JobQueue
    deaths: SharedDeaths = field(default_factory=SharedDeaths)


@dataclass(frozen=True)
class JobContext:
    """The context of one job. Writes carry `epoch`, which fences off earlier runners."""

    shared: Shared
    job_id: str
    epoch: int
    spec: JobSpec
    spec_json: str
    directory: Path
    # Steps and evaluations in which a kind of trouble occurred, by kind.
    complaints: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, shared: Shared, record: JobRecord, epoch: int) -> JobContext:
        """Return the context of a stored job. Raises `FailedPrecondition` for a job of an older
        release that this one cannot run."""
        spec = record.decided_spec()
        own = record.decided or record.origins
        text = spec.model_dump_json() if own else record.spec_json
        return cls(shared, record.job_id, epoch, spec, text, record.directory)

    async def info(self, text: str) -> None:
        """Log information for the user."""
        await self._notice(orchestrator_pb.Notice.SEVERITY_INFO, text)

    async def warn(self, text: str) -> None:
        """Log a fault that Troupe handles by itself."""
        await self._notice(orchestrator_pb.Notice.SEVERITY_WARNING, text)

    async def error(self, text: str) -> None:
        """Log a fault that costs the user something, such as a checkpoint."""
        await self._notice(orchestrator_pb.Notice.SEVERITY_ERROR, text)

    def show(self, text: str, *, step: int = 0, done: float = 0.0, total: float = 0.0) -> None:
        """Show followers the job's present activity, without storing it."""
        self.shared.log.show(
            self.job_id,
            orchestrator_pb.Activity(
                text=text,
                step=step,
                total_steps=self.spec.pipeline.steps,
                done=done,
                total=total,
            ),
        )

    async def _notice(self, severity: orchestrator_pb.Notice.Severity.ValueType, text: str) -> None:
        await self.shared.log.notice(self.job_id, severity, text)
