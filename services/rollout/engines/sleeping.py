"""Engines that give their memory to somebody else for a while."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection

from services.rollout.engines.base import DRAIN_SECONDS, MEMORY, Memory
from services.rollout.engines.errors import TurnReturned
from services.rollout.engines.state import EngineState
from troupe.rpc.errors import TroupeError
from troupe.v1 import common_pb2 as pb


class Sleeping(ABC):
    """Sleep and wake of `base.Engine`, over two verbs: free memory, take it again.

    Whatever was freed, the engine is STALE afterwards: nobody verified what it holds.
    """

    engine_id: str
    _life: EngineState
    _changing: asyncio.Lock

    def __init__(self) -> None:
        self._asleep: frozenset[Memory] = frozenset()

    @property
    def asleep(self) -> frozenset[Memory]:
        """The memory that the engine has given back."""
        return self._asleep

    async def sleep(
        self, tags: Collection[Memory] = MEMORY, *, drain_seconds: float = DRAIN_SECONDS
    ) -> None:
        """Give memory back; see `base.Engine.sleep`."""
        async with self._changing:
            wanted = frozenset(tags) - self._asleep
            if not wanted:
                return
            self._require_alive()
            if (refusal := self._keeps_memory()) is not None:
                raise refusal
            if self._life.now == pb.ENGINE_STATE_HEALTHY:
                await self.drain("going to sleep", deadline_seconds=drain_seconds)
            self._fail_turns(TurnReturned(self.engine_id, "the engine goes to sleep"))
            self._require_there()
            if self._life.now != pb.ENGINE_STATE_STALE:
                self._life.lost_weights("went to sleep")
            await self._release(wanted)
            self._asleep |= wanted

    async def wake(self, tags: Collection[Memory] = MEMORY) -> None:
        """Take memory again; see `base.Engine.wake`."""
        async with self._changing:
            wanted = frozenset(tags) & self._asleep
            if not wanted:
                return
            self._require_alive()
            await self._resume(wanted)
            self._asleep -= wanted

    @property
    def _lacks(self) -> str:
        return ", ".join(sorted(self._asleep))

    def _keeps_memory(self) -> TroupeError | None:
        """Why memory cannot be given back, if so."""
        return None

    @abstractmethod
    async def drain(self, reason: str, *, deadline_seconds: float) -> int:
        """Take no new turns and see those in hand end."""

    @abstractmethod
    async def _release(self, tags: frozenset[Memory]) -> None:
        """Free that memory; no turn is in hand."""

    @abstractmethod
    async def _resume(self, tags: frozenset[Memory]) -> None:
        """Take it again, with whatever in it."""

    @abstractmethod
    def _fail_turns(self, error: Exception) -> None:
        """End every turn in hand with `error`."""

    @abstractmethod
    def _require_alive(self) -> None:
        """Raise `EngineDied` or `EngineStale` unless the engine is up and not leaving."""

    @abstractmethod
    def _require_there(self) -> None:
        """Raise `EngineDied` when it is gone."""
