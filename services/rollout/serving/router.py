"""Takes the turns of one policy to its engines.

Turns wait here until an engine that serves has room. A turn that loses
its engine goes on elsewhere, or on the same engine once it has come back: from the tokens that it
has, where the engine handed them over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from services.rollout.engines.base import (
    EngineResponse,
    FinishReason,
    PromptTooLong,
    SamplingParams,
    ServingEngine,
    TurnDeadline,
    VersionSpan,
)
from troupe.job import RoutingSpec
from troupe.rpc.errors import AlreadyExists, NotFound, TroupeError, Unavailable
from troupe.scheduling.routing import (
    AdaptiveLimit,
    Fleet,
    Profiles,
    Rates,
    TurnQueue,
    WaitingTurn,
    Work,
    classes_for,
)
from troupe.v1 import common_pb2 as pb
from troupe.workflow import ContextOverflowError, TurnError


class Continuation:
    """What is still to be drawn of a turn, and what has been.

    Where `resume` is set, tokens that an engine hands over are kept: the next engine reads prompt
    and tokens and goes on, each token with the seed and the position that it would have had, so
    what is said depends on the loss only through newer weights and rounding. Else the turn starts
    over: a deterministic job promises the same bits, and how a prompt was read changes them.
    """

    def __init__(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, *, resume: bool
    ) -> None:
        self._prompt = list(prompt_ids)
        self._sampling = sampling
        self._resume = resume
        self._pieces: list[EngineResponse] = []
        self.tokens = 0
        """Response tokens that are kept."""

    @property
    def prompt_ids(self) -> list[int]:
        """What the next engine reads."""
        if not self.tokens:
            return self._prompt
        return self._prompt + [t for piece in self._pieces for t in piece.token_ids]

    @property
    def sampling(self) -> SamplingParams:
        """How it goes on."""
        if not self.tokens:
            return self._sampling
        left = self._sampling.max_new_tokens - self.tokens
        return replace(self._sampling, max_new_tokens=left, drawn=self.tokens)

    @property
    def complete(self) -> bool:
        """Whether no token may be added."""
        return self.tokens >= self._sampling.max_new_tokens

    def ended_by(self, piece: EngineResponse) -> bool:
        """Whether an engine was lost just after it had drawn the turn's last token."""
        return self._resume and piece.finish_reason != "abort"

    def keep(self, piece: EngineResponse | None) -> int:
        """An engine was lost after it had drawn `piece`; how many tokens of it are kept."""
        if piece is None or not self._resume or not piece.token_ids:
            return 0
        self._pieces.append(piece)
        self.tokens += len(piece.token_ids)
        return len(piece.token_ids)

    def whole(self, last: EngineResponse, waited: float) -> EngineResponse:
        """The turn, `last` being its last piece; `waited`: seconds in the router's queue."""
        if not self._pieces:
            return replace(last, queue_seconds=last.queue_seconds + waited)
        return self._join([*self._pieces, last], last.finish_reason, waited)

    def cut(self, waited: float) -> EngineResponse:
        """The turn as far as it got: there is no room for more. There must be a piece."""
        return self._join(self._pieces, "length", waited)

    def _join(
        self, pieces: Sequence[EngineResponse], reason: FinishReason, waited: float
    ) -> EngineResponse:
        spans: list[VersionSpan] = []
        offset = 0
        for piece in pieces:
            for span in piece.versions:
                start, end = span.start + offset, span.end + offset
                if spans and spans[-1].version == span.version:
                    start = spans.pop().start
                spans.append(VersionSpan(span.version, start, end))
            offset += len(piece.token_ids)
        return EngineResponse(
            token_ids=[t for piece in pieces for t in piece.token_ids],
            logprobs=[p for piece in pieces for p in piece.logprobs],
            versions=spans,
            finish_reason=reason,
            cached_tokens=pieces[0].cached_tokens,
            queue_seconds=waited + sum(piece.queue_seconds for piece in pieces),
            generate_seconds=sum(piece.generate_seconds for piece in pieces),
        )


