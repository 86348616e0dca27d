"""One worker process and its replacements: runs one call at a time, whatever the call does."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Final

import structlog
from pebble import ProcessExpired, ProcessPool

from services.reward import worker
from services.reward.cpu import CoreManager, Lease
from services.reward.registry import Function
from troupe.v1 import reward_pb2 as pb

log = structlog.get_logger("troupe.reward")

# The pool itself notices timeouts and deaths within 0.2 s. When it has not said anything this
# long after the timeout, it is the pool that hangs (its worker was killed inside its lock).
_WATCHDOG_SECONDS: Final = 10.0

_KINDS: Final = {
    worker.RAISED: pb.InvocationError.KIND_RAISED,
    worker.OUT_OF_MEMORY: pb.InvocationError.KIND_OUT_OF_MEMORY,
    worker.BAD_RESULT: pb.InvocationError.KIND_BAD_RESULT,
    worker.NOT_IMPORTABLE: pb.InvocationError.KIND_NOT_IMPORTABLE,
}


@dataclass(frozen=True)
class Outcome:
    """What became of one invocation: `result_json` after `seconds` of running, or `error`."""

    result_json: str = ""
    seconds: float = 0.0
    error: pb.InvocationError | None = None


class BadArguments(ValueError):
    """`arguments_json` is not a JSON object; the caller's fault, so no outcome."""


class _Lost(Exception):
    """The worker is gone; `kind` says why, the text says it to people."""

    def __init__(self, kind: pb.InvocationError.Kind.ValueType, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Slot:
    """A pool of exactly one process, so that a killed worker can harm no other one's call."""

    def __init__(
        self, import_seconds: float, name: str = "worker", cores: CoreManager | None = None
    ) -> None:
        """`name` is unique among slots; `cores` hands cores out, if anybody does."""
        self.restarts = 0
        self.name = name
        self._import_seconds = import_seconds
        self._cores = cores
        # Whether `cores` knows the process that runs now.
        self._adopted = False
        self._pool: Any = None
        # Function -> its registrations when this worker last looked at its code.
        self._prepared: dict[str, int] = {}
        self._current: Any = None
        self._cancelled = False

    async def start(self) -> None:
        """Start the worker and wait until it answers."""
        self._open()
        await self._call(worker.ready, (), self._import_seconds)

    async def stop(self) -> None:
        """Kill the worker."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(_end, pool)
        if self._cores is not None:
            self._cores.forget(self.name)

    def holds(self, function: Function) -> bool:
        """Whether the worker has imported `function` since its last registration."""
        return self._prepared.get(function.key) == function.registrations

    def cancel(self) -> None:
        """End the call that runs now; its outcome is KIND_CANCELLED."""
        if self._current is not None:
            self._cancelled = True
            self._current.cancel()

    async def run(
        self, function: Function, arguments_json: str, lease: Lease | None = None
    ) -> Outcome:
        """Run one call to its end, on the cores of `lease`.

        Raises `BadArguments`; every other end is an outcome.
        """
        self._cancelled = False
        entrypoint = function.spec.entrypoint
        try:
            if self._cores is not None and lease is not None:
                await self._move_to(lease, self._cores)
            if not self.holds(function):
                failed = await self._prepare(function)
                if failed is not None:
                    return failed
            began = time.perf_counter()
            answer = await self._call(
                worker.invoke,
                (entrypoint, arguments_json, function.spec.memory_mib),
                function.spec.timeout_seconds,
            )
        except _Lost as lost:
            return Outcome(error=pb.InvocationError(kind=lost.kind, message=str(lost)))
        if answer.kind == worker.BAD_ARGUMENTS:
            raise BadArguments(answer.text)
        if answer.kind == worker.OUT_OF_MEMORY:
            await self._replace()  # whatever was half allocated goes with it
        return _outcome(answer, time.perf_counter() - began)

    async def _move_to(self, lease: Lease, cores: CoreManager) -> None:
        if not self._adopted:
            answer = await self._call(worker.ready, (), self._import_seconds)
            cores.adopt(self.name, int(answer.text))
            self._adopted = True
        cores.grant(lease)

    async def _prepare(self, function: Function) -> Outcome | None:
        entrypoint, registrations = function.spec.entrypoint, function.registrations
        try:
            answer = await self._call(worker.prepare, (entrypoint,), self._import_seconds)
            if answer.kind == worker.STALE:
                log.info("modules were edited: new worker", entrypoint=entrypoint)
                await self._replace()
                answer = await self._call(worker.prepare, (entrypoint,), self._import_seconds)
        except _Lost as lost:
            if lost.kind == pb.InvocationError.KIND_CANCELLED:
                raise
            message = f"importing {entrypoint}: {lost}"
            error = pb.InvocationError(kind=pb.InvocationError.KIND_NOT_IMPORTABLE, message=message)
            return Outcome(error=error)
        if answer.kind == worker.OK:
            self._prepared[function.key] = registrations
            return None
        return _outcome(answer)

    async def _call(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout: float
    ) -> worker.Answer:
        """The worker's answer; raises `_Lost` when there is none."""
        kind = pb.InvocationError
        timer = asyncio.timeout(timeout + _WATCHDOG_SECONDS)
        try:
            self._current = self._pool.schedule(function, args=arguments, timeout=timeout)
            async with timer:
                fields = await asyncio.wrap_future(self._current)
            return worker.Answer(*fields)
        except TimeoutError:
            if timer.expired():
                await self._replace()
                raise _Lost(kind.KIND_WORKER_DIED, "the worker stopped answering") from None
            self._forget()
            raise _Lost(kind.KIND_TIMEOUT, f"did not end within {timeout:g} s") from None
        except ProcessExpired as died:
            self._forget()
            raise _Lost(kind.KIND_WORKER_DIED, _how_it_died(died.exitcode)) from None
        except asyncio.CancelledError:
            if not self._cancelled:
                raise
            await self._replace()
            raise _Lost(kind.KIND_CANCELLED, "cancelled while it ran") from None
        except (BrokenProcessPool, RuntimeError) as broken:
            await self._replace()
            raise _Lost(kind.KIND_WORKER_DIED, f"the worker pool broke: {broken}") from None
        finally:
            self._current = None

    def _open(self) -> None:
        # Spawned, not forked: a worker owes nothing to the service's threads and imports, and
        # its parent is the service itself, with which the kernel lets it die.
        self._pool = ProcessPool(
            max_workers=1,
            initializer=worker.initialize,
            initargs=(os.getpid(),),
            context=multiprocessing.get_context("spawn"),
        )

    def _forget(self) -> None:
        """The pool has replaced its worker by itself."""
        self.restarts += 1
        self._prepared.clear()
        self._adopted = False

    async def _replace(self) -> None:
        """A new pool with a new worker; the old ones end in the background."""
        self._forget()
        old = self._pool
        self._open()
        asyncio.get_running_loop().run_in_executor(None, _end, old)


def _outcome(answer: worker.Answer, seconds: float = 0.0) -> Outcome:
    if answer.kind == worker.OK:
        return Outcome(answer.text, seconds)
    return Outcome(
        error=pb.InvocationError(
            kind=_KINDS[answer.kind], message=answer.text, traceback=answer.traceback
        )
    )


def _how_it_died(exitcode: int) -> str:
    if exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"the worker process was killed by {signal.Signals(-exitcode).name}"
    return f"the worker process exited with status {exitcode}"


def _end(pool: Any) -> None:
    pool.stop()
    with contextlib.suppress(TimeoutError):
        pool.join(timeout=5)
