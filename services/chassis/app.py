"""The life of a server process, from its settings to its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from services.chassis import logs
from services.chassis.parent import watch_parent
from services.chassis.server import Factory, RunningServer, Service, serve
from services.chassis.settings import ServiceSettings, read_settings
from services.chassis.telemetry import configure_tracing
from troupe.outcomes import described
from troupe.rpc import TroupeError
from troupe.rpc.addresses import go_straight
from troupe.user_code import as_exception

log = structlog.get_logger("troupe.process")

__all__ = ["RunningServer", "Service", "run", "serve"]

S = TypeVar("S", bound=ServiceSettings)
# Threads of libraries that do not end by themselves must not keep a stopped process alive.
_EXIT_SECONDS = 5.0
_INSIST_SECONDS = 1.0
_ENDING = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP}
)


def run(make_service: Factory[S], settings: S | type[S]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status, with which the caller must exit.

    Settings are read from the environment when a class is given. `make_service` runs after the
    thread budget is set, so it is the place to import numerical libraries.
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
    refuse_own_end()
    _set_thread_budget(values.threads)
    go_straight(values.cluster_addresses)
    logs.configure(name, values.log_level, values.log_format)
    tracing = configure_tracing(name)
    try:
        run_to_end(_live(make_service, values))
    except TroupeError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except Exception:
        log.exception("the service failed")
        return 1
    finally:
        if tracing is not None:
            tracing.shutdown()
    return 0


def run_to_end(main: Coroutine[Any, Any, None]) -> None:
    """Run an event loop until `main` has ended, and nothing else ends it.

    `SystemExit` and `KeyboardInterrupt` that any task or callback raises leave the loop, and a
    callback may stop it; a service's code does neither, so it was a job's, and the service goes on.
    Signals do not come this way (`_live`).
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
                log.error("something tried to end the event loop", error=described(error))
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            raise as_exception(failure)


async def _live(make_service: Factory[S], settings: S) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    asked: dict[signal.Signals, float] = {}

    def on_signal(number: signal.Signals) -> None:
        # The same one again, by a person and not by a launcher that repeats it: at once.
        if loop.time() - asked.setdefault(number, loop.time()) > _INSIST_SECONDS:
            os._exit(128 + number)
        log.info("signal", name=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    if settings.parent_pid is not None:
        watch_parent(settings.parent_pid, lambda: _set_from_thread(loop, stop))

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
    with contextlib.suppress(RuntimeError):  # the loop is closed: we are stopping already
        loop.call_soon_threadsafe(stop.set)


def refuse_own_end() -> None:
    """From now on code of this process cannot send a signal that ends it, or what supervises it: a
    job's code would end one worker after another, each as if a person had stopped it."""
    protected = {0, -1, os.getpid(), os.getppid(), os.getpgrp()}

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.kill", "os.killpg"):
            return
        target, number = arguments
        if number in _ENDING and target in protected:
            raise PermissionError(f"{event} of a service's own process, by code that runs in it")

    sys.addaudithook(refuse)


def _set_thread_budget(threads: int) -> None:
    """Before numerical libraries are imported: they read it once."""
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _program_name() -> str:
    """ "services.reward" of `python -m services.reward`, else the program's file name."""
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
