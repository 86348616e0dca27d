"""The router, which sends the turns of one policy to its engines.

A turn waits in the router's queue until a serving engine has room; `troupe.scheduling.routing`
decides which engine gets it and which turn goes first. A turn whose engine dies, drains or changes
weights continues on another engine (or on the same one after its restart), from the tokens drawn so
far if the engine handed them over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from services.rollout.engines.base import ServingEngine
from services.rollout.engines.errors import PromptTooLong, TurnDeadline
from services.rollout.engines.requests import FinishReason
from troupe.contracts import kinds
from troupe.job import RoutingSpec
from troupe.rpc.errors import AlreadyExists, NotFound, TroupeError, Unavailable
from troupe.scheduling.capacity import SharedCapacity
from troupe.scheduling.routing import (
    Fleet,
    Profiles,
    Rates,
    TurnQueue,
    WaitingTurn,
    Work,
    classes_for,
)
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow import ContextOverflowError, TurnError
from troupe.workflow.backend import GeneratedTurn, Sampling, VersionSpan
from troupe.workflow.token_ids import TokenIds

# Pauses before a turn is placed again after an engine returned none of its tokens. They double, so
# that an engine that refuses turns although it reports HEALTHY is not called in a tight loop.
_RETRY_SECONDS: Final = 0.02
_RETRY_SECONDS_MAX: Final = 1.0
_NO_WORK: Final = Work(0, 0)


@dataclass(frozen=True, slots=True)
class Backlog:
    """Load of one policy's router.

    `outstanding_tokens`: prompt tokens plus expected response tokens of waiting and running turns.
    """

    waiting: int
    in_flight: int
    outstanding_tokens: int


@dataclass(slots=True)
class Losses:
    """Counts of turns that lost their engine: those that continued, with the tokens they kept, and
    those that started over."""

    resumed_turns: int = 0
    resumed_tokens: int = 0
    restarted_turns: int = 0


@dataclass(slots=True, eq=False)
class RoutedEngine:
    """One engine of the router with its turns."""

    engine: ServingEngine
    most: int
    in_flight: int = 0
    outstanding: float = 0.0
    removed: bool = False

    @property
    def capacity(self) -> SharedCapacity:
        """The places of the engine's host."""
        return self.engine.host.capacity


@dataclass(slots=True)
class StickyRoute:
    """The engine that served the last turn of one trajectory and policy: it caches the prefix."""

    routed: RoutedEngine | None = None

    @property
    def engine_id(self) -> str | None:
        """The engine's id; None after its removal, since it returns without its cache."""
        return None if self.routed is None or self.routed.removed else self.routed.engine.engine_id


@dataclass(slots=True, eq=False)
class EnginePlacement:
    """The place of one running turn on an engine. `concurrency`: number of turns on the engine's
    host when this one began, including itself."""

    routed: RoutedEngine
    work: Work
    cost: float
    concurrency: int

    @property
    def mean_concurrency(self) -> float:
        """Number of turns on the engine's host: the mean of the number when this turn began and the
        present number."""
        return (self.concurrency + self.routed.capacity.running) / 2


@dataclass(slots=True, eq=False)
class PendingTurn:
    """A turn that needs a place on an engine.

    `group` is its query and `left` the number of that query's trajectories that have not ended.
    `key` names the conversation, `bound` the full engine that the turn waits for, with its
    `bound_cost` in that engine's load, `since` its position in the queue's order, kept when the
    turn is queued again.
    """

    route: StickyRoute
    domain: str = ""
    agent: str = ""
    group: str = ""
    left: int = 0
    key: str = ""
    work: Work = _NO_WORK
    bound: str | None = None
    bound_cost: float | None = None
    since: int | None = None
    placed: asyncio.Future[EnginePlacement] | None = None
    queue: TurnQueue[PendingTurn] | None = None
    entry: WaitingTurn[PendingTurn] | None = None

    @property
    def waits(self) -> bool:
        """Whether the turn still waits for a place; a cancelled turn does not."""
        return self.placed is not None and not self.placed.done()

    def grant(self, placement: EnginePlacement) -> None:
        """Give the waiting turn its place."""
        assert self.placed is not None
        self.placed.set_result(placement)

    def refuse(self, error: Exception) -> None:
        """Fail the turn with `error` if it still waits."""
        if self.placed is not None and not self.placed.done():
            self.placed.set_exception(error)

    def leave_queue(self) -> None:
        """Remove the turn from its queue. Repeatable."""
        if self.queue is not None and self.entry is not None:
            self.queue.remove(self.entry)
        self.placed = self.queue = self.entry = None


