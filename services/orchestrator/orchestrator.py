"""The orchestrator without gRPC: its parts, wired once."""

from __future__ import annotations

from typing import Final

import grpc

from services.orchestrator.binder import Binder
from services.orchestrator.catalogue import Catalogue
from services.orchestrator.cluster import Cluster
from services.orchestrator.context import Shared
from services.orchestrator.crash_loops import CrashLoopGuard
from services.orchestrator.event_log import EventLog
from services.orchestrator.functions import Functions
from services.orchestrator.generation import Generation
from services.orchestrator.job_store import JobStore
from services.orchestrator.jobs import Jobs
from services.orchestrator.ledger import Ledger
from services.orchestrator.populations.store import PopulationStore
from services.orchestrator.recovery import recover
from services.orchestrator.redis_access import RedisAccess
from services.orchestrator.settings import OrchestratorSettings
from services.orchestrator.trajectories import RecentTrajectories
from services.orchestrator.workers import WorkerRegistry
from troupe.rpc import NO_RETRY, RetryPolicy, connect
from troupe.v1.experience_store_pb2_grpc import ExperienceStoreStub
from troupe.v1.reward_pb2_grpc import RewardStub

# A job rather waits for its experience store than fails; what bounds a job's waits are its limits.
_PATIENT: Final = RetryPolicy(max_attempts=100_000)
_PATIENT_SECONDS: Final = 7200.0


class Orchestrator:
    """Jobs, their durable state, the workers, and the picture of it all."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._redis = RedisAccess(settings.redis_url, disk=settings.data_dir)
        log = EventLog(self._redis)
        patient = settings.client(retry=_PATIENT).model_copy(
            update={"deadline_seconds": _PATIENT_SECONDS}
        )
        self._experience = connect(settings.experience_store_address, patient)
        hasty = settings.client(retry=NO_RETRY)
        probed = {
            "experience_store": settings.experience_store_address,
            "reward": settings.reward_address,
        }
        self._probes: dict[str, tuple[str, grpc.aio.Channel]] = {
            name: (address, connect(address, hasty)) for name, address in probed.items()
        }
        self._reward = connect(settings.reward_address, hasty)
        workers = WorkerRegistry(settings)
        store = JobStore(self._redis, log, data_dir=settings.data_dir.absolute())
        self.shared = Shared(
            settings=settings,
            store=store,
            ledger=Ledger(self._redis),
            log=log,
            trajectories=RecentTrajectories(self._redis, settings.recent_trajectories),
            populations=PopulationStore(self._redis, store),
            workers=workers,
            binder=Binder(workers),
            experience=ExperienceStoreStub(self._experience),
            reward=RewardStub(self._reward),
            in_flight={},
        )
        self.functions = Functions(Catalogue(self._redis), self.shared.reward)
        self._guard = CrashLoopGuard(self._redis, settings.survival_seconds)
        self.jobs = Jobs(self.shared, self._guard, self.functions.check_job)
        self.generation = Generation(self.shared, self.jobs)
        self.cluster = Cluster(
            self.shared.workers,
            self.shared.binder,
            self.shared.store,
            self._probes,
            settings.probe_seconds,
        )

    async def start(self) -> None:
        """Wait for Redis, then continue every job that had not ended."""
        await self._redis.ping()
        self.shared.workers.start()
        self.shared.binder.start()
        self.functions.start()
        await recover(self.shared.store, self.jobs, self._guard)

    async def stop(self) -> None:
        """Stop running jobs; what they are is in Redis and in the experience store."""
        await self.jobs.stop()
        await self._guard.close()
        await self.functions.stop()
        await self.shared.binder.close()
        await self.shared.workers.close()
        probes = (channel for _, channel in self._probes.values())
        for channel in (self._experience, self._reward, *probes):
            await channel.close(None)
        await self._redis.close()
