"""Short reward calls that come together go to the reward service in one message.

The trajectories of a step tend to end together, and a message of its own costs more than a short
reward itself. A call waits for others a moment only, and where calls take long each goes alone, so
that none waits for a slower one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from troupe.rpc.errors import InvalidArgument
from troupe.v1 import reward_pb2 as pb

if TYPE_CHECKING:
    from troupe.v1.reward_pb2_grpc import RewardAsyncStub

# How long a call waits for others. A message on its way costs about half a millisecond of both
# sides' time, so this much more is not noticed.
_WAIT_SECONDS: Final = 0.002
_MOST: Final = 256
_MOST_BYTES: Final = 4 * 2**20
# Calls of functions that take longer than this go alone.
_SHORT_SECONDS: Final = 0.05
# What one more run says of how long they take.
_SHARE: Final = 0.1

_Key = tuple[str, str, str, int, float]


@dataclass(eq=False)
class _Batch:
    """Calls of one function that wait to be sent."""

    timer: asyncio.TimerHandle
    calls: list[tuple[pb.InvokeRequest, float, asyncio.Future[pb.InvokeResponse]]] = field(
        default_factory=list
    )
    size: int = 0


class Coalescer:
    """`Invoke` as callers know it, through `InvokeBatch` where that pays."""

    def __init__(self, stub: RewardAsyncStub) -> None:
        self._stub = stub
        self._batches: dict[_Key, _Batch] = {}
        # How long calls of a function take, by its key.
        self._seconds: dict[_Key, float] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def invoke(self, request: pb.InvokeRequest, timeout: float) -> pb.InvokeResponse:
        """The response within `timeout` seconds. Raises `TroupeError`, as `Invoke` does."""
        key = (request.name, request.version, request.job_id, request.priority, request.weight)
        if self._seconds.get(key, _SHORT_SECONDS) >= _SHORT_SECONDS:
            response = await self._stub.Invoke(request, timeout=timeout)
            self._learn(key, response)
            return response
        answer: asyncio.Future[pb.InvokeResponse] = asyncio.get_running_loop().create_future()
        batch = self._batches.get(key)
        if batch is None:
            timer = asyncio.get_running_loop().call_later(_WAIT_SECONDS, self._send, key)
            batch = self._batches[key] = _Batch(timer)
        batch.calls.append((request, timeout, answer))
        batch.size += len(request.arguments_json)
        if len(batch.calls) >= _MOST or batch.size >= _MOST_BYTES:
            self._send(key)
        response = await answer
        if response.error.kind == pb.InvocationError.KIND_BAD_ARGUMENTS:
            raise InvalidArgument(response.error.message, field="arguments_json")
        return response

    def _send(self, key: _Key) -> None:
        batch = self._batches.pop(key)
        batch.timer.cancel()
        task = asyncio.create_task(self._answer(key, batch))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _answer(self, key: _Key, batch: _Batch) -> None:
        # Those who have left meanwhile want nothing any more.
        calls = [call for call in batch.calls if not call[2].done()]
        if not calls:
            return
        name, version, job_id, priority, weight = key
        request = pb.InvokeBatchRequest(
            name=name,
            version=version,
            job_id=job_id,
            priority=priority,
            weight=weight,
            calls=[
                pb.BatchCall(
                    invocation_id=one.invocation_id,
                    arguments_json=one.arguments_json,
                    trajectory_id=one.trajectory_id,
                    waiters=one.waiters,
                    expected_seconds=one.expected_seconds,
                    query_id=one.query_id,
                )
                for one, _, _ in calls
            ],
        )
        try:
            timeout = max(timeout for _, timeout, _ in calls)
            reply = await self._stub.InvokeBatch(request, timeout=timeout)
        except InvalidArgument:
            # One of them, or their number: each hears of its own fault.
            await asyncio.gather(*(self._answer_alone(*call) for call in calls))
            return
        except Exception as error:
            for _, _, answer in calls:
                if not answer.done():
                    answer.set_exception(error)
            return
        crowded_out = []
        for call, response in zip(calls, reply.responses, strict=True):
            if response.error.kind == pb.InvocationError.KIND_RESULT_TOO_LARGE:
                crowded_out.append(call)
                continue
            self._learn(key, response)
            if not call[2].done():
                call[2].set_result(response)
        # The service keeps what its answer had no room for; one after another, for they are large.
        for call in crowded_out:
            await self._answer_alone(*call)

    async def _answer_alone(
        self,
        request: pb.InvokeRequest,
        timeout: float,
        answer: asyncio.Future[pb.InvokeResponse],
    ) -> None:
        try:
            response = await self._stub.Invoke(request, timeout=timeout)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(response)

    def _learn(self, key: _Key, response: pb.InvokeResponse) -> None:
        seconds = response.run_seconds - response.cold_start_seconds
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _SHARE * (seconds - known)