class Continuation:
    """The tokens of one turn drawn so far, and the request for the rest.

    With `resume`, tokens that a lost engine hands over are kept: the next engine reads prompt plus
    tokens and continues. Each token has the seed and position that it would have had, so the
    response depends on the loss only through newer weights and rounding. Without `resume` the turn
    starts over: a deterministic job promises equal bits, and how a prompt was read changes them.
    """

    def __init__(self, prompt_ids: Sequence[int], sampling: Sampling, *, resume: bool) -> None:
        self._prompt = TokenIds.of(prompt_ids)
        self._sampling = sampling
        self._resume = resume
        self._pieces: list[GeneratedTurn] = []
        self.tokens = 0
        """Number of response tokens kept from lost engines."""

    @property
    def prompt_ids(self) -> TokenIds:
        """Prompt of the next request: the turn's prompt and the kept tokens."""
        if not self.tokens:
            return self._prompt
        return TokenIds.joined([self._prompt, *(piece.token_ids for piece in self._pieces)])

    @property
    def sampling(self) -> Sampling:
        """Sampling of the next request: `max_new_tokens` less the kept tokens."""
        if not self.tokens:
            return self._sampling
        left = self._sampling.max_new_tokens - self.tokens
        return replace(self._sampling, max_new_tokens=left, drawn=self.tokens)

    def keep(self, piece: GeneratedTurn | None) -> int:
        """Add the tokens of a lost engine, and return how many were kept."""
        if piece is None or not self._resume or not piece.token_ids:
            return 0
        self._pieces.append(piece)
        self.tokens += len(piece.token_ids)
        return len(piece.token_ids)

    def whole(self, last: GeneratedTurn, waited: float) -> GeneratedTurn:
        """Return the finished turn. `waited`: seconds in the router's queue."""
        if not self._pieces:
            return replace(last, queue_seconds=last.queue_seconds + waited)
        return self._join([*self._pieces, last], last.finish_reason, waited)

    def cut(self, waited: float) -> GeneratedTurn:
        """Return a turn with only the kept tokens, ended by length. There must be some."""
        return self._join(self._pieces, "length", waited)

    def _join(
        self, pieces: Sequence[GeneratedTurn], reason: FinishReason, waited: float
    ) -> GeneratedTurn:
        spans: list[VersionSpan] = []
        offset = 0
        for piece in pieces:
            for span in piece.versions:
                start, end = span.start + offset, span.end + offset
                if spans and spans[-1].version == span.version:
                    start = spans.pop().start
                spans.append(VersionSpan(span.version, start, end))
            offset += len(piece.token_ids)
        return GeneratedTurn(
            token_ids=[t for piece in pieces for t in piece.token_ids],
            logprobs=[p for piece in pieces for p in piece.logprobs],
            versions=spans,
            finish_reason=reason,
            cached_tokens=pieces[0].cached_tokens,
            queue_seconds=waited + sum(piece.queue_seconds for piece in pieces),
            generate_seconds=sum(piece.generate_seconds for piece in pieces),
            concurrency=sum(piece.concurrency for piece in pieces) / len(pieces),
            # The last engine has read all tokens before its own.
            routed_experts=pieces[-1].routed_experts,
        )


