"""Quotas as an operator declares them, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
from pydantic import BaseModel, ConfigDict, Field

from services.reward.quota.buckets import Buckets, LocalBuckets, RedisBuckets
from services.reward.quota.manager import QuotaManager
from troupe.scheduling.elastic.quota import Limits

log = structlog.get_logger("troupe.reward")


class QuotaSettings(BaseModel):
    """What an interface outside allows all who call it together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Units per second; 0: no such limit."""
    burst: int = Field(default=1, ge=1)
    """Units at once after a pause; no call may take more. Only with `rate`."""
    concurrency: int = Field(default=0, ge=0)
    """Units in use at a time; 0: no such limit."""


def open_quotas(
    declared: Mapping[str, QuotaSettings],
    redis_url: str | None,
    holder: str,
    changed: Callable[[], None],
) -> QuotaManager | None:
    """None where no quota is declared. Without `redis_url` they are this process' alone."""
    if not declared:
        return None
    limits = {name: Limits(q.rate, q.burst, q.concurrency) for name, q in declared.items()}
    buckets: Buckets
    if redis_url is None:
        buckets = LocalBuckets(limits)
        log.warning(
            "quotas are counted in this process only; set TROUPE_REDIS_URL to share them",
            quotas=sorted(limits),
        )
    else:
        buckets = RedisBuckets(redis_url, limits, holder)
        log.info("quotas are shared through Redis", quotas=sorted(limits))
    return QuotaManager(limits, buckets, changed)
