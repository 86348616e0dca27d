"""gRPC channels to services, with deadlines, retries, credentials, trace context and typed errors.

A channel gives every unary call a deadline, retries it by `RetryPolicy`, sends the bearer token,
the trace context and the job/policy/trajectory ids of the log context, and raises `TroupeError`
instead of `grpc.RpcError`. Streams are not retried: their callers resume them. A caller that
leaves a stream early must call its `cancel()`; otherwise the server goes on until the call is
garbage-collected. `Faults` are injected network faults: calls that are sent twice or late.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import grpc
import structlog
from grpc.experimental import ChannelOptions
from opentelemetry import propagate

from troupe.rpc.addresses import host_of, is_loopback_host
from troupe.rpc.authentication import HEADER, ClusterToken
from troupe.rpc.errors import FailedPrecondition, InvalidArgument, from_rpc_error
from troupe.rpc.settings import ClientSettings
from troupe.rpc.tokens import local_token

# Keys of the log context that are sent with a call, as `troupe-job-id` and so on.
CONTEXT_IDS: Final = ("job_id", "policy", "trajectory_id")


def context_key(name: str) -> str:
    """Return the metadata key that carries the context id `name`."""
    return "troupe-" + name.replace("_", "-")


def connect(address: str, settings: ClientSettings | None = None) -> grpc.aio.Channel:
    """Return an asyncio channel to the service at `address` ("host:port"). Connects on first use.

    Without a token in `settings`, the token of this user's embedded cluster is used for its own
    services. TLS is not used for Unix sockets ("unix:PATH"), which file permissions protect.
    """
    settings = settings or ClientSettings.of_environment()
    common = _ChannelContext(address, settings)
    interceptors: list[Any] = [_AioUnary(common), _AioStream(common), _AioDuplex(common)]
    options = _options(address, settings)
    if (credentials := _credentials(address, settings)) is not None:
        return grpc.aio.secure_channel(address, credentials, options, interceptors=interceptors)
    return grpc.aio.insecure_channel(address, options, interceptors=interceptors)


def connect_sync(
    address: str, settings: ClientSettings | None = None, *, no_threads: bool = False
) -> grpc.Channel:
    """Connect without an event loop. (`stub.Method.future` blocks, since it retries.)

    With `no_threads`, the iterating thread reads response streams; starting a gRPC thread costs
    half a millisecond.
    """
    settings = settings or ClientSettings.of_environment()
    options = _options(address, settings)
    if no_threads:
        options.append((ChannelOptions.SingleThreadedUnaryStream, 1))
    if (credentials := _credentials(address, settings)) is not None:
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address, options)
    return grpc.intercept_channel(channel, _Sync(_ChannelContext(address, settings)))


def channel_options(max_message_mib: int) -> list[tuple[str, Any]]:
    """Return gRPC channel arguments: keep-alive, message limit, quick reconnection."""
    limit = max_message_mib * 2**20
    return [
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_send_message_length", limit),
        # Detects a peer that vanished without a FIN within 30 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # No proxy between services.
        ("grpc.enable_http_proxy", 0),
        # Only troupe.rpc.retry retries.
        ("grpc.enable_retries", 0),
        # The default backoff of reconnections grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Otherwise all channels to an address share a broken connection and its backoff.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _options(address: str, settings: ClientSettings) -> list[tuple[str, Any]]:
    options = channel_options(settings.max_message_mib)
    if settings.proxy and not is_loopback_host(host_of(address)):
        options = [(name, 1 if name == "grpc.enable_http_proxy" else v) for name, v in options]
    if settings.tls_ca is not None and settings.tls_name:
        options.append(("grpc.ssl_target_name_override", settings.tls_name))
    return options


def _credentials(address: str, settings: ClientSettings) -> grpc.ChannelCredentials | None:
    if settings.tls_ca is None or address.startswith("unix:"):
        return None
    files = {"tls_ca": settings.tls_ca, "tls_cert": settings.tls_cert, "tls_key": settings.tls_key}
    pem: dict[str, bytes | None] = {}
    for name, path in files.items():
        try:
            pem[name] = None if path is None else path.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"cannot be read: {error.strerror}",
                field=name,
                value=path,
                remedy=f"Set TROUPE_{name.upper()} to a readable PEM file.",
            ) from error
    return grpc.ssl_channel_credentials(pem["tls_ca"], pem["tls_key"], pem["tls_cert"])


class _ChannelContext:
    """The address, settings, credentials and metadata that a channel's interceptors share."""

    def __init__(self, address: str, settings: ClientSettings) -> None:
        self._address = address
        self.settings = settings
        token = settings.token or local_token(address)
        self._authorization = None if token is None else ClusterToken(token).header
        # Set in tests of network faults only.
        self.faults = faults_of(address)

    def target(self, details: grpc.ClientCallDetails) -> str:
        method = details.method
        name = method.decode() if isinstance(method, bytes) else method
        return f"{name.lstrip('/')} at {self._address}"

    def timeout(self, details: grpc.ClientCallDetails) -> float:
        given: float | None = details.timeout
        return self.settings.deadline_seconds if given is None else given

    def metadata(self, details: grpc.ClientCallDetails) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = list(details.metadata or ())
        present = {key for key, _ in pairs}
        if self._authorization is not None and HEADER not in present:
            pairs.append((HEADER, self._authorization))
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        pairs.extend(carrier.items())
        bound = structlog.contextvars.get_contextvars()
        for name in CONTEXT_IDS:
            value = bound.get(name)
            if not value or (key := context_key(name)) in present:
                continue
            if (text := str(value)).isascii() and text.isprintable():
                pairs.append((key, text))
        return pairs


