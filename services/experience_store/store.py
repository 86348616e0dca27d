"""The experience store without gRPC: its parts, wired once."""

from __future__ import annotations

import contextlib

import structlog

from services.experience_store.amendments import Amendments
from services.experience_store.audit import Audit
from services.experience_store.claims import Claims
from services.experience_store.commits import Commits
from services.experience_store.database import Database
from services.experience_store.describe import Descriptions
from services.experience_store.high_water import HighWater
from services.experience_store.log import Log
from services.experience_store.notices import Notices
from services.experience_store.recent import DEFAULT_BYTES, RecentRows
from services.experience_store.rosters import Rosters
from services.experience_store.samples import Samples
from services.experience_store.steps import KEEP_STEPS, Steps
from services.experience_store.sweeper import PERIOD_SECONDS, Sweeper
from services.experience_store.tables import Tables
from services.experience_store.trajectories import Trajectories
from services.experience_store.watching import Usage, Watching
from troupe.rpc import TroupeError

log = structlog.get_logger(__name__)


class Store:
    """All that the servicer calls."""

    def __init__(
        self,
        database: Database,
        *,
        keep_steps: int = KEEP_STEPS,
        sweep_seconds: float = PERIOD_SECONDS,
        high_water_bytes: int = 0,
        recent_bytes: int = DEFAULT_BYTES,
    ) -> None:
        self.database = database
        self.notices = Notices(database)
        self.log = Log(database)
        self.tables = Tables(database, self.log)
        self.rosters = Rosters(database, self.tables, self.notices)
        self.steps = Steps(database, self.tables, self.notices, self.log, self.rosters, keep_steps)
        self.amendments = Amendments(database, self.tables, self.rosters)
        self.recent = RecentRows(recent_bytes)
        self.trajectories = Trajectories(
            database, self.tables, self.steps, self.notices, self.recent
        )
        self.samples = Samples(database, self.tables, self.steps, self.notices, self.recent)
        self.claims = Claims(self.tables, self.steps, self.samples, self.notices)
        self.commits = Commits(database, self.tables, self.steps, self.notices)
        self.audit = Audit(database, self.tables, self.steps, self.log)
        self.high_water = HighWater(database, self.tables, self.notices, high_water_bytes)
        self.descriptions = Descriptions(database, self.tables, self.steps, self.high_water)
        self.watching = Watching(self.tables, self.steps, self.notices, self.usage)
        self.sweeper = Sweeper(database, self.tables, self.steps, sweep_seconds)

    async def usage(self) -> Usage:
        """How full the store is."""
        with contextlib.suppress(TroupeError):
            await self.high_water.look(at_most_every=1.0)
        return Usage(self.high_water.payload_bytes, self.high_water.over)

    async def start(self) -> None:
        """Wait until Redis answers, then begin to listen and to sweep.

        Raises `FailedPrecondition` when waiting cannot help: Redis is too old, or refuses us.
        """
        info = await self.database.wait_ready()
        if info.get("maxmemory", "0") != "0" and info.get("maxmemory_policy") != "noeviction":
            # An evicted key is a lost sample; refusing writes is an error that callers see.
            log.warning(
                "redis_may_evict",
                redis=self.database.address,
                policy=info.get("maxmemory_policy"),
                remedy="Set maxmemory-policy to noeviction.",
            )
        await self.notices.start()
        await self.sweeper.start()
        await self.high_water.start()
        log.info("redis_ready", redis=self.database.address, version=info.get("redis_version"))

    async def stop(self) -> None:
        """Let waiting callers go and give the connections back."""
        await self.high_water.stop()
        await self.sweeper.stop()
        await self.notices.stop()
        await self.database.close()
