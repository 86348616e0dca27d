"""What every engine does the same way, whatever serves behind it: admission and updates."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from services.rollout.engines.base import (
    DRAIN_SECONDS,
    MEMORY,
    AdapterRefused,
    AdapterWeights,
    BadTurn,
    Device,
    EngineAsleep,
    EngineDied,
    EngineLoad,
    EngineResponse,
    EngineStale,
    FinishReason,
    Memory,
    NonFiniteLogits,
    PromptTooLong,
    SamplingParams,
    Scoring,
    TurnDeadline,
    TurnReturned,
    WeightsRefused,
    lost_turn,
    spans_of,
)
from services.rollout.engines.sampling import Draw
from services.rollout.engines.state import EngineState
from services.rollout.engines.weights import Adapted, layout, with_base
from troupe.rpc.errors import TroupeError
from troupe.states import IllegalTransition
from troupe.v1 import common_pb2 as pb

if TYPE_CHECKING:
    from troupe.transfer import Transfer


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


# Long enough to smooth steps of a few milliseconds, short enough to follow a phase of a job.
_RATE_SECONDS = 5.0


class EngineTurn:
    """One request on its way: what was asked, what was drawn so far.

    One thread (the engine's) appends tokens; others may read at any time: `versions` is
    appended last, so the first `len(versions)` entries of all three lists belong together.
    """

    __slots__ = (
        "adapter",
        "closed",
        "draws",
        "incarnation",
        "logprobs",
        "max_new_tokens",
        "priority",
        "prompt_ids",
        "read_tokens",
        "request_id",
        "sampling",
        "seed",
        "started_at",
        "stop_ids",
        "submitted_at",
        "token_ids",
        "versions",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        priority: int = 0,
        adapter: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.priority = priority
        self.adapter = adapter
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.stop_ids = stop_ids
        self.seed = seed
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None
        # Prompt tokens that the model computed before the first token was drawn; the others
        # came from the prefix cache.
        self.read_tokens = 0
        # Grows with each resubmission, so that the batcher's ids are never used twice.
        self.incarnation = 0
        self.closed = False

    @property
    def key(self) -> str:
        """Its id in a batcher or server, never used twice."""
        return f"{self.request_id}#{self.incarnation}"

    def next_draw(self) -> Draw:
        """How the next token is drawn."""
        s = self.sampling
        return Draw(s.temperature, s.top_k, s.top_p, self.seed, s.drawn + len(self.token_ids))

    def append(self, token: int, logprob: float, version: int) -> None:
        """Record one token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def restart(self) -> None:
        """Forget what was drawn and begin anew."""
        self.token_ids, self.logprobs, self.versions = [], [], []
        self.read_tokens = 0
        self.incarnation += 1

    @property
    def remaining(self) -> int:
        """Response tokens still allowed."""
        return self.max_new_tokens - len(self.versions)

    @property
    def outstanding(self) -> int:
        """Work left, in tokens: an unread prompt and the response still allowed."""
        return self.remaining + (0 if self.versions else len(self.prompt_ids))

    def result(self, *, aborted: bool = False) -> EngineResponse:
        """What was drawn, as the router gets it."""
        n = len(self.versions)
        tokens = self.token_ids[:n]
        # A turn that had its last token when it was stopped has ended by itself.
        reason: FinishReason = "length"
        if n and tokens[-1] in self.stop_ids:
            reason = "stop"
        elif aborted and n < self.max_new_tokens:
            reason = "abort"
        now = time.monotonic()
        started = self.started_at if self.started_at is not None else now
        return EngineResponse(
            token_ids=tokens,
            logprobs=self.logprobs[:n],
            versions=spans_of(self.versions[:n]),
            finish_reason=reason,
            cached_tokens=max(0, len(self.prompt_ids) - self.read_tokens) if n else 0,
            queue_seconds=started - self.submitted_at,
            generate_seconds=now - started,
        )


class TurnTable:
    """All turns of an engine that have not ended, by request id, with their load."""

    def __init__(self) -> None:
        self._turns: dict[str, EngineTurn] = {}
        self._generated = 0
        self._rate: deque[tuple[float, int]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[EngineTurn]:
        return iter(list(self._turns.values()))

    def get(self, request_id: str) -> EngineTurn | None:
        """The turn of that id, unless it has ended."""
        return self._turns.get(request_id)

    def add(self, turn: EngineTurn) -> None:
        """A turn begins."""
        self._turns[turn.request_id] = turn
        self._empty.clear()

    def remove(self, turn: EngineTurn) -> None:
        """A turn has ended, however. Repeatable."""
        # Another one of the same id, for which this one was refused, is still in hand.
        if self._turns.get(turn.request_id) is turn:
            del self._turns[turn.request_id]
            turn.closed = True
            if not self._turns:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until no turn is left."""
        await self._empty.wait()

    def drew(self, count: int) -> None:
        """`count` tokens were drawn just now. May be called from the engine's thread."""
        self._generated += count
        self._rate.append((time.monotonic(), count))

    def load(self) -> EngineLoad:
        """Load now. O(turns in hand + steps of the last seconds)."""
        since = time.monotonic() - _RATE_SECONDS
        while self._rate and self._rate[0][0] < since:
            self._rate.popleft()
        turns = list(self._turns.values())
        running = sum(turn.started_at is not None for turn in turns)
        return EngineLoad(
            running=running,
            waiting=len(turns) - running,
            outstanding_tokens=sum(turn.outstanding for turn in turns),
            generated_tokens=self._generated,
            tokens_per_second=sum(count for _, count in list(self._rate)) / _RATE_SECONDS,
        )


Tensors = Mapping[str, Any]
InFlight = Literal["keep", "restart"]
# Turns that were aborted are given back within this time, or the engine is as good as dead.
_HAND_BACK_SECONDS = 10.0


class EngineFront(Scoring, Sleeping):
    """Implements `base.Engine` over a few verbs: serve a turn, drop a turn, load weights, free and
    take memory.

    `in_flight`: what becomes of running turns at an update. Subclasses set `max_context`,
    `vocabulary` and `eos_ids` in `_begin`.
    """

    kind: ClassVar[str]

    def __init__(self, engine_id: str, policy: str, *, in_flight: InFlight = "keep") -> None:
        super().__init__()
        self.engine_id = engine_id
        self.policy = policy
        self.device = Device()
        self.max_context = 0
        self.vocabulary = 0
        self.eos_ids: frozenset[int] = frozenset()
        self._in_flight: InFlight = in_flight
        self._life = EngineState()
        self._turns = TurnTable()
        # The version that was put in service last, if it was an adapter: it keeps its base here.
        self._adapted: Adapted | None = None
        self._changing = asyncio.Lock()
        # Clear while weights change.
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def state(self) -> pb.EngineState.ValueType:
        """Where in its life the engine is."""
        return self._life.now

    @property
    def version(self) -> int | None:
        """Verified version that is served."""
        return self._life.version

    @property
    def checksum(self) -> str:
        """Checksum of the served weights."""
        return self._life.checksum

    @property
    def message(self) -> str:
        """Why the engine is in its state; empty when all is well."""
        return f"asleep: {self._lacks}" if self._asleep else self._life.message

    @property
    def restarts(self) -> int:
        """Times that `start` brought the engine back from DEAD."""
        return self._life.restarts

    def load(self) -> EngineLoad:
        """Current load."""
        return self._turns.load()

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        deadline_seconds: float,
        priority: int = 0,
        adapter: str | None = None,
    ) -> EngineResponse:
        """Draw one response; see `base.Engine.generate`."""
        turn = self._turn(request_id, prompt_ids, sampling, priority, adapter)
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._serving()
                if self._turns.get(request_id) is not None:
                    raise BadTurn(
                        "a turn with this id is being generated already",
                        field="request_id",
                        value=request_id,
                        remedy="Give every turn an id of its own.",
                    )
                self._turns.add(turn)
                generation = await self._serve(turn)
        except TimeoutError as error:
            raise TurnDeadline(
                self.engine_id, request_id, deadline_seconds, len(turn.versions)
            ) from error
        except (EngineDied, EngineStale) as error:
            # One error ends all turns in hand; each takes along what was drawn of it.
            raise lost_turn(error, turn.result(aborted=True)) from error
        finally:
            if not turn.closed and self._turns.get(request_id) is turn:
                self._drop(turn)
            self._turns.remove(turn)
        if not all(map(math.isfinite, generation.logprobs)):
            raise NonFiniteLogits(self.engine_id, generation.versions[-1].version)
        return generation

    async def update_weights(self, ref: pb.WeightsRef, transfer: Transfer) -> float:
        """Bring the engine to `ref`; see `base.Engine.update_weights`."""
        async with self._changing:
            if self.version == ref.version and self._life.serves:
                if self.checksum == ref.checksum:
                    return 0.0
                raise WeightsRefused(
                    f"version {ref.version} is served with checksum {self.checksum}, the update "
                    f"announces {ref.checksum}",
                    field="weights",
                    value=ref.key,
                    remedy="Publish changed weights under a new version.",
                )
            self._require_alive()
            if self._asleep:
                raise EngineAsleep(self.engine_id, self._lacks)
            tensors, adapted = await asyncio.to_thread(self._get, ref, transfer)
            await self._fits(tensors, ref)
            if adapted is not None:
                await self._fits_base(adapted)
            tensors, own = await self._prepared(tensors, ref, adapted)
            self._adapted = adapted
            self._require_alive()
            self._life.updating(ref.version)
            self._settled.clear()
            try:
                exposed = await self._apply(tensors, own)
            except BaseException as error:
                if self.state == pb.ENGINE_STATE_UPDATING:
                    self._life.lost_weights(f"update to version {ref.version} failed: {error!r}")
                self._fail_turns(EngineStale(self.engine_id, self._life.name))
                raise
            else:
                self._life.verified(ref.version, ref.checksum)
            finally:
                self._settled.set()
            return exposed

    def _get(self, ref: pb.WeightsRef, transfer: Transfer) -> tuple[Tensors, Adapted | None]:
        """What is published as `ref`; with the base where it is an adapter. In a thread."""
        tensors, _ = transfer.get(ref.key, expected_checksum=ref.checksum)
        known = self._adapted.base if self._adapted is not None else None
        return tensors, with_base(tensors, ref, transfer, known)

    async def accepts(self, ref: pb.WeightsRef, transfer: Transfer) -> None:
        """Whether `ref` would fit; see `base.Engine.accepts`."""
        if not self._life.alive or self._asleep:
            return
        manifest = await asyncio.to_thread(transfer.manifest, ref.key)
        await self._fits(layout(manifest), ref)

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the LoRA adapters that turns may use."""
        return frozenset()

    async def load_adapter(self, name: str, source: Path | AdapterWeights) -> None:
        """Engines that know no adapters refuse."""
        raise AdapterRefused(
            f"a '{self.kind}' engine serves no LoRA adapters",
            field=f"policies.{self.policy}.engine.kind",
            value=self.kind,
            remedy="Use `kind: sglang`, launched with --enable-lora.",
        )

    async def unload_adapter(self, name: str) -> None:
        """There are none."""
        assert name not in self.adapters

    def _give_back(self, ref: pb.WeightsRef) -> None:
        """Weights are about to change: end the turns in hand where the job wants them asked for
        again."""
        if self._in_flight == "restart":
            reason = f"version {ref.version} is being loaded (engine.in_flight: restart)"
            self._fail_turns(TurnReturned(self.engine_id, reason))

    async def drain(self, reason: str, *, deadline_seconds: float) -> int:
        """Take no new turns and see those in hand end; see `base.Engine.drain`."""
        self._life.draining(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                await self._turns.emptied()
        left = list(self._turns)
        await asyncio.gather(*(self.abort(turn.request_id) for turn in left))
        try:
            async with asyncio.timeout(_HAND_BACK_SECONDS):
                await self._turns.emptied()
        except TimeoutError:
            self._die(f"{len(self._turns)} turns were not given back")
            # They have failed; each leaves the table when its task hears of it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HAND_BACK_SECONDS):
                    await self._turns.emptied()
        return len(left)

    def assign(self, policy: str) -> None:
        """Serve another policy of the same model from now on; see `base.Engine.assign`."""
        if len(self._turns):
            raise IllegalTransition(f"{self.engine_id} still has {len(self._turns)} turns")
        if self.state not in (pb.ENGINE_STATE_DEAD, pb.ENGINE_STATE_STALE):
            self._life.handed_over(f"goes to policy '{policy}'")
        self.policy = policy

    async def start(self) -> None:
        """Bring the engine up; STALE afterwards.

        Does nothing on an engine that is alive. Raises `EngineStartFailed`, and `EngineDied`
        after `stop`.
        """
        async with self._changing:
            if self._life.alive:
                return
            if self.state == pb.ENGINE_STATE_STOPPED:
                raise EngineDied(self.engine_id, "it was stopped")
            await self._begin()
            self._life.started()

    @abstractmethod
    async def _begin(self) -> None:
        """Come up. Raises `EngineStartFailed`."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what it has."""

    @abstractmethod
    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        """Generate `turn`, which is in the table."""

    @abstractmethod
    def _drop(self, turn: EngineTurn) -> None:
        """Nobody waits for `turn` any more: stop working on it. Must not block."""

    @abstractmethod
    def _fail_turns(self, error: Exception) -> None:
        """End every turn in hand with `error`."""

    @abstractmethod
    async def _fits(self, tensors: Tensors, ref: pb.WeightsRef) -> None:
        """Raise `WeightsRefused` unless `tensors` fit the engine's model."""

    async def _fits_base(self, adapted: Adapted) -> None:
        """Raise `WeightsRefused` unless the base under an adapter fits the engine's model."""
        raise WeightsRefused(
            f"a '{self.kind}' engine serves no adapters",
            field=f"policies.{self.policy}.lora",
            value=adapted.base.ref.key,
            remedy="Remove `lora`, or choose another kind of engine.",
        )

    async def _prepared(
        self, tensors: Tensors, ref: pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, pb.WeightsRef]:
        """What `_apply` gets: all that takes time is done here, while the former version serves.

        Raises `WeightsRefused`; nothing has changed then.
        """
        return tensors, ref

    @abstractmethod
    async def _apply(self, tensors: Tensors, ref: pb.WeightsRef) -> float:
        """Put what `_prepared` returned in service; returns exposed seconds."""

    def _turn(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        priority: int,
        adapter: str | None,
    ) -> EngineTurn:
        """A validated turn. Raises `BadTurn` and `PromptTooLong`."""
        if not prompt_ids:
            raise BadTurn("the prompt is empty", field="prompt_ids", remedy="Send some tokens.")
        if sampling.max_new_tokens < 1:
            raise BadTurn(
                "no token is asked for",
                field="max_new_tokens",
                value=sampling.max_new_tokens,
                remedy="Ask for at least one.",
            )
        if self.vocabulary:
            low, high = min(prompt_ids), max(prompt_ids)
            if low < 0 or high >= self.vocabulary:
                raise BadTurn(
                    f"the vocabulary of policy '{self.policy}' has {self.vocabulary} tokens",
                    field="prompt_ids",
                    value=low if low < 0 else high,
                    remedy="Use the policy's own tokenizer.",
                )
        if adapter is not None and adapter not in self.adapters:
            raise BadTurn(
                "no such LoRA adapter is loaded",
                field="adapter",
                value=adapter,
                remedy="Load it first; an engine that was restarted has none.",
            )
        room = self.max_context - len(prompt_ids)
        if self.max_context and room < 1:
            raise PromptTooLong(self.policy, len(prompt_ids), self.max_context)
        wanted = sampling.max_new_tokens
        return EngineTurn(
            request_id,
            list(prompt_ids),
            sampling,
            max_new_tokens=min(wanted, room) if self.max_context else wanted,
            stop_ids=self.eos_ids | frozenset(sampling.stop_token_ids),
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
            priority=priority,
            adapter=adapter,
        )

    async def _serving(self) -> None:
        """Wait out an update. Raises `EngineDied` or `EngineStale` when no turns are taken.

        An engine that updates from verified weights goes on taking turns, unless those would be
        given back; each token knows its version.
        """
        while self.state == pb.ENGINE_STATE_UPDATING and (
            self.version is None or self._in_flight == "restart"
        ):
            await self._settled.wait()
        if not self._life.serves and self.state != pb.ENGINE_STATE_UPDATING:
            if self.state in (pb.ENGINE_STATE_DEAD, pb.ENGINE_STATE_STOPPED):
                raise EngineDied(self.engine_id, self.message or self._life.name)
            raise EngineStale(self.engine_id, self._life.name)

    def _require_there(self) -> None:
        if self.state in (pb.ENGINE_STATE_DEAD, pb.ENGINE_STATE_STOPPED):
            raise EngineDied(self.engine_id, self.message or self._life.name)

    def _require_alive(self) -> None:
        self._require_there()
        if not self._life.alive or self.state == pb.ENGINE_STATE_DRAINING:
            raise EngineStale(self.engine_id, self._life.name)

    def _die(self, reason: str) -> None:
        """The engine is gone: DEAD, and every turn in hand fails. Repeatable."""
        self._life.died(reason)
        self._asleep = frozenset()
        self._fail_turns(EngineDied(self.engine_id, reason))
