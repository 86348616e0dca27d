"""What the rollout service needs to know besides what every service does."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ServiceSettings


class RolloutSettings(ServiceSettings):
    """`ServiceSettings` and the patience of the rollout service."""

    blocked_seconds: float = Field(default=3.0, gt=0)
    """A workflow that holds the event loop this long without awaiting is interrupted and its
    trajectory fails. The default is less than the missed heartbeats that make a worker LOST."""
