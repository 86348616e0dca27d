"""`ServingEngine`: one serving replica of one policy, whatever computes behind it.

The base class has admission, deadlines, weight updates, draining, scoring, sleep and wake; a kind
of engine adds how to generate, abort and load. The router calls `generate` from any number of
asyncio tasks; the engine batches them. Running turns survive a change of weights, and every token
carries the version that drew it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from services.rollout.engines.errors import (
    BadTurn,
    EngineAsleep,
    EngineDied,
    EngineStale,
    NonFiniteLogits,
    PromptTooLong,
    ScoreDeadline,
    ScoreRefused,
    TurnDeadline,
    TurnReturned,
    UpdateFailed,
    WeightsRefused,
    lost_turn,
)
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.requests import (
    MEMORY,
    DeviceSpeed,
    EngineLoad,
    EngineResponse,
    LoadedAhead,
    Memory,
    Scored,
    ScoreRequest,
    UpdateReport,
    UpdateWave,
)
from services.rollout.engines.state import EngineState
from services.rollout.engines.turns import EngineTurn, TurnTable
from troupe.contracts.payloads import PayloadKinds
from troupe.rpc.errors import FailedPrecondition, TroupeError
from troupe.states import IllegalTransition
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling
from troupe.workflow.token_ids import TokenIds

if TYPE_CHECKING:
    from services.rollout.engines.weights import Adapted, BaseWeights
    from troupe.transfer import Transfer

Tensors = Mapping[str, Any]
InFlight = Literal["keep", "restart"]
# How long `sleep` waits for turns in flight.
DRAIN_SECONDS: Final = 30.0
# How long weights that are loaded wait for their commit: while they are copied for restarts, and
# recorded. Later the engine returns to the former ones: it releases nothing meanwhile, and the
# process that would report the step's outcome may be lost.
COMMIT_SECONDS: Final = 60.0
COMMIT_BYTES_PER_SECOND: Final = 500e6
# An engine whose aborted turns do not end within this time is declared dead.
_ABORT_SECONDS: Final = 10.0


class ServingEngine(ABC):
    """One serving replica of one policy at one verified version.

    Life (troupe.states.ENGINE): `start` leads to STALE, `update_weights` through UPDATING to
    HEALTHY; only then does `generate` serve. When the engine dies every waiting turn fails with
    `EngineDied` and the state is DEAD; `start` again leads to STALE, never to HEALTHY.

    `in_flight`: what a weight update does to running turns: "keep" continues them, "restart"
    returns them to the router. Subclasses set `max_context`, `vocabulary` and `eos_ids` in
    `_begin`, and enter each turn's future into `_waiting`."""

    kind: ClassVar[str]
    """The name of the kind, as in `policies.X.engine.kind`."""
    payload_kinds: ClassVar[PayloadKinds] = {}
    """Kinds of payloads that prompts may have (`TokenIds.payloads`)."""
    only_copies: ClassVar[bool] = False
    """Whether published tensors are only copied from, and never served from: then the engines of a
    process read them through one mapping, whose pages are looked up once."""

    host_class: ClassVar[type[EngineHost]] = EngineHost
    """Class of the hosts of this kind's engines."""

    def __init__(
        self,
        engine_id: str,
        policy: str,
        *,
        in_flight: InFlight = "keep",
        host: EngineHost | None = None,
    ) -> None:
        """`engine_id`: unique within the rollout worker. `host`: what the engine stands on; None:
        nothing that another policy's engine could share."""
        self.engine_id = engine_id
        self.policy = policy
        self.host = host or EngineHost(engine_id)
        # The hardware; set by the creator before `start`.
        self.device = DeviceSpeed()
        self.max_context = 0
        self.vocabulary = 0
        self.eos_ids: frozenset[int] = frozenset()
        self._in_flight: InFlight = in_flight
        self._life = EngineState()
        self._turns = TurnTable()
        # The future of each turn's response, by request id.
        self._waiting: dict[str, asyncio.Future[EngineResponse]] = {}
        self._asleep: frozenset[Memory] = frozenset()
        # How the weights of the last update came into the engine.
        self._way = "mapped"
        self.last_update: UpdateReport | None = None
        # The version that was loaded last, if it was an adapter: it holds its base weights.
        self._adapted: Adapted | None = None
        # The wave of the update under way.
        self._wave = UpdateWave("")
        # Weights that are loaded, and not committed; the state is UPDATING then.
        self._ahead: _Ahead | None = None
        # Serializes start, update, sleep and wake.
        self._changing = asyncio.Lock()
        # Cleared while weights change.
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def update_fallbacks(self) -> int:
        """Updates that were to come from the trainer's devices, and came from host memory."""
        return 0

    @property
    def state(self) -> common_pb.EngineState.ValueType:
        """The state of the engine's life."""
        return self._life.now

    @property
    def version(self) -> int | None:
        """The verified version that is served; None until the first update."""
        return self._life.version

    @property
    def live_versions(self) -> list[int]:
        """The versions that are loaded side by side, ascending; empty if that is only
        `version`."""
        return []

    @property
    def checksum(self) -> str:
        """Checksum of the served weights (troupe.transfer); empty until the first update."""
        return self._life.checksum

    @property
    def message(self) -> str:
        """Why the engine is in its state, for people; empty when all is well."""
        return f"asleep: {self._lacks}" if self._asleep else self._life.message

    @property
    def restarts(self) -> int:
        """How often `start` brought the engine back from DEAD."""
        return self._life.restarts

    @property
    def held_devices(self) -> frozenset[int]:
        """Indices of the devices of this worker that the engine computes on; empty: not known, or
        none of its own."""
        return frozenset()

    def load(self) -> EngineLoad:
        """The current load; cheap, without I/O."""
        return self._turns.load()

    async def start(self) -> None:
        """Bring the engine up to STALE; does nothing if it is alive.

        Raises `EngineStartFailed` within its time limit, and `EngineDied` after `stop`.
        """
        async with self._changing:
            if self._life.alive:
                return
            if self.state == common_pb.ENGINE_STATE_STOPPED:
                raise EngineDied(self.engine_id, "it was stopped")
            await self._begin()
            self._life.started()

    @abstractmethod
    async def stop(self) -> None:
        """End turns (as aborted), release everything; the state is STOPPED. Repeatable."""

    @abstractmethod
    async def check(self) -> common_pb.EngineState.ValueType:
        """Probe the engine and return its state afterwards.

        A missed probe moves HEALTHY to SUSPECT, an answered one back; an ended thread or process,
        or several misses, to DEAD. Never raises for a sick engine.
        """

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        deadline_seconds: float,
    ) -> EngineResponse:
        """Generate one response to `prompt_ids`.

        A response is cut to the room that the prompt leaves in the context. Cancelling the task
        aborts the request. Raises `PromptTooLong`, `EngineStale` (no verified weights),
        `EngineDied`, `TurnDeadline`, `TurnReturned` (repeat it), `BadTurn` (empty prompt, ids
        outside the vocabulary, no token asked for, an id in use) and `NonFiniteLogits`.
        """
        turn = self._new_turn(request_id, prompt_ids, sampling)
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
            # One error ends all turns in flight; each takes along the tokens drawn so far.
            raise lost_turn(error, turn.result(aborted=True)) from error
        finally:
            if not turn.closed and self._turns.get(request_id) is turn:
                self._drop(turn)
            self._turns.remove(turn)
        if not all(map(math.isfinite, generation.logprobs)):
            raise NonFiniteLogits(self.engine_id, generation.versions[-1].version)
        return generation

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns the tokens so far. Unknown ids are
        ignored."""

    async def score(
        self, asked: Sequence[ScoreRequest], temperature: float, *, deadline_seconds: float
    ) -> Scored:
        """Log-probs of given continuations by one verified version; nothing is sampled.

        Raises `EngineStale`, `EngineDied`, `ScoreDeadline`, `ScoreRefused` (engines of this kind
        cannot), `BadTurn` (no tokens, ids outside the vocabulary, longer than the context) and
        `NonFiniteLogits`.
        """
        if not asked:
            raise BadTurn("nothing is asked for", field="prompts", remedy="Give a continuation.")
        for one in asked:
            self._check_score(one)
        tokens = sum(len(one.prompt_ids) + len(one.ids) for one in asked)
        self._turns.scored_tokens += tokens
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    await self._serving()
                    found = await self._score(asked, temperature)
                    # Weights that changed meanwhile, or are not verified yet: repeat.
                    await self._settled.wait()
                    if found is not None and found[1] == self._life.version:
                        break
        except TimeoutError as error:
            raise ScoreDeadline(self.engine_id, len(asked), deadline_seconds) from error
        finally:
            self._turns.scored_tokens -= tokens
        logprobs, version = found
        if not all(math.isfinite(value) for row in logprobs for value in row):
            raise NonFiniteLogits(self.engine_id, version)
        return Scored(logprobs, version, self._life.checksum)

    async def accepts(self, ref: common_pb.WeightsRef, transfer: Transfer) -> None:
        """Raise `WeightsRefused` when the weights published as `ref` do not fit the engine's model.

        Reads names, shapes and dtypes only, and changes nothing: all engines of a policy are asked
        before the first is updated. An engine that is not up accepts everything.
        """
        from services.rollout.engines.weights import layout  # imports torch: takes seconds

        if not self._life.alive or self._asleep:
            return
        manifest = await asyncio.to_thread(transfer.manifest, ref.key)
        await self._fits(layout(manifest), ref)

    def takes_from_trainer(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether the engine would load `ref` from the device of its trainer."""
        return False

    async def update_weights(
        self, ref: common_pb.WeightsRef, transfer: Transfer, wave: UpdateWave | None = None
    ) -> float:
        """Load and verify the version `ref`; returns the seconds in which nothing was served.
        `wave`: the engines that load it from the trainer's device together with this one; None:
        it does so alone.

        Only verified weights serve: a refused update (names, shapes, dtypes, checksum of the
        published weights) leaves the engine unchanged and raises `WeightsRefused` or a
        `TransferError`; one that fails half-way leaves it STALE and raises `UpdateFailed`.
        Repeatable. Raises `EngineAsleep` until the engine is woken.
        """
        async with self._changing:
            self.give_up_ahead(f"version {ref.version} is loaded")
            began = time.monotonic()
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
            tensors, adapted = await asyncio.to_thread(self._read, ref, transfer)
            await self._fits(tensors, ref)
            if adapted is not None:
                await self._fits_base(adapted)
            tensors, own = await self._prepared(tensors, ref, adapted)
            self._adapted = adapted
            self._require_alive()
            self._life.updating(ref.version)
            self._settled.clear()
            self._wave = wave or UpdateWave.of()
            try:
                exposed = await self._apply(tensors, own)
            except BaseException as error:
                if self.state == common_pb.ENGINE_STATE_UPDATING:
                    self._life.lost_weights(f"update to version {ref.version} failed: {error!r}")
                self._fail_turns(EngineStale(self.engine_id, self._life.name))
                raise
            else:
                self._life.verified(ref.version, ref.checksum)
                total = time.monotonic() - began
                self.last_update = UpdateReport(ref.version, self._way, exposed, total)
            finally:
                self._settled.set()
            return exposed

    def loads_ahead(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether the engine can load `ref`, the weights of a step that is not committed
        yet, now."""
        return False

    @property
    def ahead(self) -> bool:
        """Whether the engine has loaded weights that are not committed yet."""
        return self._ahead is not None

    def awaits(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether the engine has loaded `ref` before its commit."""
        return self._ahead is not None and self._ahead.is_of(ref)

    async def load_ahead(self, ref: common_pb.WeightsRef, wave: UpdateWave) -> bool:
        """Load the weights of a step before its commit, from the trainer's device; return whether
        that was done. Otherwise nothing has changed.

        The engine computes with them, but lets nothing out before `admit`: turns wait. Without
        `admit`, `update_weights` or `give_up_ahead` within a time that fits the publication of so
        many bytes, it gives them up by itself. Raises `UpdateFailed`; the engine is STALE then.
        """
        async with self._changing:
            if not self.loads_ahead(ref):
                return False
            began = time.monotonic()
            self._wave = wave

            def starting() -> None:
                self._life.updating(ref.version)
                self._settled.clear()

            try:
                loaded = await self._apply_ahead(ref, starting)
                if loaded is None:
                    return False
                self._life.awaits_commit(ref.version)
            except BaseException as error:
                self._lose_updated(f"version {ref.version} was not loaded: {error!r}")
                raise
            seconds = COMMIT_SECONDS + self._num_bytes / COMMIT_BYTES_PER_SECOND
            reason = f"version {ref.version} was not committed within {seconds:.0f} s"
            timer = asyncio.get_running_loop().call_later(seconds, self.give_up_ahead, reason)
            self._ahead = _Ahead(ref, loaded, began, timer)
            return True

    async def admit(self, ref: common_pb.WeightsRef) -> float:
        """Verify the weights that were loaded before their commit, which is `ref`, and serve them;
        returns the seconds in which nothing was served. Raises `UpdateFailed`, also if the engine
        does not hold them any more."""
        async with self._changing:
            if self._ahead is None or not self._ahead.is_of(ref):
                raise UpdateFailed(
                    f"version {ref.version} is not loaded any more",
                    field="engine",
                    value=self.engine_id,
                    remedy="Load it.",
                )
            ahead, self._ahead = self._ahead, None
            ahead.timer.cancel()
            exposed = ahead.loaded.exposed_seconds
            try:
                await self._verify_ahead(ref, ahead.loaded)
                self._life.verified(ref.version, ref.checksum)
            except BaseException as error:
                self._lose_updated(f"version {ref.version} could not be verified: {error!r}")
                raise
            total = time.monotonic() - ahead.began
            self.last_update = UpdateReport(ref.version, self._way, exposed, total)
            self._settled.set()
            return exposed

    def give_up_ahead(self, reason: str) -> None:
        """Have no weights any more, if those that are loaded are not committed: they have replaced
        the former ones. Turns that they had a part in are returned. Repeatable."""
        if self._ahead is not None:
            self._ahead.timer.cancel()
            self._ahead = None
            self._lose_updated(reason)

    def _lose_updated(self, reason: str) -> None:
        """-> STALE, and return all turns, of an engine that has replaced its weights."""
        if self.state == common_pb.ENGINE_STATE_UPDATING:
            self._life.lost_weights(reason)
            self._fail_turns(EngineStale(self.engine_id, self._life.name))
        self._settled.set()

    def follow_keeper(self, followed: bool) -> None:
        """Say whether another worker brings this engine to new weights. Repeatable."""
        if followed:
            raise FailedPrecondition(
                f"a '{self.kind}' engine is its worker's own",
                kind="engine_not_shared",
                field=f"policies.{self.policy}.engine.urls",
                remedy="Share attached servers only.",
            )

    async def follow(self, ref: common_pb.WeightsRef) -> None:
        """Serve `ref`, to which another worker has brought the engine and verified it.

        Raises `UpdateFailed` when the engine holds another version.
        """
        self.follow_keeper(True)

    def distrust(self, reason: str) -> None:
        """Serve nothing until the next update: what the engine holds is in doubt. Repeatable."""
        if self._life.serves:
            self._life.distrusted(reason)

    @property
    def asleep(self) -> frozenset[Memory]:
        """The memory that the engine has released."""
        return self._asleep

    async def sleep(
        self, tags: Collection[Memory] = MEMORY, *, drain_seconds: float = DRAIN_SECONDS
    ) -> None:
        """Release memory: drain (DRAINING), then STALE and asleep. Repeatable.

        Turns left after `drain_seconds` fail with `TurnReturned`. Raises `EngineDied`, and
        FailedPrecondition when the engine cannot free its memory.
        """
        async with self._changing:
            wanted = frozenset(tags) - self._asleep
            if not wanted:
                return
            self._require_alive()
            if (refusal := self._keeps_memory()) is not None:
                raise refusal
            self.give_up_ahead("goes to sleep")
            if self._life.now == common_pb.ENGINE_STATE_HEALTHY:
                await self.drain("going to sleep", deadline_seconds=drain_seconds)
            self._fail_turns(TurnReturned(self.engine_id, "the engine goes to sleep"))
            self._require_not_dead()
            if self._life.now != common_pb.ENGINE_STATE_STALE:
                self._life.lost_weights("went to sleep")
            await self._release(wanted)
            self._asleep |= wanted

    async def wake(self, tags: Collection[Memory] = MEMORY) -> None:
        """Allocate released memory again. The engine is STALE until an update. Repeatable."""
        async with self._changing:
            wanted = frozenset(tags) & self._asleep
            if not wanted:
                return
            self._require_alive()
            await self._resume(wanted)
            self._asleep -= wanted

    async def drain(self, reason: str, *, deadline_seconds: float) -> int:
        """DRAINING: no new turns; turns in flight may end until the deadline, then are aborted.

        Returns how many were aborted, when none is left. Only a HEALTHY engine drains;
        `IllegalTransition` otherwise. If the engine dies meanwhile its turns fail as always, and
        the state is DEAD.
        """
        self._life.draining(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                await self._turns.emptied()
        left = list(self._turns)
        await asyncio.gather(*(self.abort(turn.request_id) for turn in left))
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._turns.emptied()
        except TimeoutError:
            self._die(f"{len(self._turns)} turns were not given back")
            # They have failed; each leaves the table when its task runs.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._turns.emptied()
        return len(left)

    def assign(self, policy: str) -> None:
        """Move a drained (or dead) engine to another policy with the same model.

        STALE (or DEAD) until it is updated to a version of that policy. Raises `IllegalTransition`
        for an engine in any other state, or with turns in flight.
        """
        if len(self._turns):
            raise IllegalTransition(f"{self.engine_id} still has {len(self._turns)} turns")
        if self.state not in (common_pb.ENGINE_STATE_DEAD, common_pb.ENGINE_STATE_STALE):
            self._life.handed_over(f"goes to policy '{policy}'")
        self.policy = policy

    # What a kind of engine implements.

    @abstractmethod
    async def _begin(self) -> None:
        """Start the engine. Raises `EngineStartFailed`."""

    @abstractmethod
    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        """Generate the response to `turn`, which is in the table."""

    @abstractmethod
    def _drop(self, turn: EngineTurn) -> None:
        """Stop computing `turn`, whose caller is gone. Must not block."""

    @abstractmethod
    def _fail_turns(self, error: Exception) -> None:
        """End every turn in flight with `error`."""

    @abstractmethod
    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        """Raise `WeightsRefused` unless `tensors` (or their layout) fit the engine's model."""

    async def _fits_base(self, adapted: Adapted) -> None:
        """Raise `WeightsRefused` unless the base under an adapter fits the engine's model."""
        raise WeightsRefused(
            f"a '{self.kind}' engine serves no adapters",
            field=f"policies.{self.policy}.lora",
            value=adapted.base.ref.key,
            remedy="Remove `lora`, or choose another kind of engine.",
        )

    async def _prepared(
        self, tensors: Tensors, ref: common_pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, common_pb.WeightsRef]:
        """The arguments of `_apply`: slow work happens here, while the former version serves.

        Raises `WeightsRefused`; nothing has changed then.
        """
        return tensors, ref

    @abstractmethod
    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        """Load what `_prepared` returned; returns the seconds in which nothing was served."""

    @property
    def _num_bytes(self) -> int:
        """Bytes of the policy's weights, of engines that `loads_ahead`."""
        raise NotImplementedError

    async def _apply_ahead(
        self, ref: common_pb.WeightsRef, starting: Callable[[], None]
    ) -> LoadedAhead | None:
        """Load `ref` from the trainer's device, after a call of `starting`; None, without a call,
        if the trainer does not send it. Of engines that `loads_ahead`."""
        raise NotImplementedError

    async def _verify_ahead(self, ref: common_pb.WeightsRef, loaded: LoadedAhead) -> None:
        """Raise `UpdateFailed` unless the loaded weights are `ref`'s."""
        raise NotImplementedError

    async def _score(
        self, asked: Sequence[ScoreRequest], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        """Log-probs and the one version that computed them; None when it changed meanwhile."""
        raise ScoreRefused(
            f"a '{self.kind}' engine scores nothing",
            field=f"policies.{self.policy}.engine.kind",
            value=self.kind,
            remedy="Ask a policy that an embedded engine or an inference server serves.",
        )

    def _keeps_memory(self) -> TroupeError | None:
        """The error of `sleep` in an engine that cannot release memory; None if it can."""
        return None

    @abstractmethod
    async def _release(self, tags: frozenset[Memory]) -> None:
        """Free that memory; no turn is in flight."""

    @abstractmethod
    async def _resume(self, tags: frozenset[Memory]) -> None:
        """Allocate that memory again, with undefined contents."""

    # What all kinds share.

    def _new_turn(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling
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
        self._check_ids(prompt_ids, "prompt_ids")
        prompt = TokenIds.of(prompt_ids)
        for placed in prompt.payloads:
            if placed.payload.kind not in self.payload_kinds:
                raise BadTurn(
                    f"engines of kind '{self.kind}' take no payloads of kind {placed.payload.kind}",
                    field="prompt_ids.payloads",
                    value=placed.payload.kind,
                    remedy="Send text only.",
                )
        room = self.max_context - len(prompt_ids)
        if self.max_context and room < 1:
            raise PromptTooLong(self.policy, len(prompt_ids), self.max_context)
        wanted = sampling.max_new_tokens
        return EngineTurn(
            request_id,
            prompt,
            sampling,
            max_new_tokens=min(wanted, room) if self.max_context else wanted,
            stop_ids=self.eos_ids | frozenset(sampling.stop_token_ids),
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(63),
        )

    def _check_score(self, one: ScoreRequest) -> None:
        """Raise `BadTurn` for a request that cannot be scored."""
        if not one.prompt_ids or not one.ids:
            raise BadTurn(
                "a prompt or a continuation without tokens has no log-probs",
                field="prompts",
                remedy="Give at least one token of each.",
            )
        self._check_ids(one.prompt_ids + one.ids, "prompts")
        length = len(one.prompt_ids) + len(one.ids)
        if self.max_context and length > self.max_context:
            raise BadTurn(
                f"prompt and continuation have {length} tokens, a context has {self.max_context}",
                field=f"policies.{self.policy}.engine.max_context",
                value=self.max_context,
                remedy="Shorten them, or raise max_context up to what the model's positions allow.",
            )

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raise `BadTurn` for token ids outside the vocabulary."""
        if not self.vocabulary:
            return
        low, high = _range_of(ids)
        if low < 0 or high >= self.vocabulary:
            raise BadTurn(
                f"the vocabulary of policy '{self.policy}' has {self.vocabulary} tokens",
                field=field,
                value=low if low < 0 else high,
                remedy="Use the policy's own tokenizer.",
            )

    def _unanswered(self) -> Iterator[tuple[EngineTurn, asyncio.Future[EngineResponse]]]:
        """Turns in flight whose response is still waited for."""
        for turn in self._turns:
            future = self._waiting.get(turn.request_id)
            if future is not None and not future.done():
                yield turn, future

    def _read(
        self, ref: common_pb.WeightsRef, transfer: Transfer
    ) -> tuple[Tensors, Adapted | None]:
        """The tensors published as `ref`, and the adapter with its base if it is one. Blocking."""
        from services.rollout.engines.weights import with_base  # imports torch: takes seconds

        tensors, _ = transfer.get(ref.key, expected_checksum=ref.checksum, lasting=self.only_copies)
        return tensors, with_base(tensors, ref, transfer, self._known_base())

    def _known_base(self) -> BaseWeights | None:
        """The base of adapters that is loaded, if any."""
        return self._adapted.base if self._adapted is not None else None

    def _return_turns(self, ref: common_pb.WeightsRef) -> None:
        """Before weights change: end turns in flight where the job has them restarted."""
        if self._in_flight == "restart":
            reason = f"version {ref.version} is being loaded (engine.in_flight: restart)"
            self._fail_turns(TurnReturned(self.engine_id, reason))

    async def _serving(self) -> None:
        """Wait for an update to end. Raises `EngineDied` or `EngineStale` when no turns are taken.

        An engine that updates from verified weights goes on taking turns, unless those would be
        returned; each token carries its version.
        """
        while self.state == common_pb.ENGINE_STATE_UPDATING and (
            self.version is None or self._in_flight == "restart"
        ):
            await self._settled.wait()
        if not self._life.serves and self.state != common_pb.ENGINE_STATE_UPDATING:
            self._require_not_dead()
            raise EngineStale(self.engine_id, self._life.name)

    @property
    def _lacks(self) -> str:
        return ", ".join(sorted(self._asleep))

    def _require_not_dead(self) -> None:
        if self.state in (common_pb.ENGINE_STATE_DEAD, common_pb.ENGINE_STATE_STOPPED):
            raise EngineDied(self.engine_id, self.message or self._life.name)

    def _require_alive(self) -> None:
        self._require_not_dead()
        if not self._life.alive or self.state == common_pb.ENGINE_STATE_DRAINING:
            raise EngineStale(self.engine_id, self._life.name)

    def _die(self, reason: str) -> None:
        """Move to DEAD and fail every turn in flight. Repeatable."""
        self._life.died(reason)
        self._asleep = frozenset()
        self._fail_turns(EngineDied(self.engine_id, reason))
        self.give_up_ahead(reason)


@dataclass(frozen=True)
class _Ahead:
    """Weights that were loaded before their commit. `ref`: without key and checksum. `began`: when
    their load did. `timer`: gives them up."""

    ref: common_pb.WeightsRef
    loaded: LoadedAhead
    began: float
    timer: asyncio.TimerHandle

    def is_of(self, ref: common_pb.WeightsRef) -> bool:
        """Return whether the committed version `ref` is these weights."""
        mine, theirs = (
            (one.job_id, one.policy, one.version, one.trained_on.step_result)
            for one in (self.ref, ref)
        )
        return bool(ref.trained_on.step_result) and mine == theirs


def _range_of(ids: Sequence[int]) -> tuple[int, int]:
    """The lowest and the highest id; of those that are no int32, what Python's ints say."""
    try:
        return TokenIds.of(ids).range
    except OverflowError:
        return min(ids), max(ids)
