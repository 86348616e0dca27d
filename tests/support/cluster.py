"""A cluster in one event loop: the real orchestrator and experience store, fake workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from services.chassis.app import RunningServer
from services.chassis.settings import ServiceSettings
from services.experience_store.server import StoreSettings
from services.experience_store.server import make_service as make_store
from services.orchestrator.server import make_service as make_orchestrator
from services.orchestrator.settings import OrchestratorSettings
from tests.support.fake_rollout import FakeRollout, RolloutScript
from tests.support.fake_trainer import FakeTrainer, TrainerScript
from tests.support.jobs import job_text
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE
from troupe.rpc import connect, new_id
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1.experience_store_pb2_grpc import ExperienceStoreStub
from troupe.v1.orchestrator_pb2_grpc import OrchestratorStub

ENDED = (common_pb.JOB_STATE_SUCCEEDED, common_pb.JOB_STATE_FAILED, common_pb.JOB_STATE_CANCELLED)


def job_yaml(
    name: str = "job", *, policies: Iterable[str] = ("solver", "checker"), **over: Any
) -> str:
    """A small job of one agent per policy: 2 steps of 2 queries, 2 trajectories each.

    `over` replaces or adds fields; "section.field" reaches into a section.
    """
    job: dict[str, Any] = {
        "name": name,
        "workflow": "examples.nowhere:workflow",
        "tasks": {"source": "examples.nowhere:Tasks"},
        "agents": {policy: {"policy": policy} for policy in policies},
        "policies": {
            policy: {"model": {"config": {"model_type": "qwen3"}, "tokenizer": "somewhere"}}
            for policy in policies
        },
        "pipeline": {"steps": 2, "queries_per_step": 2, "group_size": 2},
        "limits": {"step_seconds": PATIENCE},
        "logging": {"tensorboard": False},
    }
    return job_text(job, over)


class Cluster:
    """Starts and stops parts; calls the orchestrator as a user would."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self.directory = directory
        self._common: dict[str, Any] = {
            "redis_url": redis_url,
            "data_dir": directory,
            "orchestrator_address": f"127.0.0.1:{free_port()}",
            "experience_store_address": f"127.0.0.1:{free_port()}",
            "reward_address": f"127.0.0.1:{free_port()}",
            "drain_seconds": 0,
            "stream_drain_seconds": 0,
        }
        self.settings = self._settings(self._common["orchestrator_address"])
        self._store: RunningServer[StoreSettings] | None = None
        self.orchestrator: RunningServer[OrchestratorSettings] | None = None
        self.rollouts: list[FakeRollout] = []
        self.trainers: list[FakeTrainer] = []
        client = ServiceSettings(**self._common).client()
        self._channel = connect(self._common["orchestrator_address"], client)
        self.api = OrchestratorStub(self._channel)
        self._store_channel = connect(self._common["experience_store_address"], client)
        self.store = ExperienceStoreStub(self._store_channel)

    async def open(self) -> None:
        """Start store and orchestrator."""
        await self.start_store()
        await self.start_orchestrator()

    async def start_store(self, **own: Any) -> None:
        """Start the experience store with its own settings, or restart it."""
        port = int(self._common["experience_store_address"].rpartition(":")[2])
        settings = StoreSettings(**self._common, port=port, **own)
        self._store = await _serve(RunningServer(make_store, settings))

    async def stop_store(self) -> None:
        """Stop the experience store; its state is in Redis."""
        server, self._store = self._store, None
        if server is not None:
            await server.close()

    async def start_orchestrator(self) -> None:
        """Start it, or start it again."""
        self.orchestrator = await _serve(RunningServer(make_orchestrator, self.settings))

    async def stop_orchestrator(self) -> None:
        """Stop it as a crash does, as far as the others can tell: nothing is written."""
        server, self.orchestrator = self.orchestrator, None
        if server is not None:
            await server.close()

    async def add_rollout(self, script: RolloutScript | None = None, port: int = 0) -> FakeRollout:
        """Start a rollout worker."""
        port = port or free_port()
        settings = ServiceSettings(**self._common, port=port, worker_id=new_id("rollout")[:14])
        worker = FakeRollout(settings, script)
        await worker.up()
        self.rollouts.append(worker)
        return worker

    async def add_trainer(self, script: TrainerScript | None = None, port: int = 0) -> FakeTrainer:
        """Start a trainer worker."""
        port = port or free_port()
        settings = ServiceSettings(**self._common, port=port, worker_id=new_id("trainer")[:14])
        worker = FakeTrainer(settings, script)
        await worker.up()
        self.trainers.append(worker)
        return worker

    async def close(self) -> None:
        """Stop everything."""
        await self.stop_orchestrator()
        await asyncio.gather(*(worker.down() for worker in (*self.rollouts, *self.trainers)))
        await self.stop_store()
        await self._channel.close(None)
        await self._store_channel.close(None)

    async def submit(self, text: str, job_id: str = "") -> str:
        """Submit a job; its id."""
        request = orchestrator_pb.SubmitJobRequest(
            request_id=new_id("submit"), spec=text, job_id=job_id
        )
        return (await self.api.SubmitJob(request)).job.job_id

    async def job(self, job_id: str) -> orchestrator_pb.Job:
        """The job now."""
        return (await self.api.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))).job

    async def wait(
        self, job_id: str, states: Iterable[int] = ENDED, seconds: float = PATIENCE
    ) -> orchestrator_pb.Job:
        """Wait until the job is in one of `states`."""
        wanted = set(states)
        return await self.until(job_id, lambda job: job.state in wanted, seconds)

    async def until(
        self, job_id: str, good: Callable[[orchestrator_pb.Job], bool], seconds: float = PATIENCE
    ) -> orchestrator_pb.Job:
        """Wait until the job is `good`."""
        deadline = time.monotonic() + seconds
        while True:
            job = await self.job(job_id)
            if good(job):
                return job
            if time.monotonic() > deadline:
                raise AssertionError(f"job is {job.state}, {job.activity!r}: {job.problem}")
            await asyncio.sleep(0.02)

    async def events(self, job_id: str) -> list[orchestrator_pb.JobEvent]:
        """The log of a job that has ended."""
        request = orchestrator_pb.WatchJobRequest(job_id=job_id)
        return [event async for event in self.api.WatchJob(request, timeout=PATIENCE)]

    async def notices(self, job_id: str) -> list[str]:
        """Texts of the notices of a job that has ended."""
        events = await self.events(job_id)
        return [event.notice.text for event in events if event.HasField("notice")]

    async def pause(self, job_id: str) -> orchestrator_pb.Job:
        """Pause."""
        request = orchestrator_pb.PauseJobRequest(request_id=new_id("pause"), job_id=job_id)
        return (await self.api.PauseJob(request)).job

    async def submit_paused(self) -> str:
        """Submit a job of two steps and pause it after the first; its id."""
        self.rollouts[0].script.seconds = 0.1
        job_id = await self.submit(job_yaml())
        await self.until(job_id, lambda job: "trajectories" in job.activity)
        await self.pause(job_id)
        job = await self.wait(job_id, (common_pb.JOB_STATE_PAUSED,))
        assert job.step == 1
        return job_id

    async def resume(
        self, job_id: str, spec: str = "", overrides: Mapping[str, str] | None = None
    ) -> orchestrator_pb.Job:
        """Resume."""
        request = orchestrator_pb.ResumeJobRequest(
            request_id=new_id("resume"), job_id=job_id, spec=spec, overrides=overrides
        )
        return (await self.api.ResumeJob(request)).job

    async def cancel(self, job_id: str, reason: str = "") -> orchestrator_pb.Job:
        """Cancel."""
        request = orchestrator_pb.CancelJobRequest(
            request_id=new_id("cancel"), job_id=job_id, reason=reason
        )
        return (await self.api.CancelJob(request)).job

    async def step(self, job_id: str, step: int) -> store_pb.GetStepResponse:
        """Return the experience store's record of a step."""
        return await self.store.GetStep(store_pb.GetStepRequest(job_id=job_id, step=step))

    async def check_accounts(self, job_id: str, steps: int, policies: Iterable[str]) -> None:
        """Every sample of every step is trained or dropped; every policy committed every step."""
        versions = dict.fromkeys(policies, 0)
        for step in range(steps):
            found = await self.step(job_id, step)
            assert found.sealed, f"step {step} is not sealed"
            assert {one.policy for one in found.commits} == set(versions)
            for counts in found.counts:
                left = counts.pending + counts.ready + counts.claimed
                assert left == 0, f"step {step}: {counts}"
            for commit in found.commits:
                versions[commit.policy] += commit.outcome == store_pb.STEP_OUTCOME_APPLIED
                assert commit.weights.version == versions[commit.policy]
        assert dict((await self.job(job_id)).versions) == versions

    def _settings(self, address: str) -> OrchestratorSettings:
        return OrchestratorSettings(
            **self._common,
            port=int(address.rpartition(":")[2]),
            heartbeat_seconds=0.1,
            lost_after_beats=5,
            activity_seconds=0.05,
            workers_timeout_seconds=PATIENCE,
            cleanup_seconds=1,
        )


async def _serve(server: RunningServer[Any]) -> RunningServer[Any]:
    await server.open()
    await server.become_ready()
    return server
