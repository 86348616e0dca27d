"""Quotas of interfaces outside: what calls may send them, all services together."""

from services.reward.quota.manager import (
    PREFIX,
    Buckets,
    Budget,
    LocalBuckets,
    QuotaManager,
    QuotaSettings,
    RedisBuckets,
    open_quotas,
)

__all__ = [
    "PREFIX",
    "Buckets",
    "Budget",
    "LocalBuckets",
    "QuotaManager",
    "QuotaSettings",
    "RedisBuckets",
    "open_quotas",
]
