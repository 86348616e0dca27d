"""The life of a service process, from settings to exit status: serve, become ready, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.chassis import logs
from services.chassis.interceptor import ChassisInterceptor
from services.chassis.process import bind, server_options, watch_parent
from services.chassis.settings import ServiceSettings, read_settings
from services.chassis.telemetry import LoopWatch, Telemetry, configure_tracing
from services.chassis.watchdog import start_watchdog
from troupe.disks import private_cache, replace_file
from troupe.outcomes import described
from troupe.rpc import TroupeError
from troupe.rpc.addresses import bypass_proxy
from troupe.rpc.errors import HEALTH_PROBLEM_KEY
from troupe.user_code import DEBUG_REMEDY, DaemonThreads, as_exception, refuse_breakpoints

log = structlog.get_logger("troupe.app")

S = TypeVar("S", bound=ServiceSettings)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# gRPC's default limit of all metadata is 8 KiB.
_MOST_PROBLEM_BYTES = 2000


class ServiceDefinition(Protocol):
    """Interface of a service that the chassis serves.

    Its handlers report errors by raising `TroupeError`, never by aborting the context. It may also
    have `problem: str | None`, the problem that an operator has to solve before `start` returns or
    the service works again, which appears in health checks and in the errors of calls refused
    meanwhile; and `async def leave()`, which announces the shutdown within a few seconds, when new
    calls are already refused.
    """

    name: str
    """Full gRPC name, such as "troupe.v1.Reward"."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""

    async def start(self) -> None:
        """Start the service; until it returns, calls get UNAVAILABLE and health is NOT_SERVING."""

    async def stop(self, grace: float) -> None:
        """Release all resources within `grace` seconds, after the last call has ended.

        Also called after a `start` that failed or was interrupted.
        """


Factory = Callable[[S, Telemetry], ServiceDefinition]


