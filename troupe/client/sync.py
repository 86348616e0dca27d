"""The blocking client: the asyncio one, driven by a thread of its own.

Nothing is implemented here. tests/client checks that both have the same methods with the same
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from troupe.client.aio import AsyncClient
from troupe.client.cluster_records import Cluster
from troupe.client.events import Event
from troupe.client.handle import AsyncJobHandle
from troupe.client.loop import LoopThread
from troupe.client.population_records import Match, Population
from troupe.client.records import (
    Checkpoint,
    Generation,
    Job,
    JobState,
    MetricsRow,
    Result,
    Trajectory,
    Version,
)
from troupe.client.sampling import Messages
from troupe.client.specs import Spec
from troupe.client.sync_functions import Functions
from troupe.client.table_records import Audit, Sample, Tables
from troupe.rpc.settings import ClientSettings


class JobHandle:
    """One job of a cluster; see `AsyncJobHandle` for what each method does and raises."""

    def __init__(self, handle: AsyncJobHandle, loop: LoopThread) -> None:
        """Made by `Client.job` and `Client.submit`."""
        self.id = handle.id
        self._handle = handle
        self._loop = loop

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    def info(self) -> Job:
        """The job as it is now."""
        return self._loop.run(self._handle.info())

    def watch(self, after: str = "") -> Iterator[Event]:
        """Every event from the beginning (or after event id `after`) until the job has ended."""
        return self._loop.iterate(self._handle.watch(after))

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended, well or not."""
        return self._loop.run(self._handle.wait(timeout))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return what came of it."""
        return self._loop.run(self._handle.result(timeout))

    def pause(self) -> Job:
        """Admit no new query; what is in flight finishes."""
        return self._loop.run(self._handle.pause())

    def resume(self, spec: Spec | None = None) -> Job:
        """Continue a paused, failed or cancelled job from its last committed step."""
        return self._loop.run(self._handle.resume(spec))

    def cancel(self, reason: str = "") -> Job:
        """End the job without waiting for what is in flight."""
        return self._loop.run(self._handle.cancel(reason))

    def forget(self) -> Job:
        """Delete what the cluster's memory holds of the job, which has ended; its directory
        stays."""
        return self._loop.run(self._handle.forget())

    def versions(self, policy: str) -> list[Version]:
        """Published versions of a policy."""
        return self._loop.run(self._handle.versions(policy))

    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints on the trainer's disk."""
        return self._loop.run(self._handle.checkpoints())

    def export(self, policy: str, to: str | Path, version: int | None = None) -> Path:
        """Copy a checkpoint of `policy` into the new directory `to`."""
        return self._loop.run(self._handle.export(policy, to, version))

    def metrics(self, names: Sequence[str] = (), after_step: int = -1) -> list[MetricsRow]:
        """Metrics per step; `names` empty: all of them."""
        return self._loop.run(self._handle.metrics(names, after_step))

    def trajectories(self, limit: int = 100) -> list[Trajectory]:
        """The newest `limit` trajectories, without their conversations."""
        return self._loop.run(self._handle.trajectories(limit))

    def trajectory(self, trajectory_id: str) -> Trajectory:
        """One trajectory with the conversation between the agents."""
        return self._loop.run(self._handle.trajectory(trajectory_id))

    def population(self) -> Population:
        """Pools, payoffs, meta-strategies and ratings of a job with a `population` section."""
        return self._loop.run(self._handle.population())

    def matches(self, member: str = "", limit: int = 100) -> list[Match]:
        """The newest `limit` matches between members, or those in which `member` played."""
        return self._loop.run(self._handle.matches(member, limit))

    def export_member(self, member: str, to: str | Path) -> Path:
        """Copy the weights of one member of a pool into the new directory `to`."""
        return self._loop.run(self._handle.export_member(member, to))

    def tables(self) -> Tables:
        """What the experience store holds of the job, by policy and state."""
        return self._loop.run(self._handle.tables())

    def samples(
        self, policy: str, *, step: int | None = None, state: str | None = None
    ) -> Iterator[Sample]:
        """The rows of a policy; of one step or of all, in one state or in any."""
        return self._loop.iterate(self._handle.samples(policy, step=step, state=state))

    def audit(self, timeout: float = 300.0) -> Audit:
        """Check that every sample was trained once or dropped with a reason."""
        return self._loop.run(self._handle.audit(timeout))

    def generate(
        self,
        policy: str,
        messages: Messages | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        timeout: float = 300.0,
    ) -> Generation:
        """Generate with a policy at its newest version."""
        return self._loop.run(
            self._handle.generate(
                policy,
                messages,
                input_ids=input_ids,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                seed=seed,
                timeout=timeout,
            )
        )


class Client:
    """Talks to one orchestrator, blocking; see `AsyncClient`. A context manager.

    with Client("127.0.0.1:50051") as troupe:
        job = troupe.submit("job.yaml")
        for event in job.watch():
            print(event)
    """

    def __init__(
        self,
        address: str | None = None,
        token: str | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """As `AsyncClient`. May be used from several threads."""
        self._loop = LoopThread("troupe-client")

        async def open_client() -> AsyncClient:
            # gRPC binds a channel to the loop in which it is made.
            return AsyncClient(address, token, settings)

        try:
            self._client = self._loop.run(open_client())
        except BaseException:
            self._loop.close()
            raise
        self.address = self._client.address
        self.functions = Functions(self._client.functions, self._loop)
        """Rewards and tools of the cluster."""

    def submit(self, spec: Spec, job_id: str | None = None) -> JobHandle:
        """Submit a job: a path, YAML or JSON text, or a `JobSpec`."""
        return JobHandle(self._loop.run(self._client.submit(spec, job_id)), self._loop)

    def jobs(self, state: JobState | None = None, limit: int | None = None) -> list[Job]:
        """All jobs, or those in `state`, oldest first; with `limit` the newest so many."""
        return self._loop.run(self._client.jobs(state, limit))

    def job(self, job_id: str) -> JobHandle:
        """A handle of a job that exists. Asks nobody."""
        return JobHandle(self._client.job(job_id), self._loop)

    def cluster(self) -> Cluster:
        """What every worker, engine and service does now."""
        return self._loop.run(self._client.cluster())

    def close(self) -> None:
        """Close the connection and end the thread. Safe to call twice."""
        if not self._loop.closed:
            self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
