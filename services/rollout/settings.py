"""Settings of the rollout service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.chassis.settings import ServiceSettings
from troupe.rpc.settings import Interface


class RolloutSettings(ServiceSettings):
    """`ServiceSettings`, and the rollout service's own settings."""

    blocked_seconds: float = Field(default=3.0, gt=0)
    """A workflow that blocks the event loop this long without awaiting is interrupted and its
    trajectory fails. The default is less than the missed heartbeats that make a worker LOST."""

    rollout_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where embedded engines compute; `auto`: on the first GPU that the worker sees, if any."""

    # Devices of this worker's engines, for jobs that do not name them (docs/rollout.md).
    device_class: str = ""
    """Class of this worker's devices: a name that jobs' `routing.affinity` uses."""
    device_prefill_tokens_per_second: float = Field(default=0, ge=0)
    """Measured prompt tokens per second of one engine here; 0: unknown."""
    device_decode_tokens_per_second: float = Field(default=0, ge=0)
    """Measured response tokens per second of one engine here, over all its turns; 0: unknown."""

    # OpenAI's API for agents (docs/openai.md).
    endpoint_host: Interface = "127.0.0.1"
    """Interface to listen on."""
    endpoint_port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one when a workflow first opens an endpoint."""
    endpoint_url: str | None = None
    """`http://host:port` at which clients reach it, where that differs from where it listens."""
    endpoint_body_mib: int = Field(default=16, gt=0, le=1024)
    """Largest request body."""
