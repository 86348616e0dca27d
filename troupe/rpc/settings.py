"""What a client needs to know to call a service: secrets, limits, deadlines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from troupe.rpc.errors import InvalidArgument
from troupe.rpc.retry import RetryPolicy


def _sendable(token: SecretStr) -> SecretStr:
    text = token.get_secret_value()
    if not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("must be printable ASCII without spaces around it, as headers carry it")
    return token


Token = Annotated[SecretStr, AfterValidator(_sendable)]
"""A bearer token as calls carry it."""


class ClientSettings(BaseSettings):
    """Settings of a channel, read from `TROUPE_*` unless given."""

    model_config = SettingsConfigDict(
        env_prefix="TROUPE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    token: Token | None = None
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
    proxy: bool = False
    """Reach other hosts through the proxy that `http_proxy` or `grpc_proxy` names; loopback never
    is."""
    retry: RetryPolicy = RetryPolicy()
    """How calls are repeated."""

    @staticmethod
    def of_environment() -> ClientSettings:
        """What `TROUPE_*` says. Raises `InvalidArgument`, which names the first variable that is
        not as it must be."""
        remedy = "Correct the variable, or unset it."
        try:
            return ClientSettings()
        except SettingsError as error:
            # Of a variable that holds JSON: the message says which field.
            raise InvalidArgument(str(error), field="TROUPE_*", remedy=remedy) from None
        except ValidationError as error:
            fault = error.errors()[0]
            name, *inside = map(str, fault["loc"])
            raise InvalidArgument(
                str(fault["msg"]).removeprefix("Value error, "),
                field=".".join([f"TROUPE_{name.upper()}", *inside]),
                value=None if name == "token" else fault["input"],
                remedy=remedy,
            ) from None