class PolicyRouter:
    """Queue and engines of one policy. All calls are made on one event loop."""

    def __init__(
        self,
        policy: str,
        engines: Sequence[ServingEngine],
        *,
        limit: int,
        may_serve: Callable[[ServingEngine], bool] = lambda e: (
            e.state == common_pb.ENGINE_STATE_HEALTHY
        ),
        spec: RoutingSpec | None = None,
        resume: bool = True,
    ) -> None:
        """Create the router without engines. `limit`: running turns per engine. `resume`: whether a
        turn that loses its engine keeps its tokens."""
        self._policy = policy
        self._spec = spec or RoutingSpec()
        self._limit = limit
        self._may_serve = may_serve
        self._resume = resume
        self._closed = ""
        self._losses = Losses()
        self._routed: dict[str, RoutedEngine] = {}
        # Removed engines that still run turns.
        self._leaving: set[RoutedEngine] = set()
        self._fleet = Fleet(self._spec.policy, sticky=self._spec.sticky)
        self._rates: dict[str, Rates] = {}
        self._profiles = Profiles()
        self._queue = self._new_queue()
        # Static routing: turns that wait for one engine, even if others have room.
        self._bound: dict[str, TurnQueue[PendingTurn]] = {}
        self.on_lost: Callable[[str], None] = lambda engine_id: None
        """Called with the id of an engine that failed a turn."""
        for engine in engines:
            self.add(engine)

    @property
    def waiting(self) -> int:
        """Number of turns without an engine."""
        return len(self._queue) + sum(map(len, self._bound.values()))

    @property
    def in_flight(self) -> int:
        """Number of turns on engines, including removed engines."""
        return sum(routed.in_flight for routed in (*self._routed.values(), *self._leaving))

    @property
    def backlog(self) -> Backlog:
        """Current load. O(engines + waiting turns)."""
        tokens = sum(routed.outstanding for routed in (*self._routed.values(), *self._leaving))
        for queue in (self._queue, *self._bound.values()):
            tokens += sum(t.work.prompt_tokens + t.work.response_tokens for t in queue)
        return Backlog(self.waiting, self.in_flight, round(tokens))

    def add(self, engine: ServingEngine) -> None:
        """Let turns go to `engine` from now on. Raises `AlreadyExists`."""
        if engine.engine_id in self._routed:
            raise AlreadyExists(
                f"policy '{self._policy}' has this engine already",
                field="engine_id",
                value=engine.engine_id,
            )
        engine_id, capacity = engine.engine_id, engine.host.capacity
        routed = RoutedEngine(engine, self._limit)
        self._routed[engine_id] = routed
        device = engine.device
        rates = None
        if device.prefill_tokens_per_second and device.decode_tokens_per_second:
            rates = Rates(device.prefill_tokens_per_second, device.decode_tokens_per_second)
        self._fleet.add(
            engine_id,
            limit=self._limit,
            device_class=device.device_class,
            rates=rates,
            room=partial(capacity.has_room, engine_id),
        )
        capacity.join(
            engine_id,
            self._limit,
            adaptive=self._spec.limits_adapt,
            waiting=partial(self._waiting_for, engine_id),
            offer=self.wake,
            room_changed=partial(self._fleet.room_changed, engine_id),
        )
        self._rates = self._fleet.rates
        self.wake()

    def remove(self, engine_id: str) -> None:
        """Send the engine no new turns; running ones continue. Raises `NotFound`."""
        routed = self._routed.pop(engine_id, None)
        if routed is None:
            raise NotFound(
                f"policy '{self._policy}' has no such engine",
                field="engine_id",
                value=engine_id,
                remedy=f"Known: {', '.join(self._routed) or 'none'}.",
            )
        routed.capacity.leave(engine_id)
        self._fleet.remove(engine_id)
        self._rates = self._fleet.rates
        routed.removed = True
        if routed.in_flight:
            self._leaving.add(routed)
        self.wake()

    def set_limit(self, engine_id: str, limit: int) -> None:
        """Change the maximum number of turns of an engine; excess turns run to their end.
        Repeatable; no effect for an engine that is not in the router."""
        routed = self._routed.get(engine_id)
        if routed is None or routed.most == limit:
            return
        routed.most = limit
        routed.capacity.set_limit(limit)
        self._fleet.set_limit(engine_id, limit)
        self.wake()

    def regroup(self, group: str, left: int) -> None:
        """Raise the priority of a query's waiting turns: only `left` of its trajectories remain."""
        for queue in (self._queue, *self._bound.values()):
            queue.regroup(group, left)

    def wake(self) -> None:
        """Place waiting turns on engines with room. Call this when an engine may serve again."""
        self._fleet.look_again()
        for engine_id in list(self._bound):
            self._wake_bound(engine_id)
        while (turn := self._queue.peek()) is not None:
            placement = None
            if turn.waits:
                placement = self._try_place(turn)
                if placement is None and turn.bound is None:
                    return
            self._queue.pop()
            if placement is not None:
                turn.grant(placement)
            elif turn.waits:  # its engine is full
                self._enqueue(turn)

    def take_losses(self) -> Losses:
        """Return the losses since the previous call."""
        losses, self._losses = self._losses, Losses()
        return losses

    def close(self, reason: str) -> None:
        """Refuse every turn from now on, including waiting ones."""
        self._closed = reason
        for queue in (self._queue, *self._bound.values()):
            while queue:
                queue.pop().refuse(self._released())

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        route: StickyRoute,
        deadline_seconds: float,
        domain: str = "",
        agent: str = "",
        group: str = "",
        left: int = 0,
    ) -> GeneratedTurn:
        """Return one response from any engine; queueing and repetition count towards the deadline.

        `domain` and `agent` are the kind of turn, `group` is its query, `left` how many of the
        query's trajectories have not ended. Raises `TurnError` (kinds `deadline`, `job_released`,
        or the engine's own) and `ContextOverflowError`. Cancelling the task aborts the turn.
        """
        deadline = time.monotonic() + deadline_seconds
        pending = PendingTurn(route, domain, agent, group, left, key=request_id.rpartition("/")[0])
        turn = Continuation(prompt_ids, sampling, resume=self._resume)
        waited = 0.0
        attempt = 0
        while True:
            prompt = turn.prompt_ids
            pending.work = self._profiles.expected(
                (domain, agent), len(prompt), turn.sampling.max_new_tokens
            )
            queued = time.monotonic()
            if self._closed:
                raise self._released()
            try:
                placement = await self._place(pending, deadline - queued)
            except TimeoutError as error:
                raise self._late(f"found no free engine within {deadline_seconds:g} s") from error
            placed = time.monotonic()
            waited += placed - queued
            engine = placement.routed.engine
            drawn: GeneratedTurn | None = None
            try:
                drawn = await engine.generate(
                    request_id if attempt == 0 else f"{request_id}~{attempt}",
                    prompt,
                    turn.sampling,
                    deadline_seconds=deadline - placed,
                )
                drawn = replace(drawn, concurrency=placement.mean_concurrency)
            except Unavailable as error:  # the engine died, updates, or leaves
                route.routed = None
                self.on_lost(engine.engine_id)
                piece = getattr(error, "drawn", None)
            except TurnDeadline as error:
                raise self._late(f"was not generated within {deadline_seconds:g} s") from error
            except PromptTooLong as error:
                if turn.tokens:  # prompt and kept tokens fill the context
                    return turn.cut(waited)
                raise _turn_error(error) from error
            except TroupeError as error:
                raise _turn_error(error) from error
            else:
                if drawn.finish_reason != "abort":
                    whole = turn.whole(drawn, waited)
                    read = len(prompt_ids) - whole.cached_tokens
                    self._profiles.observe((domain, agent), read, len(whole.token_ids))
                    return whole
                piece = drawn  # the engine was stopped during the turn
            finally:
                self._release(placement, drawn)
            if piece is not None and self._resume and piece.finish_reason != "abort":
                # It contains the turn's last token.
                return turn.whole(piece, waited)
            attempt += 1
            if kept := turn.keep(piece):
                self._losses.resumed_turns += 1
                self._losses.resumed_tokens += kept
                if turn.tokens >= sampling.max_new_tokens:
                    return turn.cut(waited)
                continue
            self._losses.restarted_turns += 1
            pause = min(_RETRY_SECONDS * 2 ** min(attempt, 16), _RETRY_SECONDS_MAX)
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))

    async def _place(self, turn: PendingTurn, seconds: float) -> EnginePlacement:
        """Return a place on an engine that serves. Raises `TimeoutError` after `seconds`."""
        if not self._queue:
            placement = self._try_place(turn)
            if placement is not None:
                return placement
        placed: asyncio.Future[EnginePlacement] = asyncio.get_running_loop().create_future()
        turn.placed = placed
        self._enqueue(turn)
        self.wake()
        try:
            async with asyncio.timeout(seconds):
                return await placed
        except BaseException:
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self._release(placed.result())  # granted at the moment of the timeout
            raise
        finally:
            self._unbind(turn)
            turn.leave_queue()

    def _release(self, placement: EnginePlacement, drawn: GeneratedTurn | None = None) -> None:
        """Free the place of a turn whose engine drew `drawn`, and give it to the next turn."""
        routed = placement.routed
        concurrency = placement.mean_concurrency
        capacity = routed.capacity
        routed.in_flight -= 1
        routed.outstanding -= placement.work.prompt_tokens + placement.work.response_tokens
        if routed.removed:
            if not routed.in_flight:
                self._leaving.discard(routed)
            capacity.give_back()
            return
        engine_id = routed.engine.engine_id
        self._fleet.take_back(engine_id, placement.cost)
        if drawn is not None:
            capacity.ended(concurrency, drawn.generate_seconds, len(drawn.token_ids))
            self._fleet.set_limit(engine_id, capacity.limit)
        capacity.give_back()
        self.wake()

    def _try_place(self, turn: PendingTurn) -> EnginePlacement | None:
        """Return a place without waiting. Bind the turn to the chosen engine if that is full."""
        engine_id, turn.bound = turn.bound, None
        if engine_id is None or not self._serves(engine_id):
            engine_id = self._choose(turn)
        if engine_id is None:
            return None
        routed = turn.route.routed = self._routed[engine_id]
        if not self._fleet.has_room(engine_id):
            turn.bound = engine_id
            return None
        routed.in_flight += 1
        routed.outstanding += turn.work.prompt_tokens + turn.work.response_tokens
        routed.capacity.take(engine_id)
        cost = self._fleet.give(engine_id, turn.work)
        return EnginePlacement(routed, turn.work, cost, routed.capacity.running)

    def _choose(self, turn: PendingTurn) -> str | None:
        affinity, kind = self._spec.affinity, (turn.domain, turn.agent)
        return self._fleet.choose(
            turn.work,
            self._serves,
            previous=turn.route.engine_id,
            classes=classes_for(
                *kind,
                by_domain=affinity.domains,
                by_agent=affinity.agents,
                default=affinity.default,
                inferred=self._profiles.fitting(kind, self._rates) if affinity.infer else None,
            ),
            key=turn.key,
        )

    def _waiting_for(self, engine_id: str) -> int:
        """Return how many turns wait that may go to the engine."""
        if not self._serves(engine_id):
            return 0
        return len(self._queue) + len(self._bound.get(engine_id, ()))

    def _enqueue(self, turn: PendingTurn) -> None:
        queue = self._queue
        if turn.bound is not None:
            queue = self._bound.setdefault(turn.bound, self._new_queue())
            turn.bound_cost = self._fleet.wait(turn.bound, turn.work)
        turn.queue = queue
        turn.entry = queue.push(
            turn, group=turn.group, left=turn.left, places=self._fleet.places, since=turn.since
        )
        turn.since = turn.entry.since

    def _unbind(self, turn: PendingTurn) -> None:
        """Remove a turn from the load of the engine for which it waits, if any. Repeatable."""
        if turn.bound is not None and turn.bound_cost is not None:
            self._fleet.leave(turn.bound, turn.bound_cost)
            turn.bound_cost = None

    def _wake_bound(self, engine_id: str) -> None:
        queue = self._bound[engine_id]
        serves = self._serves(engine_id)
        while queue and not (serves and not self._fleet.has_room(engine_id)):
            turn = queue.pop()
            self._unbind(turn)
            if turn.waits:
                # Its engine has room, or no longer serves: then another engine is chosen.
                placement = self._try_place(turn)
                if placement is None:
                    self._enqueue(turn)
                else:
                    turn.grant(placement)
        if not queue:
            del self._bound[engine_id]

    def _serves(self, engine_id: str) -> bool:
        routed = self._routed.get(engine_id)
        return routed is not None and self._may_serve(routed.engine)

    def _new_queue(self) -> TurnQueue[PendingTurn]:
        return TurnQueue(priority=self._spec.priority)

    def _late(self, what: str) -> TurnError:
        engines = ", ".join(
            f"{routed.engine.engine_id} {common_pb.EngineState.Name(routed.engine.state)[13:]}"
            + (f" ({routed.engine.message})" if routed.engine.message else "")
            for routed in self._routed.values()
        )
        return TurnError(
            f"a turn of policy '{self._policy}' {what}; "
            f"{self.in_flight} in flight, {self.waiting} waiting; engines: {engines}",
            kind=kinds.DEADLINE,
            field="limits.turn_seconds",
            remedy="Raise limits.turn_seconds, or add engine replicas.",
        )

    def _released(self) -> TurnError:
        return TurnError(
            f"policy '{self._policy}' is no longer served: {self._closed}", kind=kinds.JOB_RELEASED
        )


def _turn_error(error: TroupeError) -> TurnError:
    """Convert an engine's refusal to the error that the workflow receives."""
    cls = ContextOverflowError if isinstance(error, PromptTooLong) else TurnError
    return cls(
        error.message,
        kind=None if cls is ContextOverflowError else error.kind,
        field=error.field,
        value=error.value,
        remedy=error.remedy,
    )
