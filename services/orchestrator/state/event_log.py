"""The event log of jobs: a Redis stream per job, and its followers in this process."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Final

from services.orchestrator.state.records import TERMINAL, timestamp
from services.orchestrator.state.redis import JobKeys, RedisAccess
from troupe.rpc.ids import check_event_id
from troupe.v1 import orchestrator_pb2 as orchestrator_pb

_PAGE: Final = 256
# Writes of this process wake its followers; this poll is for writes of another orchestrator.
_LOOK_AGAIN_SECONDS: Final = 15.0
# Events kept per job. A step logs about one, so these cover months of steps.
LOG_CAP: Final = 50_000


class EventLog:
    """The log of events, the newest activity of each job, and their followers.

    A follower holds only a position in the log, so a slow one costs no memory: it reads the next
    page when it has sent the last, and gets only the newest activity.
    """

    def __init__(self, redis: RedisAccess) -> None:
        self._redis = redis
        self._activities: dict[str, orchestrator_pb.JobEvent] = {}
        # Problem of each service, for all jobs.
        self._troubles: dict[str, str] = {}
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    async def notice(
        self, job_id: str, severity: orchestrator_pb.Notice.Severity.ValueType, text: str
    ) -> None:
        """Append a notice for users."""
        event = orchestrator_pb.JobEvent(
            at=timestamp(time.time()), notice=orchestrator_pb.Notice(severity=severity, text=text)
        )
        await self._redis.call(
            "XADD",
            JobKeys(job_id).events,
            "MAXLEN",
            "~",
            LOG_CAP,
            "*",
            "e",
            event.SerializeToString(),
        )
        self.wake(job_id)

    def set_trouble(self, service: str, text: str) -> None:
        """Set the problem of a service that all jobs need; empty: none.

        The activities of jobs show it too, since their calls of that service wait without a report.
        """
        self._troubles[service] = text

    def show(
        self, job_id: str, activity: orchestrator_pb.Activity, *, with_troubles: bool = True
    ) -> None:
        """Send followers the job's present activity, without storing it.

        `with_troubles`: add problems of services, unless the activity itself shows them.
        """
        if with_troubles and (troubles := list(filter(None, self._troubles.values()))):
            said = orchestrator_pb.Activity()
            said.CopyFrom(activity)
            said.text = "; ".join([activity.text, *dict.fromkeys(troubles)])
            activity = said
        last = self._activities.get(job_id)
        if last is not None and last.activity == activity:
            return
        self._activities[job_id] = orchestrator_pb.JobEvent(
            at=timestamp(time.time()), activity=activity
        )
        self.wake(job_id)

    def activity(self, job_id: str) -> str:
        """Return the job's present activity; empty if unknown."""
        event = self._activities.get(job_id)
        return "" if event is None else event.activity.text

    def forget(self, job_id: str) -> None:
        """Forget the activity of a job that no longer runs here."""
        self._activities.pop(job_id, None)

    def wake(self, job_id: str) -> None:
        """Wake the followers of a job whose log has grown."""
        for event in self._waiting.get(job_id, ()):
            event.set()

    async def page(
        self, job_id: str, after: str, count: int = _PAGE
    ) -> list[orchestrator_pb.JobEvent]:
        """Return at most `count` events after the event id `after` ("": from the first)."""
        start = f"({after}" if after else "-"
        entries = await self._redis.call(
            "XRANGE", JobKeys(job_id).events, start, "+", "COUNT", count
        )
        events = []
        for event_id, fields in entries or ():
            payload = fields[b"e"] if isinstance(fields, dict) else fields[1]
            event = orchestrator_pb.JobEvent.FromString(payload)
            event.event_id = event_id.decode()
            events.append(event)
        return events

    async def _nth_newest(self, job_id: str, count: int | None) -> tuple[int, int]:
        """Return the place of the `count`-th newest event, or before all; None: before all."""
        if count is None:
            return 0, 0
        entries = await self._redis.call(
            "XREVRANGE", JobKeys(job_id).events, "+", "-", "COUNT", max(1, count)
        )
        newest = [_place(event_id.decode()) for event_id, _ in entries or ()]
        return newest[-1] if len(newest) == max(1, count) else (0, 0)

    async def follow(
        self,
        job_id: str,
        after: str,
        ended: Callable[[], Awaitable[bool]],
        recent_metrics: int | None = None,
    ) -> AsyncIterator[orchestrator_pb.JobEvent]:
        """Yield the events after the event id `after`, then new ones until the job ends.

        If they contain no state, `ended` says whether the job has already ended. Without `after`,
        metrics older than the newest `recent_metrics` events are left out. Raises `InvalidArgument`
        if `after` is not an event id.
        """
        check_event_id(after)
        first = (0, 0) if after else await self._nth_newest(job_id, recent_metrics)
        woken = asyncio.Event()
        self._waiting[job_id].add(woken)
        shown: orchestrator_pb.JobEvent | None = None
        over: bool | None = None
        try:
            while True:
                woken.clear()
                events = await self.page(job_id, after)
                for event in events:
                    after = event.event_id
                    if event.HasField("state"):
                        over = event.state.state in TERMINAL
                    if not event.HasField("metrics") or _place(after) >= first:
                        yield event
                if len(events) == _PAGE:
                    continue
                if over is None:
                    over = await ended()
                if over:
                    return
                newest = self._activities.get(job_id)
                if newest is not None and newest is not shown:
                    shown = newest
                    yield newest
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_SECONDS):
                        await woken.wait()
        finally:
            self._waiting[job_id].discard(woken)
            if not self._waiting[job_id]:
                del self._waiting[job_id]


def _place(event_id: str) -> tuple[int, int]:
    """Return an event id in the order of the log."""
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)
