"""Definitions shared by services that write to or train from the experience store.

`samples_digest` names a set of samples: the trainer commits a step with that of the samples that it
trained, and the store compares it with that of the samples that it handed out.

`ExperienceWriter` batches writes: concurrent writes share calls.

A call costs as much as several rows, whatever it carries. Writes are sent at once while few calls
are in flight; those that arrive while more are in flight go with the next call. Each ending and
each fill has an id of its own, and is accepted, refused and repeated by itself.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc
import xxhash
from google.protobuf.message import Message

from troupe.rpc import (
    ClientSettings,
    DeadlineExceeded,
    RetryPolicy,
    TroupeError,
    from_status,
    new_id,
)
from troupe.rpc.protobuf_wire import repeated
from troupe.v1 import experience_store_pb2 as store_pb

_METHOD: Final = "/troupe.v1.ExperienceStore/Write"
# Calls in flight: one is being answered while the next one is sent.
_CALLS: Final = 2
# Bytes of one call at most, unless a single part is longer.
_CALL_BYTES: Final = 2 * 2**20

_Result: TypeAlias = store_pb.EndingWritten | store_pb.FillWritten


def samples_digest(sample_ids: Iterable[str]) -> int:
    """Sum modulo 2^64 of the xxh3-64 of ids: the same in any order, another if one is missing."""
    return sum(xxhash.xxh3_64_intdigest(one.encode()) for one in sample_ids) % (1 << 64)


@dataclass
class _Part:
    """One ending or fill that is waiting or in flight."""

    message: bytes
    deadline: float
    done: asyncio.Future[_Result | TroupeError]


@dataclass
class _Body:
    """The parts of one call."""

    endings: list[_Part] = field(default_factory=list)
    fills: list[_Part] = field(default_factory=list)
    request_id: str = field(default_factory=lambda: new_id("write"))

    @property
    def parts(self) -> list[_Part]:
        return [*self.endings, *self.fills]

    def serialized(self) -> bytes:
        """The parts as a serialized WriteRequest."""
        return b"".join(
            (
                store_pb.WriteRequest(request_id=self.request_id).SerializeToString(),
                *repeated(
                    store_pb.WriteRequest.ENDINGS_FIELD_NUMBER,
                    (part.message for part in self.endings),
                ),
                *repeated(
                    store_pb.WriteRequest.FILLS_FIELD_NUMBER, (part.message for part in self.fills)
                ),
            )
        )


class ExperienceWriter:
    """AppendTrajectory and FillColumns for callers of one event loop."""

    def __init__(self, channel: grpc.aio.Channel, retry: RetryPolicy | None = None) -> None:
        """`channel`: to the store, made by `troupe.rpc.connect`. `retry`: of parts that the store
        refuses for now; by default that of every call.
        """
        self._call: Any = channel.unary_unary(
            _METHOD,
            request_serializer=_Body.serialized,
            response_deserializer=store_pb.WriteResponse.FromString,
        )
        self._retry = retry or ClientSettings.of_environment().retry
        self._endings: deque[_Part] = deque()
        self._fills: deque[_Part] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._woken = False
        # Calls carry parts of many trajectories: their log lines name none.
        self._context = contextvars.copy_context()

    async def append(
        self, request: store_pb.AppendTrajectoryRequest, timeout: float
    ) -> store_pb.AppendTrajectoryResponse:
        """End a trajectory; the answer comes within `timeout` seconds.

        Raises `TroupeError`: what AppendTrajectory raises.
        """
        result: store_pb.EndingWritten = await self._write(self._endings, request, timeout)
        return result.response

    async def fill(
        self, request: store_pb.FillColumnsRequest, timeout: float
    ) -> store_pb.FillColumnsResponse:
        """Fill columns of samples; the answer comes within `timeout` seconds.

        Raises `TroupeError`: what FillColumns raises.
        """
        result: store_pb.FillWritten = await self._write(self._fills, request, timeout)
        return result.response

    async def _write(self, waiting: deque[_Part], request: Message, timeout: float) -> Any:
        message = request.SerializeToString()

        async def attempt(left: float | None) -> _Result | TroupeError:
            seconds = timeout if left is None else left
            loop = asyncio.get_running_loop()
            part = _Part(message, time.monotonic() + seconds, loop.create_future())
            waiting.append(part)
            if not self._woken:
                self._woken = True
                loop.call_soon(self._send_waiting)
            try:
                async with asyncio.timeout(seconds):
                    result = await part.done
            except TimeoutError:
                raise DeadlineExceeded(f"the store took no row within {timeout:g} s") from None
            if not isinstance(result, TroupeError) and result.WhichOneof("result") == "error":
                raise from_status(result.error)
            return result

        result = await self._retry.run(attempt, timeout)
        if isinstance(result, TroupeError):
            # The whole call failed, and has been repeated where that could help.
            raise result
        return result

    def _send_waiting(self) -> None:
        """Begin calls while fewer than `_CALLS` are in flight."""
        self._woken = False
        while (self._fills or self._endings) and len(self._flying) < _CALLS:
            body = _Body()
            # Fills first: rows that wait for a column should not wait for other rows, too.
            size = _take(self._fills, body.fills, 0)
            size = _take(self._endings, body.endings, size)
            if size:
                task = asyncio.create_task(self._send(body), context=self._context)
                self._flying.add(task)
                task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        self._send_waiting()

    async def _send(self, body: _Body) -> None:
        parts = body.parts
        left = max(part.deadline for part in parts) - time.monotonic()
        results: list[_Result | TroupeError]
        try:
            response = await self._call(body, timeout=max(left, 0.001))
            results = [*response.endings, *response.fills]
        except TroupeError as error:
            results = [copy.copy(error) for _ in parts]
        except asyncio.CancelledError:
            for part in parts:
                part.done.cancel()
            raise
        for part, result in zip(parts, results, strict=True):
            if not part.done.done():
                part.done.set_result(result)


def _take(waiting: deque[_Part], into: list[_Part], size: int) -> int:
    """Move as many parts as one call of `size` bytes can still carry, at least one; returns the
    call's bytes then.
    """
    while waiting and not (into and size + len(waiting[0].message) > _CALL_BYTES):
        part = waiting.popleft()
        # Parts whose caller has left are skipped.
        if not part.done.done():
            into.append(part)
            size += len(part.message)
    return size
