"""`ForkServer`: the owner's side of a fork server, and the processes that it forks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

from troupe.processes.ending import stop_process_async
from troupe.processes.fork_server import MOST_BYTES, SEPARATOR, ForkRequest
from troupe.processes.tether import tethered

_STOP_SECONDS: Final = 5.0
# What asyncio reports, too, when it cannot know an exit status.
_UNKNOWN_STATUS: Final = 255


def can_fork() -> bool:
    """Return whether this system has what a fork server needs: Linux with pidfds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return sys.platform == "linux"


class ForkedProcess:
    """A forked process, with the interface of `asyncio.subprocess.Process` for its end."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """`descriptor` is a pidfd, which this object closes."""
        self.pid = pid
        self._descriptor = descriptor
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Wait for the end; return the exit status."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.done():
            # Not by its number, which might be another process's by now.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def end(self, status: int) -> None:
        """Record its exit status."""
        if not self._ended.done():
            self._ended.set_result(status)
            os.close(self._descriptor)

    def watch(self) -> None:
        """Record its end without a fork server to report the status."""
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(self._descriptor)
            self.end(_UNKNOWN_STATUS)

        if not self._ended.done():
            loop.add_reader(self._descriptor, ended)


class ForkServer:
    """A fork server, or several with modules in common. Use it from one event loop."""

    def __init__(
        self,
        groups: Mapping[str, Sequence[str]],
        environment: Mapping[str, str],
        common: Sequence[str] = (),
        rest_seconds: Mapping[str, float] | None = None,
    ) -> None:
        """`groups` has each server's modules, which it imports in this order after the `common`
        ones, with `environment` as the whole environment. `rest_seconds`: for how long a server
        keeps its imports after a fork; servers of other groups keep them for good."""
        self._groups = {name: list(modules) for name, modules in groups.items()}
        self._common = list(common)
        self._rest_seconds = dict(rest_seconds or {})
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._controls: dict[str, socket.socket] = {}
        self._requests = 0
        self._forking: dict[str, dict[int, asyncio.Future[ForkedProcess]]] = {}
        self._children: dict[str, dict[int, ForkedProcess]] = {}

    async def start(self, log: BinaryIO) -> None:
        """Start the servers, with their output in `log`. Raises OSError."""
        command = [sys.executable, "-m", "troupe.processes.fork_server", *self._common]
        with ExitStack() as theirs:
            descriptors = []
            for name, modules in self._groups.items():
                own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                own.setblocking(False)
                theirs.enter_context(its)
                descriptors.append(its.fileno())
                rest = f",{self._rest_seconds[name]}" if name in self._rest_seconds else ""
                command += [SEPARATOR, f"{its.fileno()}{rest}", *modules]
                self._controls[name], self._forking[name], self._children[name] = own, {}, {}
                asyncio.get_running_loop().add_reader(own, self._receive, name)
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *tethered(command),
                    env=self._environment,
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    umask=0o077,
                )
            except BaseException:
                await self.stop()
                raise

    async def fork(
        self,
        group: str,
        module: str,
        environment: Mapping[str, str],
        log: Path,
        needs: Sequence[str] = (),
    ) -> ForkedProcess:
        """Fork a process from the server of `group` that runs `module` as `python -m` does, in a
        session of its own, once the modules `needs` are imported.

        `environment` is the whole one; output is appended to `log`. Raises `OSError` when the
        server has ended.
        """
        control = self._controls.get(group)
        if control is None:
            raise ConnectionError("the fork server has ended")
        self._requests += 1
        request = ForkRequest(self._requests, module, dict(environment), str(log), tuple(needs))
        forking: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._forking[group][request.id] = forking
        try:
            message = json.dumps(asdict(request)).encode()
            await asyncio.get_running_loop().sock_sendall(control, message)
            return await forking
        finally:
            del self._forking[group][request.id]

    async def stop(self) -> None:
        """End the servers; their children that still run get SIGTERM."""
        for group in self._groups:
            self._lose(group)
        if self._process is not None and self._process.returncode is None:
            await stop_process_async(self._process, _STOP_SECONDS)

    def _receive(self, group: str) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._controls[group], MOST_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if not message:
            self._lose(group)
            return
        values: dict[str, int] = json.loads(message)
        if (ended := values.get("ended")) is not None:
            self._children[group].pop(ended).end(values["status"])
            return
        child = ForkedProcess(values["pid"], descriptors[0])
        self._children[group][child.pid] = child
        forking = self._forking[group].get(values["forked"])
        if forking is None or forking.done():  # nobody waits any more
            child.kill()
        else:
            forking.set_result(child)

    def _lose(self, group: str) -> None:
        """Close the connection. Children of a server that was killed run on."""
        control = self._controls.pop(group, None)
        if control is None:
            return
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        for forking in self._forking[group].values():
            if not forking.done():
                forking.set_exception(ConnectionError("the fork server has ended"))
        for child in self._children[group].values():
            child.watch()
        self._children[group].clear()
