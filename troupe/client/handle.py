"""A job in the hands of an asyncio program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from troupe.client import export as exporting
from troupe.client.errors import JobCancelled, JobFailed
from troupe.client.events import Event
from troupe.client.population_records import Match, Population
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
from troupe.client.sampling import Messages, chat_messages, sampling_params
from troupe.client.specs import Spec, read_spec
from troupe.client.table_records import Audit, Sample, Tables
from troupe.client.watching import watch
from troupe.rpc.errors import DeadlineExceeded, InvalidArgument
from troupe.rpc.ids import new_id
from troupe.rpc.settings import ClientSettings
from troupe.v1 import common_pb2
from troupe.v1 import experience_store_pb2 as es
from troupe.v1 import orchestrator_pb2 as pb
from troupe.v1 import orchestrator_pb2_grpc as pb_grpc

_PAGE = 100
T = TypeVar("T")


class AsyncJobHandle:
    """One job of a cluster. Making a handle asks nobody; every method is a call.

    All methods raise `troupe.rpc.TroupeError`: `NotFound` for an unknown job,
    `FailedPrecondition` for a move that the job's state does not allow.
    """

    def __init__(
        self, stub: pb_grpc.OrchestratorAsyncStub, job_id: str, settings: ClientSettings
    ) -> None:
        """Made by `AsyncClient.job` and `AsyncClient.submit`."""
        self.id = job_id
        self._stub = stub
        self._settings = settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def info(self) -> Job:
        """The job as it is now."""
        reply = await self._stub.GetJob(pb.GetJobRequest(job_id=self.id))
        return Job.of(reply.job)

    async def watch(self, after: str = "") -> AsyncIterator[Event]:
        """Every event from the beginning (or after event id `after`) until the job has ended."""
        async for event in watch(self._stub, self.id, after=after, retry=self._settings.retry):
            yield event

    async def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended, well or not; a paused job has not.

        Raises `DeadlineExceeded` after `timeout` seconds; the job goes on.
        """
        try:
            async with asyncio.timeout(timeout):
                async for _ in self.watch():
                    pass
                return await self.info()
        except TimeoutError as error:
            job = await self.info()
            raise DeadlineExceeded(
                f"job {self.id} did not end within {timeout:g} s: it is {job.state} at step "
                f"{job.step} of {job.total_steps} ({job.activity})"
            ) from error

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return what came of it.

        Raises `JobFailed` or `JobCancelled`, and `DeadlineExceeded` after `timeout` seconds.
        """
        job = await self.wait(timeout)
        if job.state == JobState.FAILED:
            raise JobFailed(job)
        if job.state == JobState.CANCELLED:
            raise JobCancelled(job)
        return Result(job, tuple(await self.checkpoints()))

    async def pause(self) -> Job:
        """Admit no new query; what is in flight finishes. Returns at once."""
        request = pb.PauseJobRequest(request_id=new_id("pause"), job_id=self.id)
        return Job.of((await self._stub.PauseJob(request)).job)

    async def resume(self, spec: Spec | None = None) -> Job:
        """Continue a paused, failed or cancelled job from its last committed step.

        `spec`: under this specification, which must describe the same job (more steps, other
        limits, ...); otherwise `FailedPrecondition` names what differs.
        """
        request = pb.ResumeJobRequest(request_id=new_id("resume"), job_id=self.id)
        if spec is not None:
            request.spec = read_spec(spec).model_dump_json()
        return Job.of((await self._stub.ResumeJob(request)).job)

    async def cancel(self, reason: str = "") -> Job:
        """End the job without waiting for what is in flight. Returns at once."""
        request = pb.CancelJobRequest(request_id=new_id("cancel"), job_id=self.id, reason=reason)
        return Job.of((await self._stub.CancelJob(request)).job)

    async def forget(self) -> Job:
        """Delete what the cluster's memory holds of the job, which has ended: its record, log,
        metrics, trajectories, rows and weights. What is in its directory stays, as checkpoints do.
        Returns what the job was."""
        request = pb.ForgetJobRequest(request_id=new_id("forget"), job_id=self.id)
        return Job.of((await self._stub.ForgetJob(request)).job)

    async def versions(self, policy: str) -> list[Version]:
        """Published versions of a policy, as the ledger holds them."""
        reply = await self._stub.ListVersions(pb.ListVersionsRequest(job_id=self.id, policy=policy))
        return [Version.of(version) for version in reply.versions]

    async def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints on the trainer's disk."""
        reply = await self._stub.ListCheckpoints(pb.ListCheckpointsRequest(job_id=self.id))
        return [Checkpoint.of(checkpoint) for checkpoint in reply.checkpoints]

    async def export(self, policy: str, to: str | Path, version: int | None = None) -> Path:
        """Copy a checkpoint (default: the newest) of `policy` into the new directory `to`.

        The directory appears only when every file has arrived with the right checksum.
        """
        request = pb.ExportCheckpointRequest(job_id=self.id, policy=policy)
        if version is not None:
            request.version = version
        return await exporting.receive(self._stub.ExportCheckpoint(request), to)

    async def metrics(self, names: Sequence[str] = (), after_step: int = -1) -> list[MetricsRow]:
        """Metrics per step; `names` empty: all of them."""
        reply = await self._stub.ListMetrics(
            pb.ListMetricsRequest(job_id=self.id, names=names, after_step=after_step)
        )
        return [MetricsRow(row.step, dict(row.values)) for row in reply.rows]

    async def trajectories(self, limit: int = _PAGE) -> list[Trajectory]:
        """The newest `limit` trajectories, without their conversations."""

        async def ask(size: int, token: str) -> tuple[list[Trajectory], str]:
            reply = await self._stub.ListTrajectories(
                pb.ListTrajectoriesRequest(job_id=self.id, page_size=size, page_token=token)
            )
            return [Trajectory.of(one) for one in reply.trajectories], reply.next_page_token

        return await paged(ask, limit)

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        """One trajectory with the conversation between the agents."""
        reply = await self._stub.GetTrajectory(
            pb.GetTrajectoryRequest(job_id=self.id, trajectory_id=trajectory_id)
        )
        return Trajectory.of(reply.summary, tuple(Turn.of(turn) for turn in reply.turns))

    async def population(self) -> Population:
        """Pools, payoffs, meta-strategies and ratings of a job with a `population` section."""
        reply = await self._stub.GetPopulation(pb.GetPopulationRequest(job_id=self.id))
        return Population.of(reply.population)

    async def matches(self, member: str = "", limit: int = _PAGE) -> list[Match]:
        """The newest `limit` matches between members, or those in which `member` played.

        A match is a trajectory: `trajectory(match.trajectory_id)` has what was said, while it is
        kept.
        """

        async def ask(size: int, token: str) -> tuple[list[Match], str]:
            reply = await self._stub.ListMatches(
                pb.ListMatchesRequest(
                    job_id=self.id, member_id=member, page_size=size, page_token=token
                )
            )
            return [Match.of(one) for one in reply.matches], reply.next_page_token

        return await paged(ask, limit)

    async def export_member(self, member: str, to: str | Path) -> Path:
        """Copy the weights of one member of a pool into the new directory `to`, as `export` does.

        Raises `NotFound` for a member that never was, or whose weights are not kept.
        """
        request = pb.ExportMemberRequest(job_id=self.id, member_id=member)
        return await exporting.receive(self._stub.ExportMember(request), to)

    async def tables(self) -> Tables:
        """What the experience store holds of the job, by policy and state."""
        request = es.DescribeTablesRequest(job_id=self.id)
        return Tables.of(await self._stub.DescribeTables(request))

    async def samples(
        self, policy: str, *, step: int | None = None, state: str | None = None
    ) -> AsyncIterator[Sample]:
        """The rows of a policy in order of step, query, group and id; of one step or of all that
        the store still knows, in one state ("pending", "ready", "claimed", "trained", "dropped")
        or in any.
        """
        request = es.ListSamplesRequest(job_id=self.id, policy=policy, step=step)
        if state is not None:
            request.state = sample_state(state)
        while True:
            reply = await self._stub.ListSamples(request)
            for sample in reply.samples:
                yield Sample.of(sample)
            request.page_token = reply.next_page_token
            if not reply.next_page_token:
                return

    async def audit(self, timeout: float = 300.0) -> Audit:
        """Check from the store's log that every sample was trained once or dropped with a reason,
        and that the ledger of versions agrees."""
        request = pb.AuditJobRequest(job_id=self.id)
        return Audit.of(await self._stub.AuditJob(request, timeout=timeout))

    async def generate(
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
        """Generate with a policy at its newest version.

        `messages` is a text (one user message) or a conversation of `{"role", "content"}`;
        `input_ids` are token ids instead, taken as they are. Exactly one of the two. What is
        not given of the sampling is as the job says.
        """
        if (messages is None) == (input_ids is None):
            raise InvalidArgument("give exactly one of messages and input_ids.", field="messages")
        request = pb.GeneratePolicyRequest(
            request_id=new_id("generate"),
            job_id=self.id,
            policy=policy,
            messages=[] if messages is None else chat_messages(messages),
            input_ids=input_ids or [],
            sampling=sampling_params(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                seed=seed,
            ),
        )
        reply = await self._stub.GeneratePolicy(request, timeout=timeout)
        return Generation.of(reply.result)


async def paged(
    ask: Callable[[int, str], Awaitable[tuple[list[T], str]]], limit: int | None
) -> list[T]:
    """The first `limit` (None: all) of a list that `ask(size, token)` gives a page of, with the
    next token."""
    found: list[T] = []
    token = ""
    while limit is None or len(found) < limit:
        page, token = await ask(_PAGE if limit is None else min(_PAGE, limit - len(found)), token)
        found += page
        if not token:
            break
    return found[:limit]


def sample_state(name: str) -> common_pb2.SampleState.ValueType:
    """The wire's number of a sample state. Raises `InvalidArgument`."""
    values = common_pb2.SampleState.items()
    states = [key.removeprefix("SAMPLE_STATE_").lower() for key, number in values if number]
    if name not in states:
        raise InvalidArgument(
            "is not a state of samples",
            field="state",
            value=name,
            remedy=f"Use one of: {', '.join(states)}.",
        )
    return common_pb2.SampleState.Value(f"SAMPLE_STATE_{name.upper()}")
