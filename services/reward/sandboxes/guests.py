"""Calls of functions that run in sandboxes opened for them: a place first, then their turn."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

from services.reward.call import Call, Place
from services.reward.function import Function
from services.reward.sandboxes.keeper import Sandboxes
from services.reward.sandboxes.place import SandboxGone
from troupe.v1 import reward_pb2 as pb


class Turns(Protocol):
    """Who gives calls their turn: `services.reward.runtime.Runtime`."""

    async def invoke(
        self,
        invocation_id: str,
        function: Function,
        call: Call,
        *,
        priority: int = 0,
        weight: float = 1.0,
        place: Place | None = None,
    ) -> pb.InvokeResponse:
        """Queue the call and wait for its outcome."""


class Guests:
    """Brings calls to their sandboxes. A call that waits for room holds no worker."""

    def __init__(self, sandboxes: Sandboxes, turns: Turns) -> None:
        self._sandboxes = sandboxes
        self._turns = turns
        # Calls that wait for room.
        self._waiting: dict[str, asyncio.Task[Place]] = {}
        self._cancelled: set[str] = set()

    async def invoke(
        self, invocation_id: str, function: Function, call: Call, *, priority: int, weight: float
    ) -> pb.InvokeResponse:
        """The outcome of a call.

        Raises what `Sandboxes.room` and `Runtime.invoke` raise, but for SandboxGone, which is an
        outcome.
        """
        async with AsyncExitStack() as stack:
            room = self._sandboxes.room(function, call)
            waiting = asyncio.create_task(_enter(stack, room))
            self._waiting[invocation_id] = waiting
            try:
                place = await waiting
            except SandboxGone as gone:
                return pb.InvokeResponse(error=gone.error(), sandbox=gone.sandbox_id)
            except asyncio.CancelledError:
                if invocation_id not in self._cancelled:
                    raise
                kind = pb.InvocationError.KIND_CANCELLED
                error = pb.InvocationError(kind=kind, message="cancelled before it ran")
                return pb.InvokeResponse(error=error)
            finally:
                del self._waiting[invocation_id]
                self._cancelled.discard(invocation_id)
            return await self._turns.invoke(
                invocation_id, function, call, priority=priority, weight=weight, place=place
            )

    def cancel(self, invocation_id: str) -> bool:
        """End a call that waits for room; False when it does not."""
        waiting = self._waiting.get(invocation_id)
        if waiting is None or waiting.done():
            return False
        self._cancelled.add(invocation_id)
        return waiting.cancel()


async def _enter(stack: AsyncExitStack, room: AbstractAsyncContextManager[Place]) -> Place:
    return await stack.enter_async_context(room)