class _Health(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """Health checks that also report the problem, in their trailing metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: Callable[[], str | None] = lambda: None

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:
        if problem := self.problem():
            told = problem.encode()[:_MOST_PROBLEM_BYTES]
            context.set_trailing_metadata(((HEALTH_PROBLEM_KEY, told),))
        return await super().Check(request, context)


class RunningServer(Generic[S]):
    """A gRPC server with one service, from binding its port to the end of the drain."""

    def __init__(self, make: ServiceDefinition | Factory[S], settings: S) -> None:
        self._make = make
        self.settings = settings
        self.telemetry = Telemetry()
        self._loop_watch = LoopWatch(self.telemetry)
        self.service: ServiceDefinition | None = None
        self._interceptor = ChassisInterceptor(settings, self.telemetry)
        self._server: grpc.aio.Server | None = None
        self._health = _Health()
        self._started = False

    @property
    def address(self) -> str:
        """The "host:port" that clients call, with the port that was bound."""
        return self.settings.address

    @property
    def metrics_port(self) -> int:
        """Port of `/metrics`."""
        return self.settings.metrics_port

    async def open(self) -> None:
        """Bind the ports, make the service, answer health checks with NOT_SERVING.

        Raises `TroupeError` when a port cannot be bound.
        """
        # The default executor also runs `asyncio.to_thread` calls of users' code.
        asyncio.get_running_loop().set_default_executor(DaemonThreads())
        server = grpc.aio.server(
            interceptors=[self._interceptor], options=server_options(self.settings)
        )
        port = bind(server, self.settings)
        try:
            metrics_port = self.telemetry.serve_metrics(self.settings)
            self.settings = self.settings.model_copy(
                update={"port": port, "metrics_port": metrics_port}
            )
            make = self._make
            if callable(make):
                service: ServiceDefinition = make(self.settings, self.telemetry)
            else:
                service = make
            self.telemetry.service = service.name
            service.add_to(server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
            for name in ("", service.name):
                await self._health.set(name, _NOT_SERVING)
            starting = asyncio.create_task(server.start())
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                await starting  # grpc cannot stop a server that has started halfway
                raise
        except BaseException:
            self.telemetry.close()
            await server.stop(0)
            raise
        self.service = service
        self._server = server

    async def become_ready(self) -> None:
        """Start the service, then answer calls and report SERVING."""
        assert self.service is not None, "open() comes first"
        self._started = True
        service = self.service
        self._interceptor.problem = self._health.problem = lambda: getattr(service, "problem", None)
        await self.service.start()
        self._interceptor.state = "serving"
        self._loop_watch.start()
        for name in ("", self.service.name):
            await self._health.set(name, _SERVING)
        settings = self.settings
        if settings.port_file is not None:
            settings.port_file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(settings.port_file, f"{settings.port} {settings.metrics_port}\n")
        log.info("serving", name=self.service.name, address=self.address)
        if strangers := settings.strangers:
            log.warning(f"{strangers} can use it; set TROUPE_TOKEN", host=settings.host)

    async def close(self) -> None:
        """Report NOT_SERVING, drain and stop. Idempotent."""
        server, self._server = self._server, None
        if server is None or self.service is None:
            return
        settings = self.settings
        self._loop_watch.stop()
        self._interceptor.state = "draining"
        await self._health.enter_graceful_shutdown()
        log.info("draining", name=self.service.name, seconds=settings.drain_seconds)
        if settings.port_file is not None:
            settings.port_file.unlink(missing_ok=True)
        if self._started and (leave := getattr(self.service, "leave", None)) is not None:
            await leave()
        # `stop` refuses new connections at once and ends when no call is in flight.
        stopping = asyncio.ensure_future(server.stop(settings.drain_seconds + 1))
        await asyncio.wait({stopping}, timeout=min(_stream_drain(settings), settings.drain_seconds))
        self._interceptor.cut_streams()
        await asyncio.wait(
            {stopping}, timeout=max(0.0, settings.drain_seconds - _stream_drain(settings))
        )
        self._interceptor.cut_unary()
        # gRPC waits for handlers; one that does not end when cancelled is abandoned.
        await asyncio.wait({stopping}, timeout=5)
        await self._interceptor.idempotency.close()
        if self._started:
            try:
                async with asyncio.timeout(settings.drain_seconds + 5):
                    await self.service.stop(settings.drain_seconds)
            except TimeoutError:
                log.error("did not stop in time", name=self.service.name)
        self.telemetry.close()
        log.info("stopped", name=self.service.name)


@contextlib.asynccontextmanager
async def serve(
    make: ServiceDefinition | Factory[S], settings: S
) -> AsyncIterator[RunningServer[S]]:
    """Serve in this event loop: `async with serve(service, settings) as server`.

    `make` is the service, or a factory that takes settings (with the bound ports) and telemetry.
    """
    server = RunningServer(make, settings)
    await server.open()
    try:
        await server.become_ready()
        yield server
    finally:
        await server.close()


def _stream_drain(settings: ServiceSettings) -> float:
    return min(settings.stream_drain_seconds, settings.drain_seconds)


# Open files of a process: programs that it starts may close descriptors up to this number.
_MOST_FILES: Final = 65_536
_FEW_FILES: Final = 4096

app_log = structlog.get_logger("troupe.process")

__all__ = ["RunningServer", "ServiceDefinition", "run", "serve"]

# Grace period before a forced exit: library threads that never end would keep the process alive.
_EXIT_SECONDS = 5.0
_INSIST_SECONDS = 1.0
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_ENDING = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP}
)


def run(make_service: Factory[S], settings: S | type[S]) -> int:
    """Serve until SIGTERM or SIGINT; return the status with which the caller must exit.

    If `settings` is a class, they are read from the environment. `make_service` runs after the
    thread budget is set, so that it can import numerical libraries.
    """
    status = _run(make_service, settings)
    sys.stderr.flush()
    _force_exit_later(status)
    return status


def _run(make_service: Factory[S], settings: S | type[S]) -> int:
    name = _program_name()
    values = read_settings(settings, name) if isinstance(settings, type) else settings
    if values is None:
        return 2
    refuse_own_end(values.parent_pid)
    refuse_breakpoints(DEBUG_REMEDY)
    _set_thread_budget(values.threads)
    _set_compile_cache()
    bypass_proxy(values.cluster_addresses)
    logs.configure(name, values.log_level, values.log_format)
    _raise_file_limit()
    tracing = configure_tracing(name)
    try:
        run_to_end(_live(make_service, values))
    except TroupeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except Exception:
        app_log.exception("the service failed")
        return 1
    finally:
        if tracing is not None:
            tracing.shutdown()
    return 0


def run_to_end(main: Coroutine[Any, Any, None]) -> None:
    """Run an event loop until `main` has ended, even if a job's code tries to end it earlier.

    A `SystemExit` or `KeyboardInterrupt` in any task or callback ends an event loop, and a callback
    may stop it. A service's own code does neither, so a job's code must have done it; this is
    logged and the loop continues. `_live` handles signals.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while not task.done():
            try:
                loop.run_until_complete(task)
            except BaseException as error:
                if task.done():
                    break
                app_log.error("a job's code tried to end the event loop", error=described(error))
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            raise as_exception(failure)


async def _live(make_service: Factory[S], settings: S) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    first_seen: dict[signal.Signals, float] = {}

    def on_signal(number: signal.Signals) -> None:
        # A repeated signal ends the process at once, unless a launcher repeated it immediately.
        if loop.time() - first_seen.setdefault(number, loop.time()) > _INSIST_SECONDS:
            os._exit(128 + number)
        app_log.info("signal", name=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if settings.parent_pid is not None:
        watch_parent(settings.parent_pid, lambda: _set_from_thread(loop, stop))

    start_watchdog(_program_name(), settings.stall_exit_seconds)
    server = RunningServer(make_service, settings)
    await server.open()
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(server.become_ready())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await stopping
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await server.close()


def _set_from_thread(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is stopping
        loop.call_soon_threadsafe(stop.set)


def refuse_own_end(supervisor: int | None = None) -> None:
    """Forbid code of this process to send terminating signals to it, to its parent or to its
    supervisor.

    Otherwise a job's code could end one worker after another, as if an operator had stopped them.
    """
    protected = {0, -1, os.getpid(), os.getppid(), os.getpgrp(), supervisor}

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.kill", "os.killpg"):
            return
        target, number = arguments
        if number in _ENDING and target in protected:
            raise PermissionError(f"code in a service's process called {event} on that process")

    sys.addaudithook(refuse)


def _set_thread_budget(threads: int) -> None:
    """Bound the threads of numerical libraries, which read these variables when imported."""
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _set_compile_cache() -> None:
    """Have torch, here and in launched servers, keep compiled code where no other user can plant
    any: by default it runs what it finds under a name of this user in /tmp."""
    with contextlib.suppress(OSError):  # no directory for temporary files: torch says so
        if _COMPILE_CACHE not in os.environ:
            os.environ[_COMPILE_CACHE] = str(private_cache(f"troupe-compiled-{os.getuid()}"))


def _raise_file_limit() -> None:
    """Raise the limit of open files to the hard limit: a conversation or a call takes one or two.

    Shells set 1,024 or fewer (`ulimit -Sn`), far below the hard limit (`ulimit -Hn`).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _FEW_FILES:
        app_log.warning(
            f"this process may have {most} open files; hundreds of concurrent conversations or "
            f"calls need more: ulimit -n {_MOST_FILES}"
        )


def _program_name() -> str:
    """Return "services.reward" for `python -m services.reward`, else the program's file name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__")
    return os.path.basename(sys.argv[0]) or "troupe"


def _force_exit_later(status: int) -> None:
    def force() -> None:
        time.sleep(_EXIT_SECONDS)
        os._exit(status)

    threading.Thread(target=force, name="exit-watchdog", daemon=True).start()