NOTHING: Final = Work(0, 0)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What a policy has to do. `outstanding_tokens`: prompt tokens and the response tokens that are
    expected, over the turns that wait and those in flight."""

    waiting: int
    in_flight: int
    outstanding_tokens: int


@dataclass(slots=True, eq=False)
class EngineSlot:
    """An engine with what was given to it."""

    engine: ServingEngine
    limit: AdaptiveLimit | None
    in_flight: int = 0
    outstanding: float = 0.0
    removed: bool = False


@dataclass(slots=True)
class StickyRoute:
    """Where a trajectory's turns of one policy went last: its prefix is cached there."""

    slot: EngineSlot | None = None

    @property
    def engine_id(self) -> str | None:
        """The engine, unless it has been removed since: coming back, it has another cache."""
        return None if self.slot is None or self.slot.removed else self.slot.engine.engine_id


@dataclass(slots=True, eq=False)
class EnginePlacement:
    """One turn's place on an engine. `beside`: turns that the engine then had, itself included."""

    slot: EngineSlot
    work: Work
    cost: float
    beside: int


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn as the places see it.

    `group` and `left`: its query, and how many trajectories of that have not ended; `key` names the
    conversation; `bound`: the one engine that it waits for; `since`: its place in the order of
    those that wait, kept when it comes back.
    """

    home: StickyRoute
    domain: str = ""
    agent: str = ""
    group: str = ""
    left: int = 0
    key: str = ""
    work: Work = NOTHING
    bound: str | None = None
    since: int | None = None
    granted: asyncio.Future[EnginePlacement] | None = None
    queue: TurnQueue[PendingTurn] | None = None
    entry: WaitingTurn[PendingTurn] | None = None

    @property
    def waits(self) -> bool:
        """Whether somebody still wants the place: a cancelled turn does not."""
        return self.granted is not None and not self.granted.done()

    def grant(self, place: EnginePlacement) -> None:
        """Here it is."""
        assert self.granted is not None
        self.granted.set_result(place)

    def refuse(self, error: Exception) -> None:
        """There will be none."""
        if self.granted is not None and not self.granted.done():
            self.granted.set_exception(error)

    def leave(self) -> None:
        """Wait no more."""
        if self.queue is not None and self.entry is not None:
            self.queue.remove(self.entry)
        self.granted = self.queue = self.entry = None


class Places:
    """Engines and queue of one policy. Lives on one event loop."""

    def __init__(
        self,
        policy: str,
        spec: RoutingSpec,
        *,
        limit: int,
        may_serve: Callable[[ServingEngine], bool],
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._limit = limit
        self._may_serve = may_serve
        self._slots: dict[str, EngineSlot] = {}
        # Removed engines that still have turns.
        self._leaving: set[EngineSlot] = set()
        self._fleet = Fleet(spec.policy, sticky=spec.sticky)
        self._rates: dict[str, Rates] = {}
        self._profiles = Profiles()
        self._queue = self._new_queue()
        # Turns that wait for one engine, whatever the others do (static policies).
        self._bound: dict[str, TurnQueue[PendingTurn]] = {}

    def __iter__(self) -> Iterator[ServingEngine]:
        return (slot.engine for slot in self._slots.values())

    @property
    def waiting(self) -> int:
        """Turns that no engine has yet."""
        return len(self._queue) + sum(map(len, self._bound.values()))

    @property
    def in_flight(self) -> int:
        """Turns that an engine has, engines that were removed included."""
        return sum(slot.in_flight for slot in (*self._slots.values(), *self._leaving))

    @property
    def backlog(self) -> Backlog:
        """What there is to do. O(engines + turns waiting)."""
        tokens = sum(slot.outstanding for slot in (*self._slots.values(), *self._leaving))
        for queue in (self._queue, *self._bound.values()):
            tokens += sum(a.work.prompt_tokens + a.work.response_tokens for a in queue)
        return Backlog(self.waiting, self.in_flight, round(tokens))

    def limit_of(self, engine_id: str) -> int:
        """Turns that the engine may have at once now."""
        limit = self._slots[engine_id].limit
        return self._limit if limit is None else limit.now

    def add(self, engine: ServingEngine) -> None:
        """From now on turns may go to `engine`. Raises `AlreadyExists`."""
        if engine.engine_id in self._slots:
            raise AlreadyExists(
                f"policy '{self._policy}' has this engine already",
                field="engine_id",
                value=engine.engine_id,
            )
        adaptive = self._spec.adaptive_limit and self._spec.policy == "least_work"
        slot = EngineSlot(engine, AdaptiveLimit(self._limit) if adaptive else None)
        self._slots[engine.engine_id] = slot
        device = engine.device
        rates = None
        if device.prefill_tokens_per_second and device.decode_tokens_per_second:
            rates = Rates(device.prefill_tokens_per_second, device.decode_tokens_per_second)
        self._fleet.add(
            engine.engine_id, limit=self._limit, device_class=device.device_class, rates=rates
        )
        self._rates = self._fleet.rates
        self.wake()

    def remove(self, engine_id: str) -> None:
        """No new turn goes to the engine; those that it has go on. Raises `NotFound`."""
        slot = self._slots.pop(engine_id, None)
        if slot is None:
            raise NotFound(
                f"policy '{self._policy}' has no such engine",
                field="engine_id",
                value=engine_id,
                remedy=f"Known: {', '.join(self._slots) or 'none'}.",
            )
        self._fleet.remove(engine_id)
        self._rates = self._fleet.rates
        slot.removed = True
        if slot.in_flight:
            self._leaving.add(slot)
        self.wake()

    def expect(self, asker: PendingTurn, prompt_tokens: int, sampling: SamplingParams) -> None:
        """Say what the turn will cost, before it is taken in."""
        kind = (asker.domain, asker.agent)
        asker.work = self._profiles.expected(kind, prompt_tokens, sampling.max_new_tokens)

    async def take(self, asker: PendingTurn, seconds: float) -> EnginePlacement:
        """A place on an engine that serves. Raises `TimeoutError` after `seconds`."""
        if not self._queue:
            place = self._offer(asker)
            if place is not None:
                return place
        granted: asyncio.Future[EnginePlacement] = asyncio.get_running_loop().create_future()
        asker.granted = granted
        self._line_up(asker)
        self.wake()
        try:
            async with asyncio.timeout(seconds):
                return await granted
        except BaseException:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(granted.result())  # it was granted as we gave up
            raise
        finally:
            asker.leave()

    def give_back(self, place: EnginePlacement, drawn: EngineResponse | None = None) -> None:
        """The turn has left its engine, which drew `drawn`."""
        slot = place.slot
        beside = (place.beside + slot.in_flight) / 2
        slot.in_flight -= 1
        slot.outstanding -= place.work.prompt_tokens + place.work.response_tokens
        if slot.removed:
            if not slot.in_flight:
                self._leaving.discard(slot)
            return
        engine_id = slot.engine.engine_id
        self._fleet.take_back(engine_id, place.cost)
        if drawn is not None and slot.limit is not None:
            slot.limit.ended(beside, drawn.generate_seconds, len(drawn.token_ids))
            self._fleet.set_limit(engine_id, slot.limit.now)
        self.wake()

    def learn(self, asker: PendingTurn, prompt_tokens: int, generation: EngineResponse) -> None:
        """What such turns are like."""
        read = prompt_tokens - generation.cached_tokens
        self._profiles.observe((asker.domain, asker.agent), read, len(generation.token_ids))

    def regroup(self, group: str, left: int) -> None:
        """Of `group` only `left` trajectories are left."""
        for queue in (self._queue, *self._bound.values()):
            queue.regroup(group, left)

    def wake(self) -> None:
        """Give places to turns that wait; call when an engine may serve again."""
        self._fleet.look_again()
        for engine_id in list(self._bound):
            self._wake_bound(engine_id)
        while (asker := self._queue.peek()) is not None:
            place = None
            if asker.waits:
                place = self._offer(asker)
                if place is None and asker.bound is None:
                    return
            self._queue.pop()
            if place is not None:
                asker.grant(place)
            elif asker.waits:  # for one engine that is full
                self._line_up(asker)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Everybody who waits is told."""
        for queue in (self._queue, *self._bound.values()):
            while queue:
                queue.pop().refuse(error())

    def _offer(self, asker: PendingTurn) -> EnginePlacement | None:
        """A place now. Under a static policy the asker is bound to its engine if that is full."""
        engine_id, asker.bound = asker.bound, None
        if engine_id is None or not self._serves(engine_id):
            engine_id = self._choose(asker)
        if engine_id is None:
            return None
        slot = asker.home.slot = self._slots[engine_id]
        if not self._fleet.has_room(engine_id):
            asker.bound = engine_id
            return None
        slot.in_flight += 1
        slot.outstanding += asker.work.prompt_tokens + asker.work.response_tokens
        cost = self._fleet.give(engine_id, asker.work)
        return EnginePlacement(slot, asker.work, cost, slot.in_flight)

    def _choose(self, asker: PendingTurn) -> str | None:
        affinity, kind = self._spec.affinity, (asker.domain, asker.agent)
        return self._fleet.choose(
            asker.work,
            self._serves,
            home=asker.home.engine_id,
            classes=classes_for(
                *kind,
                by_domain=affinity.domains,
                by_agent=affinity.agents,
                default=affinity.default,
                inferred=self._profiles.fitting(kind, self._rates) if affinity.infer else None,
            ),
            key=asker.key,
        )

    def _line_up(self, asker: PendingTurn) -> None:
        queue = self._queue
        if asker.bound is not None:
            queue = self._bound.setdefault(asker.bound, self._new_queue())
        asker.queue = queue
        asker.entry = queue.push(
            asker,
            group=asker.group,
            left=asker.left,
            places=self._fleet.places,
            since=asker.since,
        )
        asker.since = asker.entry.since

    def _wake_bound(self, engine_id: str) -> None:
        queue = self._bound[engine_id]
        serves = self._serves(engine_id)
        while queue and not (serves and not self._fleet.has_room(engine_id)):
            asker = queue.pop()
            if asker.waits:
                # Its engine has room; or serves no more, and it finds another.
                place = self._offer(asker)
                if place is None:
                    self._line_up(asker)
                else:
                    asker.grant(place)
        if not queue:
            del self._bound[engine_id]

    def _serves(self, engine_id: str) -> bool:
        slot = self._slots.get(engine_id)
        return slot is not None and self._may_serve(slot.engine)

    def _new_queue(self) -> TurnQueue[PendingTurn]:
        return TurnQueue(priority=self._spec.priority)


