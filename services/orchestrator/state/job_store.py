"""Jobs in Redis: records, the state machine, metrics, and jobs with published states on hosts."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError

from services.chassis.redis import Value
from services.orchestrator.state.event_log import LOG_CAP, EventLog
from services.orchestrator.state.records import (
    MAX_JOB_ID,
    TERMINAL,
    JobRecord,
    LiveJob,
    not_a_page,
    problem_field,
    timestamp,
    version_field,
)
from services.orchestrator.state.redis import (
    INDEX,
    NO_STATE,
    STATES,
    JobKeys,
    RedisAccess,
)
from troupe import states
from troupe.contracts import kinds
from troupe.rpc import Aborted, AlreadyExists, FailedPrecondition, NotFound
from troupe.twin.profile import JobProfile
from troupe.v1 import common_pb2 as common_pb
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

# Jobs whose states are read at once for a list filtered by state.
_SCANNED: Final = 500
# Rows of metrics read at once: first, and at most (about 1.2 MB).
_FIRST_ROWS: Final = 64
_MOST_ROWS: Final = 1_000
_ROW: Final = re.compile(r"[1-9][0-9]{0,17}")
_SCORE: Final = re.compile(r"[0-9]{1,20}\.[0-9]{1,20}")
# Remedies for a move that a job's state forbids, by the target of the move.
_REMEDIES = {
    common_pb.JOB_STATE_SUBMITTED: "Only a job that is paused or has ended can go on.",
    common_pb.JOB_STATE_PAUSING: "Only a job that is starting or running can be paused.",
    common_pb.JOB_STATE_CANCELLING: "It has ended, so there is nothing to cancel.",
}


class Superseded(Aborted):
    """Another orchestrator has taken the job over: this one must stop running it."""

    default_kind = "superseded"


@dataclass(frozen=True)
class StoredJob:
    """A job with the newest value of every metric."""

    record: JobRecord
    metrics: Mapping[str, float]
    # By field; several per field if workers differ.
    resolved: Sequence[common_pb.ResolvedSetting] = ()


class JobStore:
    """The jobs in Redis. Every atomic operation is one Lua script."""

    def __init__(
        self,
        redis: RedisAccess,
        log: EventLog,
        *,
        data_dir: Path | None = None,
    ) -> None:
        """Jobs' directories are stored relative to `data_dir`, which may be moved."""
        self._redis = redis
        self._log = log
        self._data_dir = data_dir
        # Names this process to users who look for the other orchestrator of a job.
        self.instance = f"{socket.gethostname()}, process {os.getpid()}"
        # Data for the metrics of this process: its running jobs by id, and its ended jobs by state.
        self.live: dict[str, LiveJob] = {}
        self.ended: Counter[common_pb.JobState.ValueType] = Counter()

    @property
    def address(self) -> str:
        """The URL of Redis without its password."""
        return self._redis.address

    async def ping(self) -> None:
        """Raise one of `NO_STATE` unless Redis accepts writes."""
        await self._redis.ping()

    async def check(self) -> list[str]:
        """Ping Redis and return warnings. Raises `FailedPrecondition` if Redis may delete jobs."""
        return await self._redis.check()

    async def require_keeping(self) -> None:
        """Raise `FailedPrecondition` if Redis may delete jobs."""
        await self._redis.risks()

    async def create(self, record: JobRecord, given: str = "") -> bool:
        """Store a new job, with its specification as it was given. Returns False if the id is
        taken, and leaves that job's record unchanged."""
        keys = JobKeys(record.job_id)
        event = _event(state=orchestrator_pb.StateChanged(state=record.state))
        kept = record.to_hash()
        if self._data_dir is not None and record.directory.is_relative_to(self._data_dir):
            kept["directory"] = str(record.directory.relative_to(self._data_dir))
        fields = [part for pair in kept.items() for part in pair]
        made = await self._redis.run_script(
            "create", [keys.record, keys.events, keys.given], [event, given, *fields]
        )
        # Repeated after a crash between the two writes: the index is a set.
        await self._redis.call("ZADD", INDEX, "NX", record.created_at, record.job_id)
        self._log.wake(record.job_id)
        if made:
            self.live[record.job_id] = LiveJob(record.state)
        return bool(made)

    async def get(self, job_id: str) -> JobRecord:
        """Return the record, which may be `broken`. Raises `NotFound`."""
        [found] = await self._redis.call_each(
            [("HGETALL", JobKeys(job_id).record)], keep_mistyped=True
        )
        if not found and await self._redis.call("ZSCORE", INDEX, job_id) is None:
            raise self._unknown(job_id)
        return self._read(job_id, found)

    def _directory(self, kept: Path) -> Path:
        """Return the absolute directory of a job."""
        return kept if self._data_dir is None or not kept.name else self._data_dir / kept

    async def ids(self) -> list[str]:
        """Return all job ids, oldest first."""
        found = await self._redis.call("ZRANGE", INDEX, 0, -1)
        return [job_id.decode(errors="backslashreplace") for job_id in found]

    async def page(
        self, size: int, token: str = "", state: common_pb.JobState.ValueType | None = None
    ) -> tuple[list[str], str]:
        """Return the ids of up to `size` jobs (in `state`), newest first, after the job that
        `token` names; and the token of the next page, empty on the last.

        Raises `InvalidArgument` for a token that is not of this list.
        """
        highest, last = _parse_page(token)
        found: list[tuple[float, str]] = []
        skip, count = 0, size + 2 if state is None else _SCANNED
        while len(found) <= size:
            rows = await self._redis.call(
                *("ZREVRANGEBYSCORE", INDEX, repr(highest), "-inf"),
                *("WITHSCORES", "LIMIT", skip, count),
            )
            pairs = _scored(rows)
            skip += len(pairs)
            # Jobs of the same time are sorted by id; jobs down to `last` were on earlier pages.
            fresh = [one for one in pairs if not last or one < (highest, last)]
            found += fresh if state is None else await self._in_state(fresh, state)
            if len(pairs) < count:
                break
        page, more = found[:size], len(found) > size
        after = f"{page[-1][0]!r}:{page[-1][1]}" if page and more else ""
        return [job_id for _, job_id in page], after

    async def _in_state(
        self, jobs: Sequence[tuple[float, str]], state: common_pb.JobState.ValueType
    ) -> list[tuple[float, str]]:
        states = await self._redis.call_each(
            [("HGET", JobKeys(job_id).record, "state") for _, job_id in jobs], keep_mistyped=True
        )
        wanted = str(int(state)).encode()
        return [job for job, found in zip(jobs, states, strict=True) if found == wanted]

    async def views(self, job_ids: Sequence[str]) -> list[StoredJob]:
        """Return the jobs for lists, in one round trip. One that cannot be read gets a broken
        record, so that the others can be listed."""
        keys = [JobKeys(job_id) for job_id in job_ids]
        replies = await self._redis.call_each(
            [
                command
                for one in keys
                for command in (
                    ("HGETALL", one.record),
                    ("HGETALL", one.latest),
                    ("SMEMBERS", one.resolved),
                )
            ],
            keep_mistyped=True,
        )
        return [
            self._view(job_id, *replies[3 * number : 3 * number + 3])
            for number, job_id in enumerate(job_ids)
        ]

    def _view(self, job_id: str, record: Any, latest: Any, resolved: Any) -> StoredJob:
        read = self._read(job_id, record)
        if read.broken:
            return StoredJob(read, {})
        try:
            settings = [common_pb.ResolvedSetting.FromString(one) for one in _checked(resolved)]
            settings.sort(key=lambda one: (one.field, one.value))
            return StoredJob(read, _numbers(_checked(latest)), settings)
        except (DecodeError, ValueError) as error:
            return StoredJob(JobRecord.unreadable(job_id, str(error), str(read.directory)), {})

    def _read(self, job_id: str, found: Any) -> JobRecord:
        """Return the record of a listed job, from Redis' reply."""
        if isinstance(found, Exception):
            return JobRecord.unreadable(job_id, str(found))
        if not found:
            return JobRecord.unreadable(job_id, "it is listed but has no record")
        record = JobRecord.read(job_id, found)
        return replace(record, directory=self._directory(record.directory))

    async def delete(self, job_id: str) -> None:
        """Delete all of the job's data in Redis. Idempotent."""
        await self._redis.call("UNLINK", *JobKeys(job_id).all)
        # The index last: after a crash the job is still listed and can be deleted again.
        await self._redis.call("ZREM", INDEX, job_id)
        self._log.wake(job_id)

    async def note_resolved(
        self, job_id: str, settings: Iterable[common_pb.ResolvedSetting]
    ) -> None:
        """Note a worker's values for settings that the job leaves open, for people. Does nothing
        while Redis is away."""
        members = [one.SerializeToString(deterministic=True) for one in settings]
        if not members:
            return
        with suppress(*NO_STATE):
            await self._redis.call("SADD", JobKeys(job_id).resolved, *members)

    async def forget_resolved(self, job_id: str) -> None:
        """Forget the workers' values for the job's open settings, which they report again."""
        await self._redis.call("DEL", JobKeys(job_id).resolved)

    async def keep_profile(self, job_id: str, profile: JobProfile) -> None:
        """Store the job's measured profile in place of the previous one."""
        await self._redis.call("SET", JobKeys(job_id).profile, profile.pack())

    async def profile(self, job_id: str) -> JobProfile | None:
        """Return the job's measured profile; None before the end of its first step."""
        found = await self._redis.call("GET", JobKeys(job_id).profile)
        return None if found is None else JobProfile.unpack(found)

    async def given(self, job_id: str) -> str:
        """Return the job's specification as its author wrote it; empty if that is not known."""
        found = await self._redis.call("GET", JobKeys(job_id).given)
        return "" if found is None else found.decode()

    async def note_given(self, job_id: str, text: str) -> None:
        """Store another specification as its author wrote it."""
        await self._redis.call("SET", JobKeys(job_id).given, text)

    async def annotate(self, job_id: str, tags: Sequence[str], notes: str) -> None:
        """Store a job's tags and notes. The caller holds the job's lock."""
        fields = {"tags": json.dumps(list(tags)), "notes": notes}
        pairs = [part for pair in fields.items() for part in pair]
        await self._redis.call("HSET", JobKeys(job_id).record, *pairs)

    async def note_states(self, job_id: str) -> None:
        """Note that hosts may hold published weights of the job."""
        await self._redis.call("SADD", STATES, job_id)

    async def note_no_states(self, job_id: str) -> None:
        """Note that no host holds published weights of the job."""
        await self._redis.call("SREM", STATES, job_id)

    async def with_states(self) -> list[str]:
        """Return the ids of jobs with published weights on hosts."""
        return sorted(one.decode() for one in await self._redis.call("SMEMBERS", STATES))

    async def move(
        self,
        job_id: str,
        target: common_pb.JobState.ValueType,
        *,
        epoch: int | None = None,
        problem: common_pb.Problem | None = None,
        sources: Sequence[common_pb.JobState.ValueType] | None = None,
        renewed: JobRecord | None = None,
    ) -> JobRecord:
        """Move the job's state and log the move, atomically. Changes nothing if the state is
        already `target`.

        The move also writes what a resume changes (`JobRecord.renewed`) to `renewed`'s, if
        given. A runner passes its `epoch`.
        `sources` restricts the states from which the table allows the move. Raises
        `FailedPrecondition` for a move that is not allowed, `Superseded`, `NotFound`.
        """
        keys = JobKeys(job_id)
        allowed = [
            source
            for source in states.JOB
            if states.allowed(states.JOB, source, target) and (sources is None or source in sources)
        ]
        change = orchestrator_pb.StateChanged(state=target)
        if problem is not None:
            change.problem.CopyFrom(problem)
        outcome, before = await self._redis.run_script(
            "move",
            [keys.record, keys.events],
            [
                str(int(target)),
                "," + ",".join(str(source) for source in allowed) + ",",
                "" if epoch is None else str(epoch),
                _event(state=change),
                LOG_CAP,
                *self._fields_of(target, problem),
                *(part for pair in (renewed.renewed.items() if renewed else ()) for part in pair),
            ],
        )
        await self._raise_if_superseded(job_id, outcome)
        if outcome == b"refused":
            source = common_pb.JobState.ValueType(int(before))
            raise FailedPrecondition(
                f"job {job_id} is {_name(source)}: it cannot become {_name(target)}",
                kind=kinds.ILLEGAL_TRANSITION,
                field="job_id",
                value=job_id,
                remedy=_REMEDIES.get(target),
            )
        self._log.wake(job_id)
        if target in TERMINAL:
            self.ended[target] += int(outcome == b"moved")
        record = await self.get(job_id)
        if target in TERMINAL or target == common_pb.JOB_STATE_PAUSED:
            self.live.pop(job_id, None)
        else:
            job = self.live.setdefault(job_id, LiveJob(target))
            job.state, job.step = target, record.step
            job.note_versions(record.versions)
        return record

    async def adopt(self, job_id: str) -> int:
        """Take the job over; return the new runner's epoch, which fences off older runners."""
        return int(await self._redis.run_script("adopt", [JobKeys(job_id).record], [self.instance]))

    async def finish_step(
        self,
        job_id: str,
        epoch: int,
        step: int,
        values: Mapping[str, float],
        fields: Mapping[str, str] = MappingProxyType({}),
    ) -> bool:
        """Count step `step` (from 0) as over and log its metrics, once, and with them `fields` of
        the record."""
        update = {"step": str(step + 1), **fields}
        return await self._record(job_id, epoch, ("step", str(step)), step + 1, values, update)

    async def log_evaluation(
        self,
        job_id: str,
        epoch: int,
        previous: int,
        step: int,
        values: Mapping[str, float],
        fields: Mapping[str, str],
    ) -> bool:
        """Log the metrics of the evaluation after `step` steps, once. The previous one was after
        `previous` steps."""
        update = {"evaluated": str(step), **fields}
        return await self._record(job_id, epoch, ("evaluated", str(previous)), step, values, update)

    async def note_checkpoint(
        self, job_id: str, epoch: int, step: int, problem: common_pb.Problem | None
    ) -> None:
        """Note that the checkpoints after `step` steps were written, or with `problem` that they
        failed, so that a runner that takes the job over at this step tries again."""
        await self.check_epoch(job_id, epoch)
        done = () if problem else ("checkpointed", str(step))
        fields = (*done, "checkpoint_problem", problem_field(problem))
        await self._redis.call("HSET", JobKeys(job_id).record, *fields)

    async def note_ran(self, job_id: str, epoch: int, seconds: float) -> None:
        """Note how long the job has run."""
        await self.check_epoch(job_id, epoch)
        await self._redis.call("HSET", JobKeys(job_id).record, "ran_seconds", repr(seconds))

    async def note_best(self, job_id: str, epoch: int, best: Mapping[str, Any]) -> None:
        """Note the checkpoint that is kept as the best one."""
        await self.check_epoch(job_id, epoch)
        await self._redis.call("HSET", JobKeys(job_id).record, "best", json.dumps(best))

    async def note_decided(
        self, job_id: str, epoch: int, decided: Mapping[str, tuple[int, str]]
    ) -> None:
        """Record the numbers that were chosen where the job says `auto`."""
        await self.check_epoch(job_id, epoch)
        await self._redis.call("HSET", JobKeys(job_id).record, "decided", json.dumps(decided))

    async def note_version(self, job_id: str, epoch: int, policy: str, version: int) -> None:
        """Note the newest version of a policy, as the experience store has it."""
        await self.check_epoch(job_id, epoch)
        await self._redis.call("HSET", JobKeys(job_id).record, version_field(policy), version)
        if (job := self.live.get(job_id)) is not None:
            job.note_versions({policy: version})

    async def check_epoch(self, job_id: str, epoch: int) -> None:
        """Raise `Superseded` unless `epoch` is the newest."""
        now = await self._redis.call("HGET", JobKeys(job_id).record, "epoch")
        if now is None or int(now) != epoch:
            await self._raise_if_superseded(job_id, b"superseded" if now else b"missing")

    async def metrics(
        self, job_id: str, after_step: int = 0
    ) -> list[orchestrator_pb.MetricsLogged]:
        """Return all logged rows of metrics, oldest first, or rows of steps after `after_step` if
        that is positive. The cost grows with the returned rows, not with all rows."""
        pages: list[list[orchestrator_pb.MetricsLogged]] = []
        size, token, more = _FIRST_ROWS, "", True
        while more:
            page, token = await self.metrics_page(job_id, size, token)
            pages.append(rows_after(page, after_step))
            # Rows are logged step by step, so everything before such a page is older.
            more = bool(token) and (not page or bool(pages[-1]))
            size = min(4 * size, _MOST_ROWS)
        return [row for page in reversed(pages) for row in page]

    async def metrics_page(
        self, job_id: str, size: int, token: str
    ) -> tuple[list[orchestrator_pb.MetricsLogged], str]:
        """Return up to `size` rows of metrics, oldest first, that precede the page that gave
        `token` ("": the newest), and the token of the next older page."""
        size = min(size, _MOST_ROWS)
        if token and not _ROW.fullmatch(token):
            raise not_a_page(token)
        # Rows are only appended, so their positions from the beginning stay.
        end = int(token) if token else await self._redis.call("LLEN", JobKeys(job_id).rows)
        start = max(0, end - size)
        if not end:
            return [], ""
        rows = await self._redis.call("LRANGE", JobKeys(job_id).rows, start, end - 1)
        return [orchestrator_pb.MetricsLogged.FromString(row) for row in rows], str(
            start
        ) if start else ""

    async def _record(
        self,
        job_id: str,
        epoch: int,
        guard: tuple[str, str],
        step: int,
        values: Mapping[str, float],
        fields: Mapping[str, str],
    ) -> bool:
        keys = JobKeys(job_id)
        row = orchestrator_pb.MetricsLogged(step=step, values=values)
        pairs: list[Value] = [part for pair in values.items() for part in (pair[0], repr(pair[1]))]
        outcome = await self._redis.run_script(
            "record",
            [keys.record, keys.events, keys.rows, keys.latest],
            [
                str(epoch),
                *guard,
                row.SerializeToString(),
                _event(metrics=row),
                LOG_CAP,
                len(values),
                *pairs,
                *(part for pair in fields.items() for part in pair),
            ],
        )
        await self._raise_if_superseded(job_id, outcome)
        if (job := self.live.get(job_id)) is not None:
            job.step = step
            job.rows[guard[0]] = dict(values)
        self._log.wake(job_id)
        return bool(outcome == b"written")

    def _fields_of(
        self, target: common_pb.JobState.ValueType, problem: common_pb.Problem | None
    ) -> list[Value]:
        now = repr(time.time())
        fields: list[Value] = ["problem", problem_field(problem)]
        if target == common_pb.JOB_STATE_SUBMITTED:
            fields += ["ended_at", "0.0", "decided", "{}"]
        elif target == common_pb.JOB_STATE_STARTING:
            # "?": only the first time, since a takeover does not restart the job.
            fields += ["?started_at", now]
        elif target in (
            common_pb.JOB_STATE_SUCCEEDED,
            common_pb.JOB_STATE_FAILED,
            common_pb.JOB_STATE_CANCELLED,
        ):
            fields += ["ended_at", now]
        return fields

    async def _raise_if_superseded(self, job_id: str, outcome: bytes) -> None:
        if outcome in (b"missing", b"superseded"):
            self.live.pop(job_id, None)
        if outcome == b"missing":
            raise self._unknown(job_id)
        if outcome == b"superseded":
            epoch, owner = await self._redis.call("HMGET", JobKeys(job_id).record, "epoch", "owner")
            raise Superseded(
                f"another orchestrator ({(owner or b'unknown').decode()}) has taken job {job_id} "
                f"over, with epoch {int(epoch or 0)}; this one stops running it",
                field="epoch",
                value=int(epoch or 0),
                remedy="Run one orchestrator per Redis.",
            )

    def _unknown(self, job_id: str) -> NotFound:
        return NotFound(
            f"there is no job {job_id}",
            field="job_id",
            value=job_id,
            remedy="`troupe jobs list` shows the jobs.",
        )


