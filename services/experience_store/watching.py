"""Pushes the counts of a job's tables whenever they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from services.experience_store.notices import CLAIMABLE, COUNTS, Notices
from services.experience_store.progress import StepStatus
from services.experience_store.steps import Steps
from services.experience_store.tables import Tables
from troupe.v1 import experience_store_pb2 as store_pb

# Hundreds of trajectories end within a second; people and admission look a few times per second.
COALESCE_SECONDS: Final = 0.05
# Nothing has to happen for a step to change: leases run out silently.
REFRESH_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Usage:
    """How full the store is, over all jobs."""

    payload_bytes: int = 0
    over_high_water: bool = False


class Watching:
    """Watchers of tables."""

    def __init__(
        self,
        tables: Tables,
        steps: Steps,
        notices: Notices,
        usage: Callable[[], Awaitable[Usage]],
    ) -> None:
        self._usage = usage
        self._tables = tables
        self._steps = steps
        self._notices = notices

    async def watch(self, job: str) -> AsyncIterator[store_pb.TableStatus]:
        """First the status of every live step (or of the newest one), then every change.

        Ends when the tables are dropped or the service stops. Raises `NotFound` without tables.
        """
        await self._tables.get(job)
        sent: dict[int, bytes] = {}
        with self._notices.listen(job, kinds=frozenset({CLAIMABLE, COUNTS})) as bell:
            steps = set(await self._steps.live(job)) or set((await self._steps.all(job))[-1:])
            while True:
                usage = await self._usage()
                for step in sorted(steps):
                    status = await self._steps.status(job, step, endings=False)
                    message = table_status(job, status, usage)
                    wire = message.SerializeToString(deterministic=True)
                    if status.open and sent.get(step) != wire:
                        sent[step] = wire
                        yield message
                await bell.wait(REFRESH_SECONDS)
                await asyncio.sleep(COALESCE_SECONDS)
                if bell.dropped or self._notices.closing:
                    return
                steps = bell.take_steps() or set(await self._steps.live(job))
                # What was said about steps that are over need not be remembered.
                sent = {step: sent[step] for step in sorted(sent)[-16:]}


def table_status(job: str, status: StepStatus, usage: Usage) -> store_pb.TableStatus:
    """One step's status as watchers see it."""
    return store_pb.TableStatus(
        job_id=job,
        step=status.step,
        sealed=status.sealed,
        trajectories_expected=status.expected,
        trajectories_ended=status.ended,
        counts=status.counts,
        closed=status.closed,
        queries_complete=status.complete,
        payload_bytes=usage.payload_bytes,
        over_high_water=usage.over_high_water,
    )