__all__ = ["Backlog", "Losses", "PolicyRouter", "StickyRoute"]

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
        engines: Sequence[ServingEngine],
        *,
        limit: int,
        may_serve: Callable[[ServingEngine], bool] = lambda e: e.state == pb.ENGINE_STATE_HEALTHY,
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

    def add(self, engine: ServingEngine) -> None:
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
        home: StickyRoute,
        deadline_seconds: float,
        domain: str = "",
        agent: str = "",
        group: str = "",
        left: int = 0,
    ) -> EngineResponse:
        """One response, from whichever engine; queueing and repetition count to the deadline.

        `domain` and `agent` say what kind of turn it is, `group` its query, `left` how many
        trajectories of that have not ended. Raises `TurnError` (kinds `deadline`, `job_released`,
        or the engine's own) and `ContextOverflowError`. Cancelling the task aborts the turn.
        """
        began = time.monotonic()
        deadline = began + deadline_seconds
        asker = PendingTurn(home, domain, agent, group, left, key=request_id.rpartition("/")[0])
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
            drawn: EngineResponse | None = None
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

    def _keep(self, turn: Continuation, piece: EngineResponse | None) -> bool:
        """Whether the lost turn goes on, and does not start over."""
        kept = turn.keep(piece)
        if kept:
            self._losses.resumed_turns += 1
            self._losses.resumed_tokens += kept
        else:
            self._losses.restarted_turns += 1
        return kept > 0

    async def _place(self, asker: PendingTurn, deadline: float, given: float) -> EnginePlacement:
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
