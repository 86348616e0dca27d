"""Quotas of interfaces outside: what calls may send them, all services together."""

from services.reward.quota.buckets import Buckets, LocalBuckets, RedisBuckets
from services.reward.quota.budget import Budget
from services.reward.quota.manager import PREFIX, QuotaManager
from services.reward.quota.settings import QuotaSettings, open_quotas

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