def _closed(target: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"the connection is closed ({target})",
        kind="client_closed",
        remedy="Call before it is closed, or open another.",
    )


class _AioUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, common: _ChannelContext) -> None:
        self._common = common

    async def intercept_unary_unary(
        self,
        continuation: Callable[[Any, Any], Awaitable[Any]],
        details: Any,
        request: Any,
    ) -> Any:
        common = self._common
        metadata = grpc.aio.Metadata(*common.metadata(details))
        timeout = common.timeout(details)

        async def attempt(left: float | None) -> Any:
            details_now = details._replace(timeout=left, metadata=metadata)
            try:
                if common.faults is not None:
                    return await self._misbehave(continuation, details_now, request)
                call = await continuation(details_now, request)
                await call
            except grpc.RpcError as error:
                raise from_rpc_error(
                    error, target=common.target(details), timeout=timeout
                ) from None
            except grpc.aio.UsageError:
                raise _closed(common.target(details)) from None
            return call

        return await common.settings.retry.run(attempt, timeout)

    async def _misbehave(
        self, continuation: Callable[[Any, Any], Awaitable[Any]], details: Any, request: Any
    ) -> Any:
        """Make the call late or twice, as the faults say; awaits it. Raises `grpc.RpcError`."""
        faults = self._common.faults
        assert faults is not None
        if pause := faults.pause():
            await asyncio.sleep(pause)
        twice = faults.twice(request)
        call = await continuation(details, request)
        if twice is Twice.TOGETHER:
            second = await continuation(details, request)
            try:
                await second
            except grpc.RpcError:
                pass  # ignore the duplicate's answer
            except BaseException:
                call.cancel()
                raise
        await call
        if twice is Twice.AFTER:
            call = await continuation(details, request)
            await call
        return call


