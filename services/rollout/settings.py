"""What the rollout service needs to know besides what every service does."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ServiceSettings


class RolloutSettings(ServiceSettings):
    """`ServiceSettings` and the patience of the rollout service."""

    blocked_seconds: float = Field(default=3.0, gt=0)
    """A workflow that holds the event loop this long without awaiting is interrupted and its
    trajectory fails. The default is less than the missed heartbeats that make a worker LOST."""

    # What its engines run on, for jobs that do not say so themselves (docs/rollout.md).
    device_class: str = ""
    """Class of this worker's devices: a name that jobs' `routing.affinity` uses."""
    device_prefill_tokens_per_second: float = Field(default=0, ge=0)
    """Prompt tokens that one engine here reads per second, as measured; 0: unknown."""
    device_decode_tokens_per_second: float = Field(default=0, ge=0)
    """Response tokens that one engine here draws per second for all its turns together; 0:
    unknown."""

    # OpenAI's API for agents (docs/openai.md).
    endpoint_host: str = "127.0.0.1"
    """Interface that it listens on."""
    endpoint_port: int = Field(default=0, ge=0, le=65535)
    """Its port; 0 takes a free one when a workflow first asks for an endpoint."""
    endpoint_url: str | None = None
    """`http://host:port` at which clients reach it, where that is not where it listens."""
    endpoint_body_mib: int = Field(default=16, gt=0, le=1024)
    """Largest request."""
