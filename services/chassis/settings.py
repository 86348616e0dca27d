"""Settings that every service has, read from `TROUPE_*` environment variables."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from troupe.disks import memory_root
from troupe.rpc import ClientSettings, InvalidArgument, RetryPolicy
from troupe.rpc.addresses import (
    is_loopback_host,
    join_address,
    reachable_host,
    split_address,
)
from troupe.rpc.settings import Host, Interface, Token

S = TypeVar("S", bound="ServiceSettings")


class ServiceSettings(BaseSettings):
    """The settings that all services have; a service with more settings derives from this class."""

    model_config = SettingsConfigDict(
        env_prefix="TROUPE_", env_ignore_empty=True, extra="ignore", frozen=True
    )

    # Listening addresses.
    host: Interface = "127.0.0.1"
    """Interface to listen on; default: loopback."""
    port: int = Field(default=0, ge=0, le=65535)
    """gRPC port; 0 takes a free one."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of Prometheus' `/metrics`; 0 takes a free one."""
    advertise_address: str | None = None
    """The "host:port" at which others reach this server, if it differs from `host:port`."""
    port_file: Path | None = None
    """File to which "grpc_port metrics_port" is written once the service serves."""

    # Authentication and TLS.
    token: Token | None = None
    """Bearer token that callers must send; the same for all services."""
    tls_cert: Path | None = None
    """PEM certificate (chain) of this server; with `tls_key` it turns TLS on."""
    tls_key: Path | None = None
    """PEM key of `tls_cert`."""
    tls_ca: Path | None = None
    """PEM file of the authority that signs the services' certificates."""
    tls_name: str | None = None
    """Name in the certificates of all services, if these do not contain addresses."""
    tls_client_auth: bool = False
    """Refuse clients without a certificate signed by `tls_ca`."""

    proxy: bool = False
    """Call other hosts through the proxy that `http_proxy` or `grpc_proxy` names."""

    # Limits.
    max_message_mib: int = Field(default=64, gt=0, le=2047)
    """Largest message in either direction."""
    server_deadline_seconds: float = Field(default=600, gt=0)
    """Deadline of a unary call whose client does not set one."""
    idempotency_seconds: float = Field(default=600, gt=0)
    """How long the response to a request id is remembered."""
    drain_seconds: float = Field(default=10, ge=0)
    """How long calls in flight may continue after SIGTERM."""
    stream_drain_seconds: float = Field(default=1, ge=0)
    """The same for streams, which a client resumes elsewhere."""
    stall_exit_seconds: float = Field(default=300, ge=0)
    """Time after which a blocked event loop ends the process; 0: never."""
    threads: int = Field(default=1, gt=0)
    """Thread budget of numerical libraries in this process."""

    host_use_seconds: float = Field(default=10, gt=0)
    """How often workers and the orchestrator measure the memory and GPUs of their host, and the
    orchestrator keeps a row of all hosts' utilization."""

    # Logging.
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    slow_call_seconds: float = Field(default=5, gt=0)
    """A unary call longer than this is logged and counted."""

    # Addresses of the other services.
    orchestrator_address: str = "127.0.0.1:50051"
    experience_store_address: str = "127.0.0.1:50052"
    reward_address: str = "127.0.0.1:50055"
    redis_url: str = "redis://127.0.0.1:6379/0"

    # Data directories and weight transfer.
    data_dir: Path = Path("runs")
    """Jobs' directories; shared by the services of a host, or of the cluster."""
    transfer_dir: Path = Field(default_factory=lambda: memory_root() / f"troupe-{os.getuid()}")
    """tmpfs directory through which weights move on this host."""
    transfer_fallback_dir: Path | None = None
    """Directory for weights as files, slower and with a warning, while `transfer_dir` has no room;
    the same for all services of a host. Without it, a full `transfer_dir` is an error."""
    transfer_serve: Literal["auto", "on", "off"] = "auto"
    """Whether hosts read weights and states from each other; `auto`: if `host` is more than
    loopback."""
    transfer_host: Host | None = None
    """Name or address at which other hosts reach this host's states, if it differs from
    `address`."""
    transfer_port: int = Field(default=0, ge=0, le=65535)
    """Port of the host's transfer owner; 0 takes a free one."""
    transfer_ucx: bool = True
    """Move bytes between hosts through UCX if both have it, otherwise through gRPC."""
    simulated_trace_dir: Path | None = None
    """File in which simulated stand-ins record their busy times (`testbed.timeline`)."""

    # Identity of the process.
    worker_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    )
    """Name of this process; a restarted process must have a new one."""
    node: str = ""
    """Name of the node that started this process (`troupe node`); empty: none."""
    parent_pid: int | None = None
    """Stop when the process with this id has ended (set by the embedded cluster)."""

    @property
    def address(self) -> str:
        """The "host:port" at which others reach this server, with the bound port once it runs."""
        if self.advertise_address:
            # In a pod it is "$(POD_IP):50051", in which an IPv6 address has no brackets.
            host, port = split_address(self.advertise_address)
            return join_address(host, port) if host else port
        return join_address(reachable_host(self.host), self.port)

    @property
    def cluster_addresses(self) -> list[str]:
        """Return the addresses of this server and of the servers that it calls."""
        others = (self.orchestrator_address, self.experience_store_address, self.reward_address)
        return [self.address, socket.gethostname(), *others, self.redis_url]

    @property
    def strangers(self) -> str | None:
        """Text for a warning about the callers that need no token; None if the server has a
        token."""
        if self.token is not None:
            return None
        local = is_loopback_host(self.host)
        return "every user of this machine" if local else "everyone with access to this address"

    @property
    def shares_states(self) -> bool:
        """Whether weights and states are transferred between hosts (`transfer_serve`)."""
        if self.transfer_serve == "auto":
            return not is_loopback_host(self.host)
        return self.transfer_serve == "on"

    def client(self, *, retry: RetryPolicy | None = None) -> ClientSettings:
        """Return settings for calls to other services: the same token, authority and limits."""
        return ClientSettings(
            token=self.token,
            tls_ca=self.tls_ca,
            tls_name=self.tls_name,
            tls_cert=self.tls_cert if self.tls_client_auth else None,
            tls_key=self.tls_key if self.tls_client_auth else None,
            max_message_mib=self.max_message_mib,
            proxy=self.proxy,
            retry=retry or RetryPolicy(),
        )


def read_settings(model: type[S], program: str) -> S | None:
    """Read settings from the environment; None if they are invalid, after an error on stderr."""
    try:
        return model()
    except SettingsError as error:  # a variable with invalid JSON; the message names it
        print(f"{program}: {error}. See docs/operating.md.", file=sys.stderr)
    except InvalidArgument as error:  # from a scheduler's variable that sets a default
        print(f"{program}: {error}", file=sys.stderr)
    except ValidationError as error:
        from troupe.job.loading import explained

        for fault in explained(error, model, "See docs/operating.md."):
            # The variable, and the place in it: TROUPE_REWARD_QUOTAS.search.untis
            variable, _, inside = fault.field.partition(".")
            renamed = replace(fault, field=f"TROUPE_{variable.upper()}{inside and '.'}{inside}")
            print(f"{program}: {renamed}", file=sys.stderr)
    return None
