"""Definitions shared by services that write to or train from the experience store.

`samples_digest` identifies a set of samples: the trainer commits a step with the digest of the
samples that it trained, and the store compares it with the digest of the samples that it handed
out.

`ExperienceWriter` batches writes: concurrent writes share calls.

A call has a fixed cost of several rows. While few calls are in flight, writes are sent at once;
writes that arrive while more are in flight share the next call. Each ending and each fill has its
own id, and is accepted, refused and repeated on its own.
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
# Calls in flight: while one is being answered, the next one is sent.
_CALLS: Final = 2
# Maximum bytes of one call, unless a single part is longer.
_CALL_BYTES: Final = 2 * 2**20

_Result: TypeAlias = store_pb.EndingWritten | store_pb.FillWritten


def samples_digest(sample_ids: Iterable[str]) -> int:
    """Return the sum modulo 2^64 of the ids' xxh3-64: independent of their order, different if an
    id is missing."""
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
        """Return the parts as a serialized WriteRequest."""
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
    """A client of AppendTrajectory and FillColumns for callers of one event loop."""

    def __init__(self, channel: grpc.aio.Channel, retry: RetryPolicy | None = None) -> None:
        """Write through `channel` to the store, made by `troupe.rpc.connect`. `retry` applies to
        parts that the store refuses for now; the default is the policy of every call."""
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
        # Calls carry parts of many trajectories, so their log lines name none.
        self._context = contextvars.copy_context()

    async def append(
        self, request: store_pb.AppendTrajectoryRequest, timeout: float
    ) -> store_pb.AppendTrajectoryResponse:
        """End a trajectory; the answer comes within `timeout` seconds.

        Raises the `TroupeError` of AppendTrajectory.
        """
        result: store_pb.EndingWritten = await self._write(self._endings, request, timeout)
        return result.response

    async def fill(
        self, request: store_pb.FillColumnsRequest, timeout: float
    ) -> store_pb.FillColumnsResponse:
        """Fill columns of samples; the answer comes within `timeout` seconds.

        Raises the `TroupeError` of FillColumns.
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
                raise DeadlineExceeded(f"the store accepted no row within {timeout:g} s") from None
            if not isinstance(result, TroupeError) and result.WhichOneof("result") == "error":
                raise from_status(result.error)
            return result

        result = await self._retry.run(attempt, timeout)
        if isinstance(result, TroupeError):
            # The whole call failed, after any retries that could help.
            raise result
        return result

    def _send_waiting(self) -> None:
        """Begin calls while fewer than `_CALLS` are in flight."""
        self._woken = False
        while (self._fills or self._endings) and len(self._flying) < _CALLS:
            body = _Body()
            # Fills first: rows that wait for a column should not also wait for other rows.
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
    """Move as many parts as one call of `size` bytes can still carry, at least one; return the
    call's new size.
    """
    while waiting and not (into and size + len(waiting[0].message) > _CALL_BYTES):
        part = waiting.popleft()
        # Skip parts whose caller has left.
        if not part.done.done():
            into.append(part)
            size += len(part.message)
    return size
