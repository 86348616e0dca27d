"""What the experience store needs to know besides what every service does."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ServiceSettings
from services.experience_store.recent import DEFAULT_BYTES, MIB


class StoreSettings(ServiceSettings):
    """`ServiceSettings`, where the samples are, and how many of them."""

    store_redis_url: str | None = None
    """Redis that holds samples, where it is another than `redis_url`. `redis-cluster://HOST:PORT`
    names one node of a Redis Cluster."""
    store_high_water_mib: int = Field(default=0, ge=0)
    """Payloads above this push rows back, but for those of a job's oldest uncommitted step; 0: no
    bound. Half of Redis' `maxmemory` leaves room for what is not payload."""

    store_recent_mib: int = Field(default=DEFAULT_BYTES // MIB, ge=0)
    """Payloads that the store keeps in its own memory from their append to their claim, so that it
    need not read them back from Redis; 0: none. Nothing depends on them but speed."""

    @property
    def samples_url(self) -> str:
        """URL of the Redis that holds samples."""
        return self.store_redis_url or self.redis_url
