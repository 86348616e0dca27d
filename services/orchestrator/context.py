"""What the parts that run one job share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from services.orchestrator.crash_loops import SharedDeaths
from services.orchestrator.placement.trainer_scheduler import TrainerScheduler
from services.orchestrator.placement.workers import WorkerRegistry
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.state.event_log import EventLog
from services.orchestrator.state.job_store import JobStore
from services.orchestrator.state.trajectories import RecentTrajectories
from services.orchestrator.state.weight_versions import WeightVersions
from troupe.job import JobSpec
from troupe.v1 import orchestrator_pb2 as orch

if TYPE_CHECKING:  # types only
    from services.orchestrator.populations.state import PopulationStore
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub


@dataclass(frozen=True)
class Shared:
    """What all jobs share: the durable state, the workers, the experience store."""

    settings: OrchestratorSettings
    store: JobStore
    ledger: WeightVersions
    log: EventLog
    trajectories: RecentTrajectories
    populations: PopulationStore
    workers: WorkerRegistry
    binder: TrainerScheduler
    experience: ExperienceStoreAsyncStub
    reward: RewardAsyncStub
    # Trajectories dispatched and not ended, per job.
    in_flight: dict[str, int]
    deaths: SharedDeaths = field(default_factory=SharedDeaths)


@dataclass(frozen=True)
class JobContext:
    """One job as its runner knows it. `epoch` fences off the runners before it."""

    shared: Shared
    job_id: str
    epoch: int
    spec: JobSpec
    spec_json: str
    directory: Path
    # Steps and evaluations in which trajectories failed, by kind of reason.
    complaints: Counter[str] = field(default_factory=Counter)

    async def info(self, text: str) -> None:
        """Log something worth knowing."""
        await self._notice(orch.Notice.SEVERITY_INFO, text)

    async def warn(self, text: str) -> None:
        """Log a fault that is being dealt with."""
        await self._notice(orch.Notice.SEVERITY_WARNING, text)

    async def error(self, text: str) -> None:
        """Log a fault that costs the user something."""
        await self._notice(orch.Notice.SEVERITY_ERROR, text)

    def show(self, text: str, *, step: int = 0, done: float = 0.0, total: float = 0.0) -> None:
        """What the job does now."""
        self.shared.log.show(
            self.job_id,
            orch.Activity(
                text=text,
                step=step,
                total_steps=self.spec.pipeline.steps,
                done=done,
                total=total,
            ),
        )

    async def _notice(self, severity: orch.Notice.Severity.ValueType, text: str) -> None:
        await self.shared.log.notice(self.job_id, severity, text)
