"""Pushes rows back while the payloads of all jobs together are above the high-water mark.

A job's oldest uncommitted step may always go on: only its commit frees memory. The mark is no
hard limit: every process looks at the bytes twice a second, and adds what it let in since.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Final

import structlog

from services.experience_store.background import Background
from services.experience_store.database import Database
from services.experience_store.keys import JOBS, JobKeys, PolicyKeys
from services.experience_store.notices import Notices
from services.experience_store.tables import DAMAGED, Tables
from troupe.rpc import NotFound, ResourceExhausted, TroupeError

log = structlog.get_logger(__name__)

MIB: Final = 2**20
_LOOK_SECONDS: Final = 0.5
_RETRY_MS: Final = 1000


class HighWater:
    """Knows how many payload bytes there are, and who may add to them."""

    def __init__(
        self, database: Database, tables: Tables, notices: Notices, mark_bytes: int = 0
    ) -> None:
        self._database = database
        self._tables = tables
        self._notices = notices
        self.mark_bytes = mark_bytes
        """0: no bound."""
        self.payload_bytes = 0
        """Of all jobs, as of the last look and by what this process let in since."""
        self._looked = -1.0
        self._looking = asyncio.Lock()
        self._background = Background()

    @property
    def over(self) -> bool:
        """Whether rows are pushed back."""
        return 0 < self.mark_bytes <= self.payload_bytes

    async def start(self) -> None:
        """Begin to look, where there is a mark, so that watchers learn when it is passed."""
        await self.look()
        if self.mark_bytes:
            self._background.start(self._look_forever(), "high water")

    async def stop(self) -> None:
        """End it."""
        await self._background.stop()

    async def admit(self, job: str, step: int, size: int) -> None:
        """Let `size` bytes of rows of a step in; raises `ResourceExhausted` to push them back.

        Rows of a job's oldest uncommitted step always come in.
        """
        if not self.mark_bytes or not size:
            return
        await self.look(at_most_every=_LOOK_SECONDS)
        if self.payload_bytes + size > self.mark_bytes and not await self._goes_on(job, step):
            raise ResourceExhausted(
                f"the experience store holds {self.payload_bytes / MIB:.1f} MiB of payloads",
                kind="store_full",
                field="TROUPE_STORE_HIGH_WATER_MIB",
                value=f"{self.mark_bytes / MIB:g}",
                remedy=(
                    "Rows go on when a step is committed; raise the mark where Redis has memory."
                ),
                retry_after_ms=_RETRY_MS,
            )
        self.payload_bytes += size

    async def look(self, *, at_most_every: float = 0.0) -> None:
        """Add up the bytes of all tables."""
        async with self._looking:
            if time.monotonic() - self._looked < at_most_every:
                return
            before = self.over
            jobs = [name.decode() for name in await self._database.execute("SMEMBERS", JOBS)]
            places = list[PolicyKeys]()
            for job in jobs:
                # One whose tables are damaged, of which the sweeper tells, keeps no other out.
                with contextlib.suppress(*DAMAGED):
                    places += await self._places(job)
            total = sum((await self._bytes(places)).values())
            self.payload_bytes, self._looked = total, time.monotonic()
        if self.over != before:
            log.info("high_water", over=self.over, payload_bytes=total, mark=self.mark_bytes)
            self._notices.ring_all()

    async def of_job(self, job: str) -> dict[str, int]:
        """Payload bytes of each policy's table."""
        found = await self._bytes(await self._places(job))
        return {place.policy: number for place, number in found.items()}

    async def _places(self, job: str) -> list[PolicyKeys]:
        try:
            table = await self._tables.get(job)
        except NotFound:
            return []
        return [PolicyKeys(job, policy) for policy in table.policies]

    async def _bytes(self, places: Sequence[PolicyKeys]) -> dict[PolicyKeys, int]:
        replies = await self._database.execute_each(
            [("HGET", place.head, "bytes") for place in places]
        )
        return {place: int(number or 0) for place, number in zip(places, replies, strict=True)}

    async def _goes_on(self, job: str, step: int) -> bool:
        """Whether rows of this step come in whatever there is. Those of queries that were carried
        to the oldest step may name one that is over.
        """
        oldest = await self._oldest(job)
        return oldest is not None and step <= oldest

    async def _oldest(self, job: str) -> int | None:
        """The job's oldest step that some policy has not committed."""
        table = await self._tables.get(job)
        for text in await self._database.execute("ZRANGE", JobKeys(job).live, 0, -1):
            step = int(text)
            commits = await self._database.execute_each(
                [("HEXISTS", PolicyKeys(job, policy).commits, step) for policy in table.policies]
            )
            if not all(commits):
                return step
        return None

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            with contextlib.suppress(TroupeError):
                await self.look(at_most_every=_LOOK_SECONDS)