def _event(**what: Any) -> bytes:
    return orchestrator_pb.JobEvent(at=timestamp(time.time()), **what).SerializeToString()


def same_submission(found: JobRecord, record: JobRecord) -> None:
    """Raise `AlreadyExists` unless `found` has the specification of `record`."""
    if found.spec_json != record.spec_json:
        raise AlreadyExists(
            f"job {record.job_id} exists with another specification",
            field="job_id",
            value=record.job_id,
            remedy="Choose another job_id or request_id.",
        )


def _checked(found: Any) -> Any:
    """Return the reply of Redis. Raises ValueError if the key has another type."""
    if isinstance(found, Exception):
        raise ValueError(str(found)) from found
    return found


def rows_after(
    rows: list[orchestrator_pb.MetricsLogged], step: int
) -> list[orchestrator_pb.MetricsLogged]:
    """Return the rows of steps after `step`; all of them unless it is positive."""
    return [row for row in rows if row.step > step] if step > 0 else rows


def _numbers(fields: Mapping[bytes, bytes]) -> dict[str, float]:
    return {name.decode(): float(value) for name, value in fields.items()}


def _scored(rows: Sequence[Any]) -> list[tuple[float, str]]:
    """Parse members of a sorted set and their scores from the flat list of Redis."""
    return [(float(rows[i + 1]), rows[i].decode()) for i in range(0, len(rows), 2)]


def _parse_page(token: str) -> tuple[float, str]:
    """Return the score and id of the last job of a page; without a token, values before all
    jobs."""
    if not token:
        return math.inf, ""
    score, _, job_id = token.partition(":")
    if not _SCORE.fullmatch(score) or not job_id or len(job_id) > MAX_JOB_ID:
        raise not_a_page(token)
    return float(score), job_id


def _name(state: common_pb.JobState.ValueType) -> str:
    return common_pb.JobState.Name(state).removeprefix("JOB_STATE_")
