"""Takes the turns of one policy to its engines.

Turns wait here, first come first served, until an engine that serves has room; an engine that
dies gives its turns back and they go on elsewhere, or on the same engine once it has come back.
Which engine a turn goes to is decided by `troupe.scheduling.routing`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.rollout.engines.base import Engine, Generation, SamplingParams
from services.rollout.engines.errors import PromptTooLong, TurnDeadline
from troupe.rpc.errors import AlreadyExists, NotFound, TroupeError, Unavailable
from troupe.scheduling.routing import Candidate, choose_engine
from troupe.v1 import common_pb2 as pb
from troupe.workflow import ContextOverflowError, TurnError

# An engine that refuses turns although it says that it serves must not be asked in a tight loop.
_RETRY_SECONDS = 0.02
_RETRY_SECONDS_MAX = 1.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a policy has to do. `outstanding_tokens`: prompt and response tokens still allowed, over
    the turns that wait and those in flight."""

    waiting: int
    in_flight: int
    outstanding_tokens: int


@dataclass(slots=True, eq=False)
class _Slot:
    """An engine with what the router gave it."""

    engine: Engine
    in_flight: int = 0
    outstanding_tokens: int = 0
    removed: bool = False


@dataclass(slots=True)
class Home:
    """Where a trajectory's turns of one policy went last: its prefix is cached there."""

    slot: _Slot | None = None

    @property
    def engine_id(self) -> str | None:
        """The engine, unless it has been removed since: coming back, it has another cache."""
        return None if self.slot is None or self.slot.removed else self.slot.engine.engine_id


@dataclass(slots=True, eq=False)
class _Waiter:
    home: Home
    tokens: int
    granted: asyncio.Future[_Slot]


