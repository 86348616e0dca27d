"""The orchestrator double as a process that plays its jobs by itself and keeps them on disk.

Stands in for `services.orchestrator` in tests of the CLI with an embedded cluster: every job goes
through its states, a step every TICK seconds, can be paused and resumed, and is still there (and
goes on) after a restart. A job named "doomed" fails in its second step; one named "deaf" never
gets from PAUSING to PAUSED.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.support.fake_orchestrator import FakeOrchestrator, S
from troupe.rpc.errors import InvalidArgument
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

TICK = 0.08


class PlayingOrchestrator(FakeOrchestrator):
    """Moves its jobs by itself."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__()
        self._home = data_dir / "fake-jobs"
        self._home.mkdir(parents=True, exist_ok=True)
        self._playing: dict[str, asyncio.Task[None]] = {}

    def load(self) -> None:
        """Take up the jobs of an earlier life."""
        for path in self._home.glob("*.job"):
            job = orchestrator_pb.Job.FromString(path.read_bytes())
            self.jobs[job.job_id] = job
            log = orchestrator_pb.ListMetricsResponse.FromString(
                path.with_suffix(".log").read_bytes()
            )
            self.logs[job.job_id] = [
                orchestrator_pb.JobEvent(event_id=f"{i + 1}-0", metrics=row)
                for i, row in enumerate(log.rows)
            ]
            self._play(job.job_id)

    async def SubmitJob(
        self, request: orchestrator_pb.SubmitJobRequest, context: Any
    ) -> orchestrator_pb.SubmitJobResponse:
        reply = await super().SubmitJob(request, context)
        self.jobs[reply.job.job_id].directory = f"{self._home.parent}/{reply.job.job_id}"
        self._play(reply.job.job_id)
        return reply

    async def ResumeJob(
        self, request: orchestrator_pb.ResumeJobRequest, context: Any
    ) -> orchestrator_pb.ResumeJobResponse:
        reply = await super().ResumeJob(request, context)
        self._play(request.job_id)
        return reply

    async def PauseJob(
        self, request: orchestrator_pb.PauseJobRequest, context: Any
    ) -> orchestrator_pb.PauseJobResponse:
        await self._note("PauseJob", request, context)
        await self._move(request.job_id, context, S.JOB_STATE_PAUSING)
        return orchestrator_pb.PauseJobResponse(job=self.jobs[request.job_id])

    def _play(self, job_id: str) -> None:
        self._playing[job_id] = asyncio.create_task(self._run(job_id))

    async def _run(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.state == S.JOB_STATE_SUBMITTED:
            await self._go(job, S.JOB_STATE_STARTING, S.JOB_STATE_RUNNING)
        if not job.before:
            job.before["team_success"] = 0.25
            await self.step(job_id, 0, evaluation__team__mean=0.25)
        while job.state == S.JOB_STATE_RUNNING and job.step < job.total_steps:
            text = f"step {job.step + 1}: 3 of 8 trajectories"
            await self.log(
                job_id,
                orchestrator_pb.JobEvent(
                    activity=orchestrator_pb.Activity(text=text, done=3, total=8)
                ),
            )
            await asyncio.sleep(TICK)
            if job.name == "doomed" and job.step == 1:
                problem = InvalidArgument(
                    "no such directory.", field="policies.solver.model.path", value="/models/solver"
                )
                await self.move(job_id, S.JOB_STATE_FAILED, problem=problem)
                return
            done = (job.step + 1) / job.total_steps
            values = {
                "reward__solver__mean": done, "reward__checker__mean": done / 2,
                "reward__mean": done, "team__mean": done, "solver__loss__policy": 0.1,
                "solver__grad_norm": 1.5, "rollout__tokens_per_second": 900.0,
                "step__seconds": TICK, "solver__samples": 8.0, "solver__skipped": 0.0,
            }  # fmt: skip
            job.versions["solver"] = job.step + 1
            await self.step(job_id, job.step + 1, **values)
            self._save(job)
        if job.state == S.JOB_STATE_PAUSING and job.name != "deaf":
            await self._go(job, S.JOB_STATE_PAUSED)
        elif job.state == S.JOB_STATE_RUNNING:
            job.after["team_success"] = 0.875
            await self._go(job, S.JOB_STATE_SUCCEEDED)

    async def _go(self, job: orchestrator_pb.Job, *targets: int) -> None:
        await self.move(job.job_id, *targets)
        self._save(job)

    def _save(self, job: orchestrator_pb.Job) -> None:
        rows = [e.metrics for e in self.logs[job.job_id] if e.HasField("metrics")]
        path = self._home / f"{job.job_id}.job"
        path.with_suffix(".log").write_bytes(
            orchestrator_pb.ListMetricsResponse(rows=rows).SerializeToString()
        )
        path.with_suffix(".new").write_bytes(job.SerializeToString())
        path.with_suffix(".new").replace(path)


async def main() -> None:
    """Serve on TROUPE_PORT until SIGTERM."""
    double = PlayingOrchestrator(Path(os.environ["TROUPE_DATA_DIR"]))
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    orchestrator_grpc.add_OrchestratorServicer_to_server(double, server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    server.add_insecure_port(f"127.0.0.1:{os.environ['TROUPE_PORT']}")
    double.load()
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    await done.wait()
    await server.stop(grace=0.2)


if __name__ == "__main__":
    asyncio.run(main())
