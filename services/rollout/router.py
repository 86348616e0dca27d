"""Takes the turns of one policy to its engines.

Turns wait here until an engine that serves has room (`services.rollout.places`). A turn that loses
its engine goes on elsewhere, or on the same engine once it has come back: from the tokens that it
has, where the engine handed them over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.rollout.continuation import Continuation
from services.rollout.engines.base import Engine, Generation, SamplingParams
from services.rollout.engines.errors import PromptTooLong, TurnDeadline
from services.rollout.places import Asker, Backlog, Home, Place, Places
from troupe.job import RoutingSpec
from troupe.rpc.errors import TroupeError, Unavailable
from troupe.v1 import common_pb2 as pb
from troupe.workflow import ContextOverflowError, TurnError

__all__ = ["Backlog", "Home", "Losses", "PolicyRouter"]

# An engine that refuses turns although it says that it serves must not be asked in a tight loop.
_RETRY_SECONDS = 0.02
_RETRY_SECONDS_MAX = 1.0


@dataclass(slots=True)
class Losses:
    """Turns that lost their engine: those that went on, with the tokens that they kept, and those
    that started over."""

    resumed_turns: int = 0
    resumed_tokens: int = 0
    restarted_turns: int = 0


class PolicyRouter:
    """Queue and engines of one policy. Lives on one event loop."""

    def __init__(
        self,
        policy: str,
        engines: Sequence[Engine],
        *,
        limit: int,
        may_serve: Callable[[Engine], bool] = lambda e: e.state == pb.ENGINE_STATE_HEALTHY,
        spec: RoutingSpec | None = None,
        resume: bool = True,
    ) -> None:
        """`limit`: turns that one engine may have at once. Without `resume` a turn that loses its
        engine starts over."""
        self.policy = policy
        self._places = Places(policy, spec or RoutingSpec(), limit=limit, may_serve=may_serve)
        self._resume = resume
        self._closed = ""
        self._losses = Losses()
        self.on_lost: Callable[[str], None] = lambda engine_id: None
        """Called with the id of an engine that failed a turn, so that it is looked after."""
        for engine in engines:
            self.add(engine)

    @property
    def waiting(self) -> int:
        """Turns that no engine has yet."""
        return self._places.waiting

    @property
    def in_flight(self) -> int:
        """Turns that an engine has, engines that were removed included."""
        return self._places.in_flight

    @property
    def backlog(self) -> Backlog:
        """What there is to do. O(engines + turns waiting)."""
        return self._places.backlog

    def limit_of(self, engine_id: str) -> int:
        """Turns that the engine may have at once now."""
        return self._places.limit_of(engine_id)

    def add(self, engine: Engine) -> None:
        """From now on turns may go to `engine`. Raises `AlreadyExists`."""
        self._places.add(engine)

    def remove(self, engine_id: str) -> None:
        """No new turn goes to the engine; those that it has go on. Raises `NotFound`."""
        self._places.remove(engine_id)

    def regroup(self, group: str, left: int) -> None:
        """Of the query `group` only `left` trajectories are left: its turns are more urgent."""
        self._places.regroup(group, left)

    def wake(self) -> None:
        """Give waiting turns to engines that have room; call when an engine may serve again."""
        self._places.wake()

    def take_losses(self) -> Losses:
        """What was lost since this was asked last."""
        losses, self._losses = self._losses, Losses()
        return losses

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        home: Home,
        deadline_seconds: float,
        domain: str = "",
        agent: str = "",
        group: str = "",
        left: int = 0,
    ) -> Generation:
        """One response, from whichever engine; queueing and repetition count to the deadline.

        `domain` and `agent` say what kind of turn it is, `group` its query, `left` how many
        trajectories of that have not ended. Raises `TurnError` (kinds `deadline`, `job_released`,
        or the engine's own) and `ContextOverflowError`. Cancelling the task aborts the turn.
        """
        began = time.monotonic()
        deadline = began + deadline_seconds
        asker = Asker(home, domain, agent, group, left, key=request_id.rpartition("/")[0])
        turn = Continuation(prompt_ids, sampling, resume=self._resume)
        waited = 0.0
        attempt = 0
        while True:
            prompt = turn.prompt_ids
            self._places.expect(asker, len(prompt), turn.sampling)
            asked = time.monotonic()
            place = await self._place(asker, deadline, deadline_seconds)
            placed = time.monotonic()
            waited += placed - asked
            engine = place.slot.engine
            drawn: Generation | None = None
            try:
                drawn = await engine.generate(
                    request_id if attempt == 0 else f"{request_id}~{attempt}",
                    prompt,
                    turn.sampling,
                    deadline_seconds=deadline - placed,
                )
            except Unavailable as error:  # died, is being updated, leaves
                home.slot = None
                self.on_lost(engine.engine_id)
                piece = getattr(error, "drawn", None)
            except TurnDeadline as error:
                raise self._late(f"was not generated within {deadline_seconds:g} s") from error
            except PromptTooLong as error:
                if turn.tokens:  # what it has fills the context
                    return turn.cut(waited)
                raise _turn_error(error) from error
            except TroupeError as error:
                raise _turn_error(error) from error
            else:
                if drawn.finish_reason != "abort":
                    whole = turn.whole(drawn, waited)
                    self._places.learn(asker, len(prompt_ids), whole)
                    return whole
                piece = drawn  # somebody stopped the engine under the turn
            finally:
                self._places.give_back(place, drawn)
            if piece is not None and turn.ended_by(piece):
                return turn.whole(piece, waited)
            attempt += 1
            if self._keep(turn, piece):
                if turn.complete:
                    return turn.cut(waited)
                continue
            pause = min(_RETRY_SECONDS * 2 ** min(attempt, 16), _RETRY_SECONDS_MAX)
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))

    def close(self, reason: str) -> None:
        """Refuse every turn from now on, waiting ones included."""
        self._closed = reason
        self._places.refuse(self._released)

    def _keep(self, turn: Continuation, piece: Generation | None) -> bool:
        """Whether the lost turn goes on, and does not start over."""
        kept = turn.keep(piece)
        if kept:
            self._losses.resumed_turns += 1
            self._losses.resumed_tokens += kept
        else:
            self._losses.restarted_turns += 1
        return kept > 0

    async def _place(self, asker: Asker, deadline: float, given: float) -> Place:
        if self._closed:
            raise self._released()
        try:
            return await self._places.take(asker, deadline - time.monotonic())
        except TimeoutError as error:
            raise self._late(f"found no free engine within {given:g} s") from error

    def _late(self, what: str) -> TurnError:
        engines = ", ".join(
            f"{engine.engine_id} {pb.EngineState.Name(engine.state)[13:]}"
            + (f" ({engine.message})" if engine.message else "")
            for engine in self._places
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