class PolicyRouter:
    """Queue and engines of one policy. Lives on one event loop."""

    def __init__(
        self,
        policy: str,
        engines: Sequence[Engine],
        *,
        limit: int,
        may_serve: Callable[[Engine], bool] = lambda e: e.state == pb.ENGINE_STATE_HEALTHY,
    ) -> None:
        """`limit`: turns that one engine may have at once."""
        self.policy = policy
        self._slots: dict[str, _Slot] = {}
        # Removed engines that still have turns.
        self._leaving: set[_Slot] = set()
        self._limit = limit
        self._may_serve = may_serve
        self._waiting: deque[_Waiter] = deque()
        self._rotation = 0
        self._closed = ""
        self.on_lost: Callable[[str], None] = lambda engine_id: None
        """Called with the id of an engine that failed a turn, so that it is looked after."""
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> None:
        """From now on turns may go to `engine`. Raises `AlreadyExists`."""
        if engine.engine_id in self._slots:
            raise AlreadyExists(
                f"policy '{self.policy}' has this engine already",
                field="engine_id",
                value=engine.engine_id,
            )
        self._slots[engine.engine_id] = _Slot(engine)
        self.wake()

    def remove(self, engine_id: str) -> None:
        """No new turn goes to the engine; those that it has go on. Raises `NotFound`."""
        slot = self._slots.pop(engine_id, None)
        if slot is None:
            raise NotFound(
                f"policy '{self.policy}' has no such engine",
                field="engine_id",
                value=engine_id,
                remedy=f"Known: {', '.join(self._slots) or 'none'}.",
            )
        slot.removed = True
        if slot.in_flight:
            self._leaving.add(slot)

    @property
    def waiting(self) -> int:
        """Turns that no engine has yet."""
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        """Turns that an engine has, engines that were removed included."""
        return sum(slot.in_flight for slot in (*self._slots.values(), *self._leaving))

    @property
    def backlog(self) -> Backlog:
        """What there is to do. O(engines + turns waiting)."""
        slots = (*self._slots.values(), *self._leaving)
        waiting = [waiter.tokens for waiter in self._waiting if not waiter.granted.done()]
        return Backlog(
            waiting=len(waiting),
            in_flight=sum(slot.in_flight for slot in slots),
            outstanding_tokens=sum(waiting) + sum(slot.outstanding_tokens for slot in slots),
        )

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        home: Home,
        deadline_seconds: float,
    ) -> Generation:
        """One response, from whichever engine; queueing and repetition count to the deadline.

        Raises `TurnError` (kinds `deadline`, `job_released`, or the engine's own) and
        `ContextOverflowError`. Cancelling the task aborts the turn.
        """
        began = time.monotonic()
        deadline = began + deadline_seconds
        tokens = len(prompt_ids) + sampling.max_new_tokens
        attempt = 0
        while True:
            slot = await self._place(home, tokens, deadline, deadline_seconds)
            placed = time.monotonic()
            try:
                generation = await slot.engine.generate(
                    request_id if attempt == 0 else f"{request_id}~{attempt}",
                    prompt_ids,
                    sampling,
                    deadline_seconds=deadline - placed,
                )
            except Unavailable:  # died, is being updated, leaves: another one, or the same later
                home.slot = None
                self.on_lost(slot.engine.engine_id)
            except TurnDeadline as error:
                raise self._late(f"was not generated within {deadline_seconds:g} s") from error
            except TroupeError as error:
                raise _turn_error(error) from error
            else:
                if generation.finish_reason != "abort":
                    waited = generation.queue_seconds + placed - began
                    return replace(generation, queue_seconds=waited)
                # Somebody stopped the engine under the turn: nothing of it is used.
            finally:
                self._give_back(slot, tokens)
            attempt += 1
            pause = min(_RETRY_SECONDS * 2**attempt, _RETRY_SECONDS_MAX)
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))

    def wake(self) -> None:
        """Give waiting turns to engines that have room; call when an engine may serve again."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.granted.done():  # its task was cancelled
                self._waiting.popleft()
                continue
            slot = self._take(waiter.home, waiter.tokens)
            if slot is None:
                return
            self._waiting.popleft()
            waiter.granted.set_result(slot)

    def close(self, reason: str) -> None:
        """Refuse every turn from now on, waiting ones included."""
        self._closed = reason
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                waiter.granted.set_exception(self._released())

    async def _place(self, home: Home, tokens: int, deadline: float, given: float) -> _Slot:
        """A slot with room, counted as taken; the caller gives it back."""
        if self._closed:
            raise self._released()
        if not self._waiting:
            slot = self._take(home, tokens)
            if slot is not None:
                return slot
        waiter = _Waiter(home, tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await waiter.granted
        except BaseException as error:
            if waiter.granted.done() and not waiter.granted.cancelled():
                if waiter.granted.exception() is None:  # granted as we gave up
                    self._give_back(waiter.granted.result(), tokens)
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise self._late(f"found no free engine within {given:g} s") from error
            raise

    def _take(self, home: Home, tokens: int) -> _Slot | None:
        serving = [s for s in self._slots.values() if self._may_serve(s.engine)]
        chosen = choose_engine(
            [
                Candidate(s.engine.engine_id, s.in_flight, s.outstanding_tokens, self._limit)
                for s in serving
            ],
            sticky=home.engine_id,
            rotation=self._rotation,
        )
        if chosen is None:
            return None
        self._rotation += 1
        slot = home.slot = self._slots[chosen]
        slot.in_flight += 1
        slot.outstanding_tokens += tokens
        return slot

    def _give_back(self, slot: _Slot, tokens: int) -> None:
        slot.in_flight -= 1
        slot.outstanding_tokens -= tokens
        if slot.removed and not slot.in_flight:
            self._leaving.discard(slot)
        self.wake()

    def _late(self, what: str) -> TurnError:
        engines = ", ".join(
            f"{s.engine.engine_id} {pb.EngineState.Name(s.engine.state)[13:]}"
            + (f" ({s.engine.message})" if s.engine.message else "")
            for s in self._slots.values()
        )
        return TurnError(
            f"a turn of policy '{self.policy}' {what}; "
            f"{self.in_flight} in flight, {self.waiting} waiting; engines: {engines}",
            kind="deadline",
            field="limits.turn_seconds",
            remedy="Raise limits.turn_seconds, or add engine replicas.",
        )

    def _released(self) -> TurnError:
        return TurnError(
            f"policy '{self.policy}' is no longer served: {self._closed}", kind="job_released"
        )


def _turn_error(error: TroupeError) -> TurnError:
    """What a workflow sees of an engine's refusal."""
    cls = ContextOverflowError if isinstance(error, PromptTooLong) else TurnError
    return cls(
        error.message,
        kind=None if cls is ContextOverflowError else error.kind,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )
