"""The life of a job whose store may die at any Redis round trip."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from services.experience_store.database import Database
from services.experience_store.store import Store
from tests.support.crashing import CrashError, CrashingDatabase
from tests.support.experience import Stage
from troupe.rpc import new_id


class MortalLife:
    """A life of groups of two; a repeated call finds another process."""

    def __init__(
        self,
        url: str,
        fatal: int,
        moment: str,
        policies: tuple[str, ...],
        queries: tuple[str, ...],
        *,
        clustered: bool = False,
        make_store: Callable[[Database], Store] = Store,
    ) -> None:
        self._url, self._make_store = url, make_store
        self.database = CrashingDatabase(url, fatal, moment, clustered=clustered)
        self.crashed = 0
        self.stage = Stage(make_store(self.database), new_id("job"), policies, queries, 2)

    async def call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            return await call()
        except CrashError:
            self.crashed += 1
            await self.stage.store.database.close()
            self.stage.store = self._make_store(Database(self._url))
            return await call()

    async def close(self) -> None:
        await self.stage.store.database.close()
