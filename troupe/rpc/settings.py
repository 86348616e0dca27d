"""Client settings of gRPC channels: credentials, limits, deadlines, retries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from troupe.rpc.addresses import bare_host
from troupe.rpc.errors import InvalidArgument
from troupe.rpc.retry import RetryPolicy


def _sendable(token: SecretStr) -> SecretStr:
    text = token.get_secret_value()
    if not text.isascii() or not text.isprintable() or text != text.strip():
        raise ValueError("must be printable ASCII without spaces around it, as headers carry it")
    return token


def _interface(host: str) -> str:
    host = bare_host(host)
    return "0.0.0.0" if host in ("", "*") else host


Token = Annotated[SecretStr, AfterValidator(_sendable)]
"""A bearer token, valid as a gRPC header."""
Host = Annotated[str, AfterValidator(bare_host)]
"""A name or an address, also with the brackets of an IPv6 address."""
Interface = Annotated[str, AfterValidator(_interface)]
"""A host to listen at; `*` and an empty text are all IPv4 interfaces, as in other servers."""


class ClientSettings(BaseSettings):
    """The settings of a channel, read from `TROUPE_*` unless given."""

    model_config = SettingsConfigDict(
        env_prefix="TROUPE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    token: Token | None = None
    """Bearer token of the cluster."""
    tls_ca: Path | None = None
    """PEM file of the certificate authority of the services; enables TLS."""
    tls_name: str | None = None
    """Name that services' certificates must carry; None: the address at which each is called."""
    tls_cert: Path | None = None
    """PEM certificate of this client, for services that require one."""
    tls_key: Path | None = None
    """PEM key of `tls_cert`."""
    deadline_seconds: float = Field(default=60, gt=0)
    """Default deadline of unary calls, over all attempts."""
    max_message_mib: int = Field(default=64, gt=0, le=2047)
    """Maximum message size in either direction."""
    proxy: bool = False
    """Reach other hosts through the proxy of `http_proxy` or `grpc_proxy`; never loopback."""
    retry: RetryPolicy = RetryPolicy()
    """Retries of unary calls."""

    @staticmethod
    def of_environment() -> ClientSettings:
        """Read the settings from `TROUPE_*`. Raises `InvalidArgument` for the first invalid
        variable."""
        remedy = "Correct the variable, or unset it."
        try:
            return ClientSettings()
        except SettingsError as error:
            # A variable that holds JSON; the message names the field.
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
