"""The supervisor's run: in the foreground until a signal, or detached (`troupe up -d`)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from troupe.cluster import logs
from troupe.cluster.child import reading_seconds
from troupe.cluster.embedded import EmbeddedCluster
from troupe.cluster.errors import (
    ChildNotReady,
    ClusterNotStarted,
    ClusterRunning,
    NotWritable,
)
from troupe.cluster.settings import ClusterSettings
from troupe.cluster.state import (
    ClusterState,
    close_to_others,
    end_orphans,
    is_alive,
    is_locked,
    read_state,
    require_running,
    running_state,
)

# The longest time that a supervisor needs to end after its services have ended.
_SUPERVISOR_SECONDS: Final = 10.0


async def run_until_signal(
    cluster: EmbeddedCluster, ready: Callable[[ClusterState], None] = lambda state: None
) -> None:
    """Start `cluster` and run it until SIGINT or SIGTERM; stop it then, in order.

    `ready` is called once all services are healthy. Raises the error that prevented the start, or
    the error of a service that is given up.
    """
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    stopping = asyncio.create_task(signalled.wait())
    starting = asyncio.create_task(cluster.start())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            return
        ready(starting.result())
        failing = asyncio.create_task(cluster.failure())
        await asyncio.wait({failing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            raise failing.result()
        failing.cancel()
    finally:
        stopping.cancel()
        await cluster.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def start_detached(settings: ClusterSettings) -> ClusterState:
    """Start a cluster in a process of its own and wait until it is healthy.

    Raises `ClusterRunning`, `NotWritable`, `NotPrivate`, or `ClusterNotStarted` with the last lines
    of the supervisor's log.
    """
    settings = settings.resolved()
    if (state := running_state(settings.data_dir)) is not None:
        raise ClusterRunning(settings.data_dir, state.supervisor_pid)
    log = settings.data_dir / "logs" / logs.SUPERVISOR_LOG
    try:
        close_to_others(settings.data_dir)
        file = logs.open_log(log, "supervisor start")
    except OSError as error:
        raise NotWritable(settings.data_dir, error) from error
    with file:
        process = subprocess.Popen(
            [sys.executable, "-m", "troupe.cluster"],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.stdin is not None  # PIPE
    with process.stdin, suppress(BrokenPipeError):  # it has already ended; its log says why
        process.stdin.write(settings.model_dump_json().encode())
    # Services start in three stages of at most `start_seconds` each, once Redis has read its files.
    limit = 3 * settings.start_seconds + reading_seconds(settings.data_dir / "redis")
    deadline = time.monotonic() + limit + settings.stop_seconds
    while process.poll() is None and time.monotonic() < deadline:
        state = read_state(settings.data_dir)
        if state is not None and state.supervisor_pid == process.pid and state.phase == "ready":
            return state
        time.sleep(0.1)
    if process.poll() is None:
        process.terminate()
        raise ChildNotReady(
            "supervisor", str(settings.data_dir), settings.start_seconds, "too slow", log
        )
    raise ClusterNotStarted(logs.last_line(log, 1500), log)


def stop_running(data_dir: Path) -> ClusterState:
    """Stop the cluster of `data_dir`, wait until its supervisor is gone, and return its state.

    Raises `NoCluster`. A supervisor that exceeds the time limit of its services is killed, and its
    children are ended as after any crash.
    """
    state = require_running(data_dir)
    with suppress(ProcessLookupError):
        os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + state.stop_seconds + _SUPERVISOR_SECONDS
    while is_locked(data_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    if is_alive(state.supervisor_pid, state.supervisor_created) and is_locked(data_dir):
        with suppress(ProcessLookupError):
            os.kill(state.supervisor_pid, signal.SIGKILL)
        asyncio.run(end_orphans(read_state(data_dir), timeout=5.0))
    return state
