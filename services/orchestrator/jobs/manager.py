"""Operations on jobs (submit, pause, resume, cancel, forget), and the runners of active jobs."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final
from weakref import WeakValueDictionary

import structlog

from services.orchestrator.cluster import ASKED_SECONDS, delete_states, drop_tables
from services.orchestrator.context import Shared
from services.orchestrator.crash_loops import LaunchGuard
from services.orchestrator.errors import cancel_all
from services.orchestrator.functions import Catalogue
from services.orchestrator.jobs.origins import resolve_origins
from services.orchestrator.jobs.runner import JobRunner
from services.orchestrator.jobs.stopping import JOB_SECONDS, EarlyEnd
from services.orchestrator.state.job_store import Superseded, same_submission
from services.orchestrator.state.records import JobRecord, check_notes, check_tags
from services.orchestrator.state.redis import NO_STATE
from troupe.job import JobSpec, JobSpecError, parse_job_in_thread
from troupe.job.compatibility import Difference, differences, incompatible, reason
from troupe.job.loading import SPEC_FILE
from troupe.rpc import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TroupeError,
    new_id,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb
from troupe.yaml_input import MAX_BYTES

_log = structlog.get_logger(__name__)
_JOB_ID: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}")
# Directories of an embedded cluster in the data directory that do not belong to jobs.
_RESERVED: Final = frozenset({"logs", "models", "redis", "transfer"})
# Characters of an error's list of problems.
_LONGEST_LIST: Final = 2000
# Seconds between pings of a Redis that is away.
_RETRY_SECONDS: Final = 2.0
_RESUMABLE: Final = (
    common_pb.JOB_STATE_PAUSED,
    common_pb.JOB_STATE_SUCCEEDED,
    common_pb.JOB_STATE_FAILED,
    common_pb.JOB_STATE_CANCELLED,
)
_RUNS: Final = (
    common_pb.JOB_STATE_SUBMITTED,
    common_pb.JOB_STATE_STARTING,
    common_pb.JOB_STATE_RUNNING,
)


class Jobs:
    """All jobs of this orchestrator. Every change of state is durable before it takes effect."""

    def __init__(
        self,
        shared: Shared,
        guard: LaunchGuard,
        check: Callable[[str, JobSpec], Awaitable[None]] | None = None,
        catalogue: Catalogue | None = None,
    ) -> None:
        """`check` raises for a job (its id and specification) that this cluster cannot run.
        `catalogue` stores jobs' source files."""
        self._shared = shared
        self._guard = guard
        self._one_by_one: asyncio.Task[None] | None = None
        self._check = check
        self._catalogue = catalogue
        self._runners: dict[str, JobRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Weak, since there are many job ids: a lock exists only while someone holds it or waits for
        # it.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        self._stopping = False

    def lock(self, job_id: str) -> asyncio.Lock:
        """Return the lock for changing a job's state or binding its policies."""
        return self._locks.setdefault(job_id, asyncio.Lock())

    async def submit(
        self,
        text: str,
        request_id: str,
        job_id: str,
        *,
        given: str = "",
        tags: Sequence[str] = (),
        notes: str = "",
    ) -> JobRecord:
        """Store a job and start it. Repeating it with the same ids returns the same job.

        `given`: the text that `text` was made of, for people. Raises `InvalidArgument` naming every
        fault of the specification, or `AlreadyExists` when `job_id` is another job's, or was one's
        whose files are still there.
        """
        spec = await _parse(text)
        await self._shared.store.require_keeping()
        job_id = job_id or job_id_of(spec.name, request_id or new_id())
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidArgument(
                "is not a job id",
                field="job_id",
                value=job_id,
                remedy="Use lower-case letters, digits, '-' and '_', at most 128 of them.",
            )
        if job_id in _RESERVED:
            raise InvalidArgument(
                "names a directory of the cluster itself",
                field="job_id",
                value=job_id,
                remedy="Choose another.",
            )
        if self._check is not None:
            await self._check(job_id, spec)
        record = JobRecord(
            job_id=job_id,
            request_id=request_id,
            spec_json=spec.model_dump_json(),
            directory=(self._shared.settings.data_dir / job_id).absolute(),
            created_at=time.time(),
            tags=check_tags(tags),
            notes=check_notes(notes),
        )
        _check_viewable(record)
        self._check_turns(job_id, spec)
        await self._hold_code(job_id, spec)
        async with self.lock(job_id):
            # An existing job's origins are known; resolved today, they might differ.
            if not await self._exists(job_id):
                await _check_unused(record)
                if any(one.init_from for one in spec.policies.values()):
                    origins = await resolve_origins(self._shared, record.directory, spec)
                    record = replace(record, origins=origins)
            if not await self._shared.store.create(record, _check_given(given) or text):
                found = await self._readable_record(job_id)
                same_submission(found, record)
                self._launch_if_left(found)
                return found
            await self._guard.begin(job_id)
            self.launch(job_id)
        return record

    async def pause(self, job_id: str) -> JobRecord:
        """Stop the job after its open steps. Idempotent."""
        async with self.lock(job_id):
            record = await self._readable_record(job_id)
            if record.state == common_pb.JOB_STATE_PAUSED:
                return record
            record = await self._shared.store.move(job_id, common_pb.JOB_STATE_PAUSING)
            if (runner := self._runners.get(job_id)) is not None:
                runner.pause()
            else:
                self.launch(job_id)
            return record

    async def resume(
        self,
        job_id: str,
        text: str = "",
        overrides: Mapping[str, str] | None = None,
        given: str = "",
    ) -> JobRecord:
        """Continue a job that is paused or has ended from its last committed step, with the
        specification `text` if given, and with `overrides`: values (YAML) by path. `given`: the
        text that `text` was made of, for people.

        The change is stored with the move of the state, so that an orchestrator that dies after it
        goes on under the changed specification. Raises `FailedPrecondition` naming every difference
        that would make it another job, or of kind "nothing_left" for a job that has done all of its
        steps; and `InvalidArgument` naming every fault of the specification.
        """
        spec = await _parse(text, overrides) if text.strip() else None
        _check_given(given)
        await self._shared.store.require_keeping()
        async with self.lock(job_id):
            record = await self._readable_record(job_id)
            if spec is None and overrides:
                spec = await _parse(record.spec_json, overrides)
            changes = [] if spec is None else check_compatible(record, spec)
            renewed = record if spec is None else record.resumed_with(spec, changes)
            if spec is not None:
                _check_viewable(renewed)
                await self._hold_code(job_id, spec)
            if record.state in _RUNS:
                if changes:
                    raise FailedPrecondition(
                        f"job {job_id} is {record.state_name}: its specification cannot change now",
                        kind="job_active",
                        field="spec",
                        value=changes[0].path,
                        remedy="Pause the job, then resume it with the new specification.",
                    )
                self._launch_if_left(record)
                return record
            await self._check_goes_on(record, spec or record.spec())
            self._check_turns(job_id, spec or record.spec())
            record = await self._shared.store.move(
                job_id,
                common_pb.JOB_STATE_SUBMITTED,
                sources=_RESUMABLE,
                renewed=renewed if changes else None,
            )
            if changes:
                if text.strip():
                    await self._shared.store.note_given(job_id, given or text)
                listed = "; ".join(map(str, changes))
                await self._shared.log.notice(
                    job_id,
                    orchestrator_pb.Notice.SEVERITY_INFO,
                    f"continues after step {record.step} with another specification: {listed}",
                )
            await self._last_runner_done(job_id)
            await self._guard.clear(job_id)
            await self._guard.begin(job_id)
            self.launch(job_id)
            return record

    async def _check_goes_on(self, record: JobRecord, spec: JobSpec) -> None:
        """Raise `FailedPrecondition` for a job that has succeeded and would do nothing under
        `spec`, or could not continue exactly."""
        if record.state != common_pb.JOB_STATE_SUCCEEDED:
            return
        if spec.pipeline.max_uses > 1:
            raise FailedPrecondition(
                f"job {record.job_id} has succeeded, and its rows for reuse are gone: it cannot go "
                "on as if it had not ended",
                kind="rows_gone",
                field="pipeline.max_uses",
                value=spec.pipeline.max_uses,
                remedy=f"Submit a new job whose policies have `init_from: {record.job_id}`.",
            )
        if spec.pipeline.steps <= record.step:
            raise FailedPrecondition(
                f"job {record.job_id} has done all of its {record.step} steps",
                kind="nothing_left",
                field="pipeline.steps",
                value=spec.pipeline.steps,
                remedy=f"Give it more: troupe jobs resume {record.job_id} --set "
                f"pipeline.steps={2 * max(record.step, 1)}.",
            )
        if record.early_end and (end := EarlyEnd.of(spec, record)) is not None:
            raise _ends_again(record, spec, end)
        populations, seconds = self._shared.populations, record.seconds_since_start
        if spec.population is not None and (
            why := await populations.complete(record.job_id, spec, seconds)
        ):
            raise FailedPrecondition(
                f"the population of job {record.job_id} is complete after step {record.step}, and "
                f"would be again: {why}",
                kind="nothing_left",
                field="population.stop",
                remedy="Resume it with another `population.stop`: --set "
                "population.stop.iterations=ITERATIONS.",
            )

    async def cancel(self, job_id: str, reason: str) -> JobRecord:
        """End the job now. Committed versions and checkpoints stay."""
        async with self.lock(job_id):
            record = await self._readable_record(job_id)
            if record.state == common_pb.JOB_STATE_CANCELLED:
                return record
            record = await self._shared.store.move(job_id, common_pb.JOB_STATE_CANCELLING)
            if reason:
                await self._shared.log.notice(
                    job_id, orchestrator_pb.Notice.SEVERITY_INFO, f"cancelled: {reason}"
                )
            if (runner := self._runners.get(job_id)) is not None:
                runner.cancel()
            else:
                self.launch(job_id)
            return record

    async def annotate(
        self, job_id: str, add: Sequence[str], remove: Sequence[str], notes: str | None
    ) -> JobRecord:
        """Add and remove tags, and replace the notes unless they are None, in any state of the job.

        Raises `InvalidArgument`.
        """
        check_tags(add, "add_tags")
        async with self.lock(job_id):
            record = await self._readable_record(job_id)
            tags = check_tags([*(set(record.tags) - set(remove)), *add], "add_tags")
            text = record.notes if notes is None else check_notes(notes)
            await self._shared.store.annotate(job_id, tags, text)
            return replace(record, tags=tags, notes=text)

    async def forget(self, job_id: str) -> JobRecord:
        """Delete an ended job from Redis and the other services, and its conversations, but not the
        other files of its directory. Returns the deleted record.

        Raises `FailedPrecondition` while the job has not ended.
        """
        async with self.lock(job_id):
            record = await self._shared.store.get(job_id)
            if not record.terminal:
                raise FailedPrecondition(
                    f"job {job_id} is {record.state_name}: its stored data is still needed",
                    kind="job_active",
                    field="job_id",
                    value=job_id,
                    remedy="Cancel it first.",
                )
            await self._last_runner_done(job_id)
            with suppress(NotFound):  # it ended before it had tables
                await drop_tables(self._shared, job_id, purge_log=True, timeout=ASKED_SECONDS)
            await delete_states(self._shared, job_id)
            if self._catalogue is not None:
                await self._catalogue.release(job_id)
            await self._shared.trajectories.delete(job_id)
            await self._shared.store.delete(job_id)
            await self._guard.clear(job_id)
            return record

    async def _exists(self, job_id: str) -> bool:
        try:
            await self._shared.store.get(job_id)
        except NotFound:
            return False
        return True

    async def _hold_code(self, job_id: str, spec: JobSpec) -> None:
        if self._catalogue is not None:
            await self._catalogue.hold(job_id, spec.code)

    async def _readable_record(self, job_id: str) -> JobRecord:
        """Return the record of a job. Raises `FailedPrecondition` if it is broken."""
        record = await self._shared.store.get(job_id)
        if record.broken:
            assert record.problem is not None, "the record says what is broken"
            raise FailedPrecondition(
                record.problem.message,
                kind=record.problem.kind,
                field="job_id",
                value=job_id,
                remedy=record.problem.remedy,
            )
        return record

    def _check_turns(self, job_id: str, spec: JobSpec) -> None:
        """Raise `FailedPrecondition` if this job and one that runs would be on the same devices, of
        which one of them takes turns with its own trainers only."""
        if self._shared.queue.one_at_a_time:
            return  # it waits until the other has ended
        workers = self._shared.workers.usable(orchestrator_pb.WORKER_KIND_ROLLOUT)
        if not any(one.beat.devices for one in workers):
            return
        others = [
            other
            for other, runner in sorted(self._runners.items())
            if other != job_id and (spec.colocated or runner.colocates)
        ]
        if others:
            raise FailedPrecondition(
                f"a job that colocates engines and trainers has the devices alone, and {others[0]} "
                "runs",
                kind="devices_missing",
                field="pipeline.colocate",
                value=str(bool(spec.colocated)).lower(),
                remedy=f"Wait for {others[0]}, pause or cancel it, or run both without colocate on "
                "devices of their own.",
            )

    def keep_place(self, job_id: str) -> None:
        """Give a job that ran under an earlier orchestrator its place in the queue again."""
        self._shared.queue.keep(job_id)

    def launch(self, job_id: str) -> None:
        """Start a runner, which goes on from the job's current state."""
        if self._stopping:
            return
        runner = self._runners[job_id] = JobRunner(self._shared, job_id)
        task = self._tasks[job_id] = asyncio.create_task(self._run(job_id, runner))
        task.add_done_callback(lambda done: self._forget(job_id, runner, done))

    def launch_one_by_one(self, job_ids: Sequence[str]) -> None:
        """Launch jobs one at a time, each after the orchestrator has survived the previous
        launch."""

        async def one_by_one() -> None:
            for job_id in job_ids:
                async with self.lock(job_id):
                    if job_id in self._tasks:  # its user has cancelled or paused it
                        continue
                    try:
                        await self._guard.begin(job_id)
                    except NO_STATE:
                        await self._wait_for_redis()
                    self.launch(job_id)
                await asyncio.sleep(self._guard.seconds)

        if job_ids:
            self._one_by_one = asyncio.create_task(one_by_one())

    async def set_aside(self, job_id: str, deaths: int) -> None:
        """Fail a job whose launches killed the orchestrator `deaths` times."""
        async with self.lock(job_id):
            error = FailedPrecondition(
                f"the orchestrator died {deaths} times, each time within {self._guard.seconds:g} s "
                "after it had launched this job; the job is set aside",
                kind="orchestrator_keeps_dying",
                field="job_id",
                value=job_id,
                remedy="Look into the orchestrator's log for the cause (a sink such as Weights "
                "& Biases, too little memory), fix it, then resume the job.",
            )
            await self._shared.store.move(
                job_id, common_pb.JOB_STATE_FAILED, problem=error.to_problem()
            )
            await self._guard.clear(job_id)

    async def stop(self) -> None:
        """Stop all runners. Their jobs keep their state, to be continued."""
        self._stopping = True
        tasks = list(self._tasks.values())
        if self._one_by_one is not None:
            tasks.append(self._one_by_one)
        await cancel_all(tasks)

    async def _run(self, job_id: str, runner: JobRunner) -> None:
        while True:
            try:
                return await runner.run()
            except Superseded as error:
                _log.warning("job taken over", job_id=job_id, error=str(error))
                text = f"{self._shared.store.instance} stops: {error}"
                with suppress(TroupeError):
                    await self._shared.log.notice(
                        job_id, orchestrator_pb.Notice.SEVERITY_WARNING, text
                    )
                return None
            except NO_STATE as error:
                _log.error("job waits for Redis", job_id=job_id, error=str(error))
                activity = orchestrator_pb.Activity(text=f"waiting: {error}")
                self._shared.log.show(job_id, activity, with_troubles=False)
                await self._wait_for_redis()
                # The old runner's memory may be older than Redis.
                runner = self._runners[job_id] = JobRunner(self._shared, job_id)

    async def _last_runner_done(self, job_id: str) -> None:
        """Wait for the task of the runner that wrote the job's last state."""
        if (task := self._tasks.get(job_id)) is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _launch_if_left(self, record: JobRecord) -> None:
        """Launch a job whose submission or resume was interrupted before the launch."""
        if record.state == common_pb.JOB_STATE_SUBMITTED and record.job_id not in self._tasks:
            self.launch(record.job_id)

    async def _wait_for_redis(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_SECONDS)
            try:
                return await self._shared.store.ping()
            except TroupeError:
                continue

    def _forget(self, job_id: str, runner: JobRunner, task: asyncio.Task[None]) -> None:
        if self._tasks.get(job_id) is task:
            del self._tasks[job_id]
            self._runners.pop(job_id, None)
            self._shared.queue.leave(job_id)  # its workers are released
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("runner ended with a fault", job_id=job_id, error=repr(error))


def job_id_of(name: str, request_id: str) -> str:
    """Return the id of a job without its own, the same for every repetition of the request."""
    digest = hashlib.blake2s(f"{name}/{request_id}".encode(), digest_size=4).hexdigest()
    # A dot separates the parts of an engine's id, which begins with the job's.
    return f"{name.replace('.', '-')}-{digest}"


def _check_given(text: str) -> str:
    """Return a specification as it was given. Raises `InvalidArgument`."""
    if (size := len(text.encode())) > MAX_BYTES:
        raise InvalidArgument(
            f"has {size:,} bytes, more than {MAX_BYTES:,}",
            field="given_spec",
            remedy="Keep data out of the job's file: name files instead.",
        )
    return text


async def _check_unused(record: JobRecord) -> None:
    """Raise `AlreadyExists` if an earlier job had the id of a new one and its directory is there:
    its states and checkpoints would be taken for the new job's."""
    if not await asyncio.to_thread((record.directory / SPEC_FILE).exists):
        return
    raise AlreadyExists(
        f"{record.directory} holds the files of an earlier job of this id, which this cluster does "
        "not know any more",
        field="job_id",
        value=record.job_id,
        remedy="Choose another job_id; or move that directory away, on every host that has one.",
    )


def _check_viewable(record: JobRecord) -> None:
    """Raise `InvalidArgument` for a record that could be stored but not shown."""
    try:
        record.check_viewable()
    except Exception as error:
        raise InvalidArgument(
            f"could be stored, but not shown: {type(error).__name__}: {error}",
            kind="invalid_job",
            field="spec",
        ) from error


async def _parse(text: str, overrides: Mapping[str, str] | None = None) -> JobSpec:
    try:
        return await parse_job_in_thread(text, overrides=overrides)
    except JobSpecError as error:
        raise _explain(error) from error


def check_compatible(record: JobRecord, spec: JobSpec) -> list[Difference]:
    """Describe how `spec` differs from the job's specification. Raises `FailedPrecondition` if a
    difference makes it another job."""
    old = record.spec()
    if bad := incompatible(old, spec, steps_done=record.step):
        raise FailedPrecondition(
            f"this is not the specification of the same job ({record.step} steps are done): "
            + "; ".join(f"{one} ({reason(one.path)})" for one in bad),
            kind="spec_incompatible",
            field=bad[0].path,
            value=bad[0].new,
            remedy="Undo these changes, or submit a new job whose policies have "
            f"`init_from: {record.job_id}`. docs/going-on.md lists what may change.",
        )
    return differences(old, spec)


def _ends_again(record: JobRecord, spec: JobSpec, end: EarlyEnd) -> FailedPrecondition:
    """Return the error of a job that ended early, and would end again at once under `spec`."""
    limit = end.field == JOB_SECONDS
    return FailedPrecondition(
        f"job {record.job_id} ended early after step {end.step}, and would end again: {end.text}",
        kind="job_ended_early",
        field=end.field,
        value=spec.limits.job_seconds if limit else spec.stop.metric if spec.stop else None,
        remedy=f"Resume it with a larger `{JOB_SECONDS}`, or without one (it has run for "
        f"{record.ran_seconds:.0f} s): --set {JOB_SECONDS}=SECONDS."
        if limit
        else "Resume it with another `stop`, or without one: --set stop.at=VALUE.",
    )


def _explain(error: JobSpecError) -> InvalidArgument:
    """Return an error with all problems in its message, and the field, value and remedy of the
    first."""
    first = error.problems[0]
    if len(error.problems) == 1:
        message = first.message
    else:
        listed = "; ".join(str(problem) for problem in error.problems)
        if len(listed) > _LONGEST_LIST:  # gRPC sends the message in a header
            listed = f"{listed[:_LONGEST_LIST]}..."
        message = f"{first.message}. All {len(error.problems)} problems: {listed}"
    return InvalidArgument(
        message,
        kind="invalid_job",
        field=first.field,
        value=first.value or None,
        remedy=first.remedy,
    )
