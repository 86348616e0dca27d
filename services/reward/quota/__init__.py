"""Quotas of interfaces outside: what calls may send them, all services together."""

from services.reward.quota.buckets import Buckets, LocalBuckets, RedisBuckets
from services.reward.quota.manager import PREFIX, QuotaManager

__all__ = ["PREFIX", "Buckets", "LocalBuckets", "QuotaManager", "RedisBuckets"]
