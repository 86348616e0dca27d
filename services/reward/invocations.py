"""Calls by invocation id: each runs once, however often it is asked, alone or in batches.

Its outcome is remembered for a caller that lost its connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

from services.chassis.idempotency import IdempotencyCache
from services.reward.call import Call
from services.reward.function import Function
from services.reward.registry import Registry
from services.reward.runtime import Runtime
from services.reward.sandboxes.guests import Guests
from services.reward.settings import RewardSettings
from troupe.rpc import InvalidArgument
from troupe.v1 import reward_pb2 as pb

# Outcomes remembered at once; rewards are small, so the bytes are not what bounds them.
_RESULTS: Final = 100_000


class Invocations:
    """What was invoked, and what became of it."""

    def __init__(
        self, registry: Registry, runtime: Runtime, guests: Guests, settings: RewardSettings
    ) -> None:
        self._registry = registry
        self._runtime = runtime
        self._guests = guests
        self._most = settings.reward_max_queued
        self._once = IdempotencyCache(
            settings.reward_result_seconds,
            _RESULTS,
            settings.reward_result_mib << 20,
            field="invocation_id",
        )

    async def invoke(self, request: pb.InvokeRequest, seconds: float | None) -> pb.InvokeResponse:
        """The outcome of one call; its caller waits for `seconds`, if it has a deadline.

        Raises `NotFound` for the function, `InvalidArgument`, `ResourceExhausted`.
        """
        function = self._registry.find(request.name, request.version)
        _check_ids([request.invocation_id])
        weight = _weight(request.weight)
        call = Call(
            request.arguments_json,
            request.job_id,
            request.trajectory_id,
            request.query_id,
            sandboxes=request.sandboxes,
            waiters=request.waiters,
            seconds=seconds,
            expected_seconds=_expected(request.expected_seconds),
        )
        response = await self._run_once(
            function,
            request,
            lambda: self._begin(function, request.invocation_id, call, request.priority, weight),
        )
        if response.error.kind == pb.InvocationError.KIND_BAD_ARGUMENTS:
            raise InvalidArgument(response.error.message, field="arguments_json")
        return response

    async def batch(
        self, request: pb.InvokeBatchRequest, seconds: float | None
    ) -> list[pb.InvokeResponse]:
        """The outcomes of many calls of a function, in their order; all are queued, or none.

        Raises as `invoke` does.
        """
        function = self._registry.find(request.name, request.version)
        _check_ids(call.invocation_id for call in request.calls)
        weight = _weight(request.weight)
        most = min(self._most, function.spec.max_queued or self._most)
        if len(request.calls) > most:
            raise InvalidArgument(
                f"more calls than may ever wait ({most:,})",
                field="calls",
                value=len(request.calls),
                remedy="Send them in several batches.",
            )
        calls = {
            call.invocation_id: Call(
                call.arguments_json,
                request.job_id,
                call.trajectory_id,
                call.query_id,
                waiters=call.waiters,
                seconds=seconds,
                expected_seconds=_expected(call.expected_seconds),
            )
            for call in request.calls
        }
        begun: dict[str, Awaitable[pb.InvokeResponse]] = {}
        if not function.own_place:
            fresh = [(name, call) for name, call in calls.items() if name not in self._once]
            outcomes = self._runtime.submit(fresh, function, request.priority, weight)
            begun = {name: outcome for (name, _), outcome in zip(fresh, outcomes, strict=True)}

        def begin(name: str) -> Awaitable[pb.InvokeResponse]:
            return begun.get(name) or self._begin(
                function, name, calls[name], request.priority, weight
            )

        return await asyncio.gather(
            *(
                self._run_once(function, call, partial(begin, call.invocation_id))
                for call in request.calls
            )
        )

    def cancel(self, invocation_id: str) -> bool:
        """End one that waits or runs; False when it has ended or is unknown."""
        return self._guests.cancel(invocation_id) or self._runtime.cancel(invocation_id)

    async def close(self) -> None:
        """Nobody waits for anything any more."""
        await self._once.close()

    def _begin(
        self, function: Function, invocation_id: str, call: Call, priority: int, weight: float
    ) -> Awaitable[pb.InvokeResponse]:
        run = self._guests.invoke if function.own_place else self._runtime.invoke
        return run(invocation_id, function, call, priority=priority, weight=weight)

    def _run_once(
        self,
        function: Function,
        call: pb.InvokeRequest | pb.BatchCall,
        begin: Callable[[], Awaitable[pb.InvokeResponse]],
    ) -> Awaitable[pb.InvokeResponse]:
        # What makes it the same call: when, how urgent and in which message may differ.
        same = "\0".join((function.key, call.arguments_json, call.trajectory_id))
        return self._once.run(
            call.invocation_id,
            same.encode(),
            begin,
            abandoned=lambda: self._abandon(call.invocation_id),
        )

    def _abandon(self, invocation_id: str) -> None:
        if not self._guests.cancel(invocation_id):
            self._runtime.abandon(invocation_id)


def _check_ids(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for invocation_id in ids:
        if not invocation_id or invocation_id in seen:
            raise InvalidArgument(
                "is there twice" if invocation_id else "is empty",
                field="invocation_id",
                value=invocation_id,
                remedy="Make an id for each invocation, so that a repeated call runs once.",
            )
        seen.add(invocation_id)


def _weight(weight: float) -> float:
    if not 0 <= weight < float("inf"):
        raise InvalidArgument(
            "is not a positive number",
            field="weight",
            value=weight,
            remedy="Say how large the job's share is beside others; 0 is one.",
        )
    return weight or 1.0


def _expected(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(
            "is not a number of seconds",
            field="expected_seconds",
            value=seconds,
            remedy="Say how long the call takes with the fewest cores; 0 where nobody knows.",
        )
    return seconds
