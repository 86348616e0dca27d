"""`AsyncJobHandle`: the calls about one job, its event stream and its exports."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard, TypeVar

import xxhash
import yaml

from troupe.checkpoints.verifying import verify
from troupe.client.comparison import Comparison
from troupe.client.conversion import numbers_by_word
from troupe.client.functions import with_code
from troupe.client.program import ProgramJob, job_of_program
from troupe.client.records.events import Event, event_of
from troupe.client.records.jobs import (
    Checkpoint,
    Generation,
    Job,
    MetricsRow,
    Result,
    Trajectory,
    Version,
)
from troupe.client.records.populations import Match, Population
from troupe.client.records.samples import Audit, Sample, Tables
from troupe.job import JobSpec
from troupe.job.loading import job_of, load_text, read_mapping, with_overrides
from troupe.job.spec import policy_of
from troupe.outcomes import utf8_text
from troupe.rpc.errors import DataLoss, DeadlineExceeded, InvalidArgument, NotFound, TroupeError
from troupe.rpc.ids import new_id
from troupe.rpc.retry import RetryPolicy
from troupe.rpc.settings import ClientSettings
from troupe.sampling import READERS
from troupe.storage import LocalPlace
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import experience_store_pb2 as store_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.v1 import orchestrator_pb2_grpc as orchestrator_grpc

if TYPE_CHECKING:
    from troupe.twin.profile import JobProfile
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

T = TypeVar("T")
Spec = str | Path | Mapping[str, Any] | JobSpec | ProgramJob
Messages = str | Sequence[Mapping[str, str]]

# An orchestrator restarts within seconds; if it is unreachable for longer, it counts as gone.
AWAY_SECONDS = 120.0
# The longest silence between two chunks of an exported checkpoint.
CHUNK_SECONDS = 60.0
_PAGE = 100
# Trajectories of the newest evaluations, and of the first, among which pairs are looked for.
_COMPARED = 2_000
# Ids of the held-out queries of all evaluations: `h7`, `gsm8k-h7`.
_HELD_OUT = re.compile(r"(?:.+-)?h[0-9]+")
# Rows of metrics asked for at once.
_ROWS = 1_000


class AsyncJobHandle:
    """One job of a cluster. Making a handle makes no call; every method makes one.

    All methods raise `troupe.rpc.TroupeError`: `NotFound` for an unknown job,
    `FailedPrecondition` for a transition that the job's state does not allow.
    """

    def __init__(
        self,
        stub: orchestrator_grpc.OrchestratorAsyncStub,
        job_id: str,
        settings: ClientSettings,
        reward: RewardAsyncStub,
    ) -> None:
        """Called by `AsyncClient.job` and `AsyncClient.submit`."""
        self._reward = reward
        self.id = job_id
        self._stub = stub
        self._settings = settings

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def info(self) -> Job:
        """Return the job's current record."""
        reply = await self._stub.GetJob(orchestrator_pb.GetJobRequest(job_id=self.id))
        return Job.of(reply.job)

    async def watch(self, after: str = "") -> AsyncIterator[Event]:
        """Yield every event from the beginning (or after event id `after`) until the job ends."""
        async for event in watch(self._stub, self.id, after=after, retry=self._settings.retry):
            yield event

    async def wait(self, timeout: float | None = None) -> Job:
        """Wait until the job has ended, successfully or not; a paused job has not ended.

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
        """Wait until the job has ended and return its result.

        Raises `JobFailed` or `JobCancelled`, and `DeadlineExceeded` after `timeout` seconds.
        """
        job = (await self.wait(timeout)).require_success()
        return Result(job, tuple(await self.checkpoints()))

    async def pause(self) -> Job:
        """Pause the job: admit no new queries and let those in flight finish. Returns at once."""
        request = orchestrator_pb.PauseJobRequest(request_id=new_id("pause"), job_id=self.id)
        return Job.of((await self._stub.PauseJob(request)).job)

    async def resume(
        self, spec: Spec | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Job:
        """Continue a job that is paused or has ended from its last committed step.

        `spec` replaces the specification, and `overrides` has other values by path:
        `{"pipeline.steps": 60}`. The result must describe the same job (with more steps, another
        learning rate, other limits, ...); otherwise `FailedPrecondition` names the differences. A
        job that has succeeded needs more steps. `Job.history` has every change.
        """
        read = None if spec is None else read_spec(spec)
        job = None if read is None else await with_code(self._reward, read)
        given = ""
        if spec is not None and read is not None:
            given = given_text(spec, read, overrides, "resumed")
        request = orchestrator_pb.ResumeJobRequest(
            request_id=new_id("resume"),
            job_id=self.id,
            spec="" if job is None else job.model_dump_json(),
            given_spec=given,
            overrides={path: json.dumps(value) for path, value in (overrides or {}).items()},
        )
        return Job.of((await self._stub.ResumeJob(request)).job)

    async def cancel(self, reason: str = "") -> Job:
        """Cancel the job without waiting for work in flight. Returns at once."""
        request = orchestrator_pb.CancelJobRequest(
            request_id=new_id("cancel"), job_id=self.id, reason=reason
        )
        return Job.of((await self._stub.CancelJob(request)).job)

    async def annotate(
        self,
        *,
        add_tags: Sequence[str] = (),
        remove_tags: Sequence[str] = (),
        notes: str | None = None,
    ) -> Job:
        """Add and remove tags, and replace the notes unless they are None, in any state of the job.

        At most 32 tags of 64 characters, and 4,000 characters of notes.
        """
        refuse_one_text(add_tags, "add_tags")
        refuse_one_text(remove_tags, "remove_tags")
        request = orchestrator_pb.AnnotateJobRequest(
            request_id=new_id("annotate"),
            job_id=self.id,
            add_tags=add_tags,
            remove_tags=remove_tags,
            notes=notes,
        )
        return Job.of((await self._stub.AnnotateJob(request)).job)

    async def given_spec(self) -> str:
        """Return the specification as its author wrote it, with its comments; `Job.spec` is the
        same with its defaults filled in. Empty for a job of an earlier release."""
        reply = await self._stub.GetJob(orchestrator_pb.GetJobRequest(job_id=self.id))
        return reply.given_spec

    async def forget(self) -> Job:
        """Delete an ended job from the cluster's memory: its record, log, metrics, rows and
        weights; and its conversations. Other files in its directory, such as checkpoints, stay.
        Returns the job's last record."""
        request = orchestrator_pb.ForgetJobRequest(request_id=new_id("forget"), job_id=self.id)
        return Job.of((await self._stub.ForgetJob(request)).job)

    async def versions(self, policy: str) -> list[Version]:
        """Return the published weight versions of a policy. As in every call that takes a policy,
        `policy` may also be the name of an agent that the policy plays."""
        reply = await self._stub.ListVersions(
            orchestrator_pb.ListVersionsRequest(job_id=self.id, policy=policy)
        )
        return [Version.of(version) for version in reply.versions]

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints on the trainer's disk."""
        reply = await self._stub.ListCheckpoints(
            orchestrator_pb.ListCheckpointsRequest(job_id=self.id)
        )
        return [Checkpoint.of(checkpoint) for checkpoint in reply.checkpoints]

    async def export(
        self,
        policy: str,
        to: str | Path,
        version: int | None = None,
        *,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> Path:
        """Copy a checkpoint (default: the newest) of `policy` into the new directory `to`.

        The directory appears only when every file has arrived with the right checksum. `progress`
        is called with the number of bytes that have arrived so far.
        """
        request = orchestrator_pb.ExportCheckpointRequest(
            job_id=self.id, policy=policy, version=version
        )
        return await receive(self._stub.ExportCheckpoint(request), to, progress)

    async def metrics(self, names: Sequence[str] = (), after_step: int = -1) -> list[MetricsRow]:
        """Return the metrics of each step; with empty `names`, all metrics."""
        request = orchestrator_pb.ListMetricsRequest(
            job_id=self.id, names=names, after_step=after_step
        )
        request.page_size = _ROWS
        pages: list[list[MetricsRow]] = []
        while not pages or request.page_token:
            reply = await self._stub.ListMetrics(request)
            pages.append([MetricsRow.of(row) for row in reply.rows])
            request.page_token = reply.next_page_token
        # The newest page comes first.
        return [row for page in reversed(pages) for row in page]

    async def metrics_frame(
        self, names: Sequence[str] = (), after_step: int = -1
    ) -> list[dict[str, float | None]]:
        """Return a table of the metrics: a row per step, ordered by step, with evaluations after
        the step in the same row.

        Every row has `step` and every metric, None where the step has no value, so that
        `pandas.DataFrame(rows)`, `polars.DataFrame(rows)` and `pyarrow.Table.from_pylist(rows)`
        make a table of it. `names` selects metrics; empty: all.
        """
        return frame_of(await self.metrics(names, after_step))

    async def conversations(
        self,
        limit: int | None = 20,
        *,
        evaluation: bool | None = None,
        failed: bool = False,
        text: str = "",
        agent: str = "",
        from_step: int | None = None,
        to_step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
    ) -> AsyncIterator[Trajectory]:
        """Yield the newest `limit` conversations (None: all that are kept), the newest first.

        `evaluation` selects conversations of evaluations (True) or of training (False). `failed`
        selects the ones that did not complete; `text`, the ones with this text in a message or
        reply; `agent`, the ones in which this agent took a turn; `from_step` and `to_step` a range
        of steps; `min_reward` and `max_reward` a range of rewards: of `agent` if given, else of the
        team, or the mean over agents.
        """
        request = orchestrator_pb.ListTrajectoriesRequest(
            job_id=self.id,
            text=text,
            agent=agent,
            from_step=from_step,
            to_step=to_step,
            min_reward=min_reward,
            max_reward=max_reward,
            evaluation=evaluation,
            failed=failed,
        )
        async for one in self._list(request, limit):
            try:
                found = await self.trajectory(one.id)
            except NotFound as error:
                if error.field != "trajectory_id":
                    raise
                continue  # newer conversations have displaced it since it was listed
            yield found

    async def _list(
        self, request: orchestrator_pb.ListTrajectoriesRequest, limit: int | None
    ) -> AsyncIterator[Trajectory]:
        """Yield the newest `limit` trajectories (None: all) that match a request."""
        left = limit
        while left is None or left > 0:
            request.page_size = _PAGE if left is None else min(_PAGE, left)
            reply = await self._stub.ListTrajectories(request)
            for one in reply.trajectories:
                yield Trajectory.of(one)
            left = None if left is None else left - len(reply.trajectories)
            request.page_token = reply.next_page_token
            if not reply.next_page_token:
                return

    async def compare(self, *others: AsyncJobHandle | str) -> Comparison:
        """Return how this job and others differ: fields, held-out scores, metrics."""
        jobs = [await self.info()]
        for other in others:
            job_id = other if isinstance(other, str) else other.id
            reply = await self._stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
            jobs.append(Job.of(reply.job))
        return Comparison(tuple(jobs))

    async def trajectories(self, limit: int | None = _PAGE) -> list[Trajectory]:
        """Return the newest `limit` trajectories (None: all that are kept), without their
        conversations."""
        request = orchestrator_pb.ListTrajectoriesRequest(job_id=self.id)
        return [one async for one in self._list(request, limit)]

    async def trajectory(self, trajectory_id: str) -> Trajectory:
        """Return one trajectory with the conversation between the agents."""
        reply = await self._stub.GetTrajectory(
            orchestrator_pb.GetTrajectoryRequest(job_id=self.id, trajectory_id=trajectory_id)
        )
        return Trajectory.with_turns(reply)

    async def before_and_after(self, limit: int = 4) -> list[tuple[Trajectory, Trajectory]]:
        """Return pairs of trajectories on the same held-out query, one from the first evaluation
        and one from the newest, with their conversations; for at most the first `limit` queries of
        each evaluation."""
        request = orchestrator_pb.ListTrajectoriesRequest(job_id=self.id, evaluation=True)
        # The list may be long; the newest evaluations are at its beginning.
        listed = [one async for one in self._list(request, _COMPARED)]
        request.ClearField("page_token")
        request.to_step = 0
        # Matches of a population's first members are listed, too; none is repeated later.
        first = {
            one.query_id: one
            async for one in self._list(request, _COMPARED)
            if _HELD_OUT.fullmatch(one.query_id)
        }
        pairs = []
        for query_id, before in sorted(first.items(), key=lambda item: _by_number(item[0])):
            # The list begins with the newest; equal numbers have equal seeds.
            number = before.id.rpartition("-")[2]
            later = (
                one.id
                for one in listed
                if one.step and one.query_id == query_id and one.id.endswith(f"-{number}")
            )
            if (after := next(later, None)) is not None:
                pairs.append((before.id, after))
        return [
            (await self.trajectory(before), await self.trajectory(after))
            for before, after in pairs[:limit]
        ]

    async def profile(self) -> JobProfile:
        """Return the measured behaviour of the job's trajectories, engines and trainers, for
        planners. Raises `FailedPrecondition` before the end of the job's first step."""
        from troupe.twin.profile import JobProfile  # imports numpy, which delays a command's start

        reply = await self._stub.GetJobProfile(orchestrator_pb.GetJobProfileRequest(job_id=self.id))
        return JobProfile.of_json(reply.profile_json)

    async def population(self) -> Population:
        """Return the pools, payoffs, meta-strategies and ratings of a job that has a `population`
        section."""
        reply = await self._stub.GetPopulation(orchestrator_pb.GetPopulationRequest(job_id=self.id))
        return Population.of(reply.population)

    async def matches(self, member: str = "", limit: int = _PAGE) -> list[Match]:
        """Return the newest `limit` matches between members, or only the matches of `member`.

        A match is a trajectory: `trajectory(match.trajectory_id)` returns its conversation as long
        as the cluster keeps it.
        """

        async def fetch(size: int, token: str) -> tuple[list[Match], str]:
            reply = await self._stub.ListMatches(
                orchestrator_pb.ListMatchesRequest(
                    job_id=self.id, member_id=member, page_size=size, page_token=token
                )
            )
            return [Match.of(one) for one in reply.matches], reply.next_page_token

        return await paged(fetch, limit)

    async def export_member(self, member: str, to: str | Path) -> Path:
        """Copy the weights of a pool's member into the new directory `to`, as `export` does.

        Raises `NotFound` if the member is unknown or its weights are no longer kept.
        """
        request = orchestrator_pb.ExportMemberRequest(job_id=self.id, member_id=member)
        return await receive(self._stub.ExportMember(request), to)

    async def tables(self) -> Tables:
        """Return the counts of the job's samples in the experience store, by policy and state."""
        request = store_pb.DescribeTablesRequest(job_id=self.id)
        return Tables.of(await self._stub.DescribeTables(request))

    async def samples(
        self, policy: str, *, step: int | None = None, state: str | None = None
    ) -> AsyncIterator[Sample]:
        """Yield the samples of a policy, ordered by step, query, group and id.

        `step` selects one step; by default all steps that the store still has. `state` selects
        "pending", "ready", "claimed", "trained" or "dropped"; by default any.
        """
        wanted = None if state is None else sample_state(state)
        policy = policy_of((await self.info()).spec, policy)
        request = store_pb.ListSamplesRequest(
            job_id=self.id, policy=policy, step=step, state=wanted
        )
        while True:
            reply = await self._stub.ListSamples(request)
            for sample in reply.samples:
                yield Sample.of(sample)
            request.page_token = reply.next_page_token
            if not reply.next_page_token:
                return

    async def audit(self, timeout: float = 300.0) -> Audit:
        """Check, from the store's log, that every sample was trained once or dropped with a reason,
        and that the published versions agree with the log."""
        request = orchestrator_pb.AuditJobRequest(job_id=self.id)
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
        """Generate with the newest version of a policy.

        Give exactly one prompt: `messages` is a text (one user message) or a conversation of
        `{"role", "content"}`; `input_ids` are token ids, used without a chat template. Sampling
        parameters default to the job's.
        """
        if (messages is None) == (input_ids is None):
            raise InvalidArgument("give exactly one of messages and input_ids", field="messages")
        request = orchestrator_pb.GeneratePolicyRequest(
            request_id=new_id("generate"),
            job_id=self.id,
            policy=policy,
            messages=[] if messages is None else chat_messages(messages),
            input_ids=_read("input_ids", input_ids, "stop_token_ids"),
            # None leaves a field unset: absent and zero differ.
            sampling=common_pb.SamplingParams(
                temperature=_read("temperature", temperature),
                top_p=_read("top_p", top_p),
                top_k=_read("top_k", top_k),
                max_new_tokens=_read("max_new_tokens", max_new_tokens),
                stop_token_ids=_read("stop_token_ids", stop_token_ids),
                seed=_read("seed", seed),
            ),
        )
        reply = await self._stub.GeneratePolicy(request, timeout=timeout)
        return Generation.of(reply.result)


def frame_of(rows: Iterable[MetricsRow]) -> list[dict[str, float | None]]:
    """Return rows of metrics as a table with one row per step (`metrics_frame`)."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        steps.setdefault(row.step, {}).update(row.values)
    columns = sorted({name for values in steps.values() for name in values})
    return [
        {"step": step, **{name: values.get(name) for name in columns}}
        for step, values in sorted(steps.items())
    ]


def _by_number(query_id: str) -> tuple[int, str]:
    """Return a key that sorts the held-out queries of all evaluations by number: `h7`,
    `gsm8k-h7`."""
    evaluation, _, number = query_id.rpartition("h")
    return int(number), evaluation


def read_spec(spec: Spec, overrides: Mapping[str, Any] | None = None) -> JobSpec | ProgramJob:
    """Return the job, validated here so that a mistake costs no round trip.

    An empty string, or a string with a line break or a brace, is YAML or JSON text; any other
    string is a path. A mapping may have functions and rows of this program (`job_of_program`).
    `overrides` has other values by path: `{"pipeline.steps": 20}`. Raises
    `troupe.job.JobSpecError`, and `InvalidArgument` for parts that cannot be sent.
    """
    changes = overrides or {}
    if isinstance(spec, ProgramJob):
        return ProgramJob(_changed(spec.spec, changes), spec.files)
    if isinstance(spec, JobSpec):
        return _changed(spec, changes)
    if isinstance(spec, Mapping):
        return job_of_program(with_overrides(spec, changes))
    raw = read_mapping(spec) if _is_text(spec) else read_mapping(load_text(spec), str(spec))
    return job_of(with_overrides(raw, changes))


def given_text(
    spec: Spec,
    job: JobSpec | ProgramJob,
    overrides: Mapping[str, Any] | None = None,
    what: str = "submitted",
) -> str:
    """Return the job as its author wrote it, as YAML: the own text of a file or string, with
    comments and then `overrides` as a comment, which says that the job was `what`; else the fields
    that `job`, made of `spec`, sets."""
    if not isinstance(spec, str | Path):
        made = job.spec if isinstance(job, ProgramJob) else job
        fields = made.model_dump(mode="json", exclude_unset=True)
        return yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
    text = spec if _is_text(spec) else load_text(spec)
    if not overrides:
        return text
    changes = "".join(
        f"#   {path}: {one if isinstance(one, str) else json.dumps(one, default=str)}\n"
        for path, one in overrides.items()
    )
    return f"{text.rstrip()}\n\n# Changed when it was {what}:\n{changes}"


def refuse_one_text(given: object, field: str) -> None:
    """Raise `InvalidArgument` for a text in place of a list of texts: it would count as the list of
    its characters."""
    if isinstance(given, str):
        raise InvalidArgument(
            "is one text, not a list of them",
            field=field,
            value=given,
            remedy=f"Give [{given!r}].",
        )


def _is_text(spec: str | Path) -> TypeGuard[str]:
    """Return whether a string is YAML or JSON text, not a path."""
    return isinstance(spec, str) and (not spec.strip() or "\n" in spec or "{" in spec)


def _changed(spec: JobSpec, overrides: Mapping[str, Any]) -> JobSpec:
    return job_of(with_overrides(spec.model_dump(mode="json"), overrides)) if overrides else spec


async def paged(
    fetch: Callable[[int, str], Awaitable[tuple[list[T], str]]], limit: int | None
) -> list[T]:
    """Yield the first `limit` items (None: all) of a paginated list.

    `fetch(size, token)` returns a page and the token of the next page ("" after the last).
    """
    found: list[T] = []
    token = ""
    while limit is None or len(found) < limit:
        page, token = await fetch(_PAGE if limit is None else min(_PAGE, limit - len(found)), token)
        found += page
        if not token:
            break
    return found[:limit]


def sample_state(name: str) -> common_pb.SampleState.ValueType:
    """Return the enum value of a sample state's name. Raises `InvalidArgument`."""
    states = numbers_by_word(common_pb.SampleState.DESCRIPTOR)
    if name not in states:
        raise InvalidArgument(
            "is not a state of a sample",
            field="state",
            value=name,
            remedy=f"Use one of: {', '.join(states)}.",
        )
    return common_pb.SampleState.ValueType(states[name])


def _read(field: str, value: Any, like: str = "") -> Any:
    """Return the value of a sampling parameter, or of one `like` it, as a job has it; None for
    None. Raises `InvalidArgument`."""
    reader, wanted = READERS[like or field]
    try:
        return None if value is None else reader(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"must be {wanted}", field=field, value=value) from error


def chat_messages(messages: Messages) -> list[common_pb.ChatMessage]:
    """Convert chat messages for the wire; a text is one user message. Raises `InvalidArgument`."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable) or isinstance(messages, Mapping):
        raise InvalidArgument(
            "give a text, or a list of messages", field="messages", value=messages
        )
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidArgument(
                "a message must be a mapping with exactly `role` and `content`",
                field=f"messages.{index}",
                value=message,
            )
        for name, text in message.items():
            if not isinstance(text, str):
                raise InvalidArgument(
                    f"`{name}` must be text", field=f"messages.{index}.{name}", value=text
                )
        texts = {name: utf8_text(text) for name, text in message.items()}
        chat.append(common_pb.ChatMessage(**texts))
    if not chat:
        raise InvalidArgument("a conversation needs a message", field="messages", value=[])
    return chat


async def watch(
    stub: orchestrator_grpc.OrchestratorAsyncStub,
    job_id: str,
    *,
    after: str = "",
    retry: RetryPolicy | None = None,
    away_seconds: float = AWAY_SECONDS,
) -> AsyncIterator[Event]:
    """Yield the job's events after id `after` until the job has ended.

    A broken stream is resumed after its last event, so no event is lost or repeated (except
    `Activity`, which is not logged). Raises the server's error, or `Unavailable` when the server
    is unreachable for more than `away_seconds`.
    """
    policy = retry or RetryPolicy()
    rng = random.Random(policy.seed)
    failures, last_seen = 0, time.monotonic()
    while True:
        broken, reached = TroupeError("the stream ended"), False
        try:
            # A stream may be silent for hours; only this shows that the server is back.
            await stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id), timeout=away_seconds)
            reached = True
            async for message in stub.WatchJob(
                orchestrator_pb.WatchJobRequest(job_id=job_id, after=after)
            ):
                after = message.event_id or after
                failures = 0
                if (event := event_of(message)) is not None:
                    yield event
            # A server that shuts down may end the stream before the job ends.
            reply = await stub.GetJob(orchestrator_pb.GetJobRequest(job_id=job_id))
            if Job.of(reply.job).state.ended:
                return
        except TroupeError as error:
            last_seen = time.monotonic() if reached else last_seen
            if not policy.retryable(error) or time.monotonic() - last_seen > away_seconds:
                raise
            broken = error
        failures += 1
        await asyncio.sleep(policy.backoff(failures, broken, rng))


async def receive(
    chunks: AsyncIterable[orchestrator_pb.ExportCheckpointResponse],
    to: str | Path,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Path:
    """Write the streamed files into the directory `to` and return it.

    `to` must be absent or empty. The files appear there only when all have arrived with the right
    checksums. Raises `FailedPrecondition`, `ResourceExhausted`, `DataLoss`, `DeadlineExceeded`, or
    an error of the stream.
    """
    place = LocalPlace(Path(to))
    with place.new_folder() as draft:
        await _receive_into(chunks, draft, progress)
        await asyncio.to_thread(verify, draft, called="that the cluster sent")
    return place.path


async def _receive_into(
    chunks: AsyncIterable[orchestrator_pb.ExportCheckpointResponse],
    directory: Path,
    progress: Callable[[int], None],
) -> None:
    file: BinaryIO | None = None
    name, digest, files = "", xxhash.xxh3_64(), 0
    try:
        async for chunk in _bounded(chunks, CHUNK_SECONDS):
            if file is None:
                name, digest = chunk.path, xxhash.xxh3_64()
                path = directory / _relative_path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                file = path.open("wb")
            elif chunk.path != name:
                raise _damaged(name, "it ends in the middle")
            file.write(chunk.data)
            digest.update(chunk.data)
            progress(len(chunk.data))
            if chunk.end_of_file:
                if digest.intdigest() != chunk.checksum:
                    raise _damaged(name, "its checksum is wrong")
                file.close()
                file, files = None, files + 1
    finally:
        if file is not None:
            file.close()
    if file is not None:
        raise _damaged(name, "it ends in the middle")
    if not files:
        raise NotFound("the checkpoint has no files", field="checkpoint")


async def _bounded(stream: AsyncIterable[T], seconds: float) -> AsyncIterator[T]:
    """Yield the items of `stream`, with a deadline of `seconds` for each."""
    items = aiter(stream)
    while True:
        try:
            item = await asyncio.wait_for(anext(items), seconds)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise DeadlineExceeded(f"no chunk of the checkpoint within {seconds:g} s") from error
        yield item


def _relative_path(name: str) -> Path:
    """Return `name` as a path below the target. Raises `DataLoss` if it leads out of the target."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise DataLoss("the server sent a file name that leads out of the target", value=name)
    return Path(path)


def _damaged(name: str, what: str) -> DataLoss:
    return DataLoss(
        f"{what}.",
        field="file",
        value=name,
        remedy="Export again; if the error repeats, the checkpoint itself is damaged.",
    )