class _AioReader:
    """Base class of the interceptors of response streams."""

    def __init__(self, common: _ChannelContext) -> None:
        self._common = common

    async def open(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        metadata = grpc.aio.Metadata(*self._common.metadata(details))
        try:
            call = await continuation(details._replace(metadata=metadata), request)
        except grpc.aio.UsageError:
            raise _closed(self._common.target(details)) from None
        return self._read(call, details)

    async def _read(self, call: Any, details: Any) -> AsyncIterator[Any]:
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise from_rpc_error(
                error, target=self._common.target(details), timeout=details.timeout
            ) from None
        finally:
            # Tell the server when the reader stops early.
            call.cancel()


class _AioStream(_AioReader, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _AioReader.open  # type: ignore[assignment]


class _AioDuplex(_AioReader, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream = _AioReader.open  # type: ignore[assignment]


class _Sync(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, common: _ChannelContext) -> None:
        self._common = common

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        common = self._common
        metadata = tuple(common.metadata(details))
        timeout = common.timeout(details)

        def attempt(left: float | None) -> Any:
            details_now = details._replace(timeout=left, metadata=metadata)
            if (faults := common.faults) is not None:
                time.sleep(faults.pause())
                if faults.twice(request) is not Twice.NO:
                    continuation(details_now, request)
            outcome = continuation(details_now, request)
            try:
                outcome.result()
            except grpc.RpcError as error:
                raise from_rpc_error(
                    error, target=common.target(details), timeout=timeout
                ) from None
            return outcome

        return common.settings.retry.run_sync(attempt, timeout)

    def intercept_unary_stream(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        metadata = tuple(self._common.metadata(details))
        call = continuation(details._replace(metadata=metadata), request)
        return _SyncStream(call, self._common.target(details), details.timeout)


class _SyncStream:
    """A response stream that raises typed errors and can be cancelled."""

    def __init__(self, call: Any, target: str, timeout: float | None) -> None:
        self._call = call
        self._target = target
        self._timeout = timeout

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            if isinstance(error, grpc.FutureCancelledError) or self._call.cancelled():
                raise StopIteration from None
            raise from_rpc_error(error, target=self._target, timeout=self._timeout) from None

    def cancel(self) -> None:
        """Cancel the call, also on the server."""
        self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


# Enables injected network faults; tests and `troupe chaos` set it.
# TROUPE_FAULTS="duplicate=0.05,delay=0.1:0.2,seed=7" sends one in twenty mutating calls a second
# time under its request id, and one in ten unary calls up to 0.2 s late. Faults must not change any
# result.
FAULTS_VARIABLE: Final = "TROUPE_FAULTS"
_REMEDY: Final = f'Write for example {FAULTS_VARIABLE}="duplicate=0.05,delay=0.1:0.2,seed=7".'


class Twice(Enum):
    """The way in which a call is sent a second time."""

    NO = "no"
    AFTER = "after"
    """After the first has been answered; the caller gets the second answer."""
    TOGETHER = "together"
    """Concurrently; the caller gets the first answer."""


@dataclass(frozen=True)
class FaultSettings:
    """The probabilities of faults per call."""

    duplicate: float = 0.0
    delay: float = 0.0
    # Upper bound of the delay of a late call.
    delay_seconds: float = 0.0
    seed: int = 0

    @staticmethod
    def parse(text: str) -> FaultSettings:
        """Parse `duplicate=P,delay=P:SECONDS,seed=N`, in any order.

        Raises `InvalidArgument`, which names the wrong part.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            try:
                if name == "duplicate":
                    values["duplicate"] = _bounded(value, 1, "a probability")
                elif name == "delay":
                    chance, _, seconds = value.partition(":")
                    values["delay"] = _bounded(chance, 1, "a probability")
                    values["delay_seconds"] = _bounded(seconds, 60, "a number of seconds")
                elif name == "seed":
                    values["seed"] = int(value)
                else:
                    raise ValueError("is not known")
            except ValueError as error:
                raise InvalidArgument(
                    f"'{part}': {error}.", field=FAULTS_VARIABLE, value=text, remedy=_REMEDY
                ) from None
        return FaultSettings(**values)

    def text(self) -> str:
        """Return the settings as text for `parse`."""
        return (
            f"duplicate={self.duplicate:g},delay={self.delay:g}:{self.delay_seconds:g},"
            f"seed={self.seed}"
        )


class Faults:
    """The source of faults for the calls of one channel."""

    def __init__(self, settings: FaultSettings, address: str) -> None:
        """Seed the draws, which depend on the seed, on `address` and on the order of calls."""
        self._settings = settings
        self._random = random.Random(f"{settings.seed}/{address}")

    def pause(self) -> float:
        """Return the delay of the next call in seconds; 0 for most calls."""
        settings = self._settings
        if self._random.random() >= settings.delay:
            return 0.0
        return self._random.uniform(0.0, settings.delay_seconds)

    def twice(self, request: Any) -> Twice:
        """Return whether and how `request`, if it is mutating, is sent a second time."""
        if not getattr(request, "request_id", ""):
            return Twice.NO
        if self._random.random() >= self._settings.duplicate:
            return Twice.NO
        return self._random.choice((Twice.AFTER, Twice.TOGETHER))


def faults_of(address: str) -> Faults | None:
    """Return the faults of a new channel to `address`; None unless `TROUPE_FAULTS` asks for
    some."""
    text = os.environ.get(FAULTS_VARIABLE)
    return Faults(FaultSettings.parse(text), address) if text else None


def _bounded(text: str, most: int, what: str) -> float:
    value = float(text)
    if not 0 <= value <= most:
        raise ValueError(f"is not {what} from 0 to {most}")
    return value
