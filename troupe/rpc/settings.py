"""What a client needs to know to call a service: secrets, limits, deadlines."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from troupe.rpc.retry import RetryPolicy


class ClientSettings(BaseSettings):
    """Settings of a channel, read from `TROUPE_*` unless given."""

    model_config = SettingsConfigDict(
        env_prefix="TROUPE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    token: SecretStr | None = None
    """Bearer token that the services were started with."""
    tls_ca: Path | None = None
    """PEM file of the authority that signed the services' certificate; turns TLS on."""
    tls_cert: Path | None = None
    """PEM certificate of this client, where the services ask for one."""
    tls_key: Path | None = None
    """PEM key of `tls_cert`."""
    deadline_seconds: float = Field(default=60, gt=0)
    """Deadline of a unary call that names none. All attempts together."""
    max_message_mib: int = Field(default=64, gt=0, le=2047)
    """Largest message, either way."""
    retry: RetryPolicy = RetryPolicy()
    """How calls are repeated."""
