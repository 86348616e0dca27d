"""What the experience store pushes about a job's tables: that something changed, and its memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from services.orchestrator.faults import Attempts, Patience
from troupe.rpc import TroupeError, Unavailable
from troupe.v1 import experience_store_pb2 as es

if TYPE_CHECKING:  # a type of the stubs only
    from troupe.v1.experience_store_pb2_grpc import ExperienceStoreAsyncStub


# Steps that are open at once, and some.
_KEPT: Final = 64


class TableWatch:
    """Follows the tables of one job for as long as it runs; a store that is away is waited for."""

    def __init__(
        self,
        experience: ExperienceStoreAsyncStub,
        job_id: str,
        on_status: Callable[[], None] = lambda: None,
    ) -> None:
        self._experience = experience
        self._on_status = on_status
        # By step: what was pushed last; of the newest steps only.
        self._latest: dict[int, es.TableStatus] = {}
        self._job_id = job_id
        self._changed = asyncio.Event()
        # Whether nobody tells: then `latest` knows nothing.
        self.blind = True
        # Whether the store holds more than its high-water mark.
        self.over_high_water = False

    async def change(self, at_most: float) -> None:
        """Return when something may have changed: pushed, or so many seconds have passed."""
        try:
            async with asyncio.timeout(at_most):
                await self._changed.wait()
        except TimeoutError:
            return

    def latest(self, step: int) -> es.TableStatus | None:
        """What the store said last of a step."""
        return self._latest.get(step)

    async def run(self) -> None:
        """Follow, until cancelled."""
        attempts = Attempts(Patience("watching tables", math.inf, ""))
        request = es.WatchTablesRequest(job_id=self._job_id)
        while True:
            try:
                async for status in self._experience.WatchTables(request):
                    attempts.reset()
                    self.over_high_water = status.over_high_water
                    self.blind = False
                    self._latest[status.step] = status
                    self._latest = {
                        step: self._latest[step] for step in sorted(self._latest)[-_KEPT:]
                    }
                    self._on_status()
                    self.touch()
                error: TroupeError = Unavailable("the store ended the stream")
            except TroupeError as broken:
                # Whatever it is, the job does not depend on it: it looks by itself, too.
                error = Unavailable(str(broken))
            self.blind = True
            self._latest.clear()
            self._on_status()
            await attempts.failed(error)

    def touch(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()
