"""`ServerEngine`: one policy on an inference server of any kind, launched or attached.

The server is its host's; other policies' engines may stand there, too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

import torch

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.errors import (
    BadTurn,
    BrokenReply,
    EngineDied,
    EngineStale,
    EngineStartFailed,
    Refused,
    ReplyBroken,
    ScoreRefused,
    ServerGone,
    TurnReturned,
    UpdateFailed,
)
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.requests import (
    EngineLoad,
    EngineResponse,
    LoadedAhead,
    Memory,
    ScoreRequest,
)
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.servers.adapters import AdapterVersions, ServedAdapter
from services.rollout.engines.servers.host import MISSES_UNTIL_DEAD, ServerHost
from services.rollout.engines.servers.interface import SERVER_ERRORS, InferenceServer
from services.rollout.engines.servers.loaders import NewWeights
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.weights import (
    Adapted,
    BaseWeights,
    check_base,
    check_published,
    untied,
)
from troupe.job import PolicySpec
from troupe.rpc.errors import FailedPrecondition
from troupe.rpc.ids import new_id
from troupe.transfer import Transfer
from troupe.v1 import common_pb2 as common_pb

# How long an aborted turn waits for the server to return its tokens.
_ABORT_SECONDS: Final = 2.0
# How long a turn waits for the version of a server that another worker keeps, before it asks again.
_CATCH_UP_SECONDS: Final = 5.0
# Continuations that are scored at once.
_SCORES_AT_ONCE: Final = 64
_BAD_REQUEST: Final = 400


class ServerEngine(ServingEngine):
    """Serves a policy with one inference server. A kind of server is a subclass that names it.

    `host`: the server, with the engines of the other policies of a group; None: a server of its
    own, for which the other options are. `replica` chooses the URL of an attached server.
    `deterministic`: the server is launched so that a turn is a function of (weights, prompt, seed);
    an attached one must have been. `devices`: the worker's, for a launched server.
    `routed_experts`: turns of a mixture of experts say which experts their tokens were sent to; an
    attached server must have been started for it.
    """

    server_class: ClassVar[type[InferenceServer]]
    host_class: ClassVar[type[EngineHost]] = ServerHost
    host: ServerHost
    only_copies: ClassVar[bool] = True

    def __init__(
        self,
        engine_id: str,
        policy: str,
        spec: PolicySpec,
        *,
        host: ServerHost | None = None,
        replica: int = 0,
        deterministic: bool = False,
        devices: EngineDevices | None = None,
        routed_experts: bool = False,
    ) -> None:
        host = host or ServerHost(
            engine_id,
            {policy: spec},
            type(self),
            replica=replica,
            deterministic=deterministic,
            devices=devices,
            routed_experts=routed_experts,
        )
        super().__init__(engine_id, policy, in_flight=spec.engine.in_flight, host=host)
        self._spec = spec
        self._server = host.server
        self._records_routes = spec.trainable
        # The server's incarnation that the engine has started with.
        self._incarnation = 0
        # Of a policy that trains a LoRA adapter, or is the base under others'.
        self._versions = AdapterVersions(self._server, host.slots)
        # What the server generates each turn with.
        self._served: dict[EngineTurn, ServedAdapter] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._aborting: set[str] = set()
        # Checksum of the weights of the policy that the engine has left: loaded, but not served.
        self._former = ""
        # Where the weights that are being loaded are published.
        self._source: Transfer | None = None
        # Tensors of the last version that was loaded as a whole, without values.
        self._held: dict[str, torch.Tensor] = {}
        # Number of the host's probe that the last check has seen.
        self._probed = 0
        # Whether another worker keeps the server; set, and made anew, when it serves a version.
        self._followed = False
        # Whether a keeper that was lost may have left a session of updates open.
        self._left_open = False
        self._caught_up = asyncio.Event()
        host.join(self)

    @property
    def url(self) -> str:
        """The server's address; after `start`."""
        return self._server.api.url

    @property
    def update_fallbacks(self) -> int:
        """See `ServingEngine.update_fallbacks`."""
        return self._server.updater.fallbacks if hasattr(self._server, "updater") else 0

    @property
    def held_devices(self) -> frozenset[int]:
        """Indices of the worker's devices that a launched server has."""
        return self._server.devices.held(self.host.host_id)

    @property
    def live_versions(self) -> list[int]:
        """See `ServingEngine.live_versions`."""
        return live if len(live := self._versions.live) > 1 else []

    @property
    def up(self) -> bool:
        """See `Standing.up`."""
        return self._life.alive

    @property
    def serving(self) -> bool:
        """See `Standing.serving`."""
        return self._life.serves

    @property
    def in_flight(self) -> int:
        """See `Standing.in_flight`."""
        return len(self._turns)

    def host_died(self, reason: str) -> None:
        """See `Standing.host_died`."""
        super()._die(reason)

    def host_doubted(self, reason: str) -> None:
        """See `Standing.host_doubted`."""
        if self._life.serves:
            self._life.distrusted(reason)

    def _die(self, reason: str) -> None:
        """End all engines of the server."""
        self.host.died(reason, self._incarnation)
        super()._die(reason)

    async def _begin(self) -> None:
        """Launch or attach, within `start_timeout_seconds`."""
        self._former = ""
        await self._bring_up()

    def assign(self, policy: str) -> None:
        """Move to another policy of the same model; see `ServingEngine.assign`."""
        former = self.checksum
        super().assign(policy)
        # The next update checks, as any other, that the server replaces it.
        self._former = former

    def follow_keeper(self, followed: bool) -> None:
        """See `ServingEngine.follow_keeper`."""
        if followed:
            self.give_up_ahead("another worker keeps its server")
        self._followed = self._server.followed = followed

    async def follow(self, ref: common_pb.WeightsRef) -> None:
        """See `ServingEngine.follow`. Nothing is paused: turns in flight go on, and the server says
        which version drew each of their tokens."""
        async with self._changing:
            self._require_alive()
            if (held := await self._named_version()) != str(ref.version):
                raise UpdateFailed(
                    f"{self.url} holds version '{held}', its keeper said {ref.version}",
                    field="engine",
                    value=self.engine_id,
                    remedy="Wait until its keeper has brought it there.",
                )
            self._life.updating(ref.version)
            self.host.loaded = ref.version
            self.host.updates += 1
            self._life.verified(ref.version, ref.checksum)
            self._server.updater.trust_names()
            self._caught_up.set()
            self._caught_up = asyncio.Event()

    async def _named_version(self) -> str:
        """The name of the version that the server holds. Raises `UpdateFailed`."""
        try:
            return str(await self._server.api.version())
        except SERVER_ERRORS as error:
            raise UpdateFailed(
                f"{self.url} does not say what it holds: {error}",
                field="engine",
                value=self.engine_id,
                remedy="Look at the server's log.",
            ) from error

    async def _catch_up(self) -> None:
        """Wait until the engine follows its server's keeper to another version, or a while: a turn
        that was sent to the former one should then be sent again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_SECONDS):
                await self._caught_up.wait()

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns the tokens so far."""
        turn, future = self._turns.get(request_id), self._waiting.get(request_id)
        if turn is None or future is None or future.done():
            return
        self._aborting.add(request_id)
        with contextlib.suppress(*SERVER_ERRORS):
            await self._server.api.abort(turn.key)
        # A paused server, or one that has not seen the request yet, returns nothing.
        await asyncio.wait([future], timeout=_ABORT_SECONDS)
        if not future.done():
            self._drop(turn)
            future.set_result(turn.result(aborted=True))

    def load(self) -> EngineLoad:
        """The current load; how many turns wait in the server is as of the last `check`."""
        load, reported = self._turns.load(), self.host.reported
        waiting = self.host.waiting_of(load.running)
        return replace(
            load,
            running=load.running - waiting,
            waiting=load.waiting + waiting,
            uncached_tokens=reported.uncached_tokens,
            kv_usage=reported.kv_usage,
            cache_hit_rate=reported.cache_hit_rate,
        )

    async def check(self) -> common_pb.EngineState.ValueType:
        """Probe the server: answered turns are proof of life; else it is asked for a token."""
        if not self._life.alive or (
            self.state == common_pb.ENGINE_STATE_UPDATING and not self.ahead
        ):
            return self.state
        if self._server.exited is not None:
            self._die(self._server.exited)
            return self.state
        if self.ahead:  # its commit, or a deadline, comes soon
            return self.state
        if self._asleep:  # it cannot generate
            return self.state
        probe = await self.host.probe(self._probed)
        self._probed = probe.number
        # An update may have begun meanwhile: a paused server does not generate.
        if not self._life.alive or self.state == common_pb.ENGINE_STATE_UPDATING:
            return self.state
        url = self._server.api.url
        if probe.healthy:
            if self.state == common_pb.ENGINE_STATE_SUSPECT:
                self._life.recovered()
            if self._followed:
                await self._compare_version()
        elif probe.gone or probe.misses >= MISSES_UNTIL_DEAD:
            self._die(f"{url} generates nothing")
        elif self.state == common_pb.ENGINE_STATE_HEALTHY:
            self._life.suspect(f"{url} missed a probe")
        return self.state

    async def _compare_version(self) -> None:
        """STALE if the server was started anew: it holds neither our version nor a later one."""
        known = self.version  # before the server is asked: it may reach a later one meanwhile
        with contextlib.suppress(UpdateFailed):
            held = await self._named_version()
            if known is None or self.state != common_pb.ENGINE_STATE_HEALTHY:
                return
            if not held.isdecimal() or int(held) < known:
                self._life.distrusted(f"the server holds version '{held}' now")

    async def stop(self) -> None:
        """End turns as aborted, then a launched server; an attached one keeps running."""
        self._life.stopped()
        for turn, future in self._unanswered():
            self._drop(turn)
            future.set_result(turn.result(aborted=True))
        self.give_up_ahead("it was stopped")
        if self._background:
            await asyncio.wait(self._background, timeout=_ABORT_SECONDS)
        if self.host.is_up(self._incarnation) and not self._server.launched:
            with contextlib.suppress(TimeoutError):  # an attached server goes on
                async with asyncio.timeout(_ABORT_SECONDS):
                    await self._versions.unload_all()
        await self.host.leave(self)

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        self._waiting[turn.request_id] = future
        self._tasks[turn.request_id] = asyncio.create_task(self._run(turn, future))
        try:
            return await future
        finally:
            del self._waiting[turn.request_id]
            self._aborting.discard(turn.request_id)
            self._tasks.pop(turn.request_id).cancel()

    def _drop(self, turn: EngineTurn) -> None:
        turn.closed = True
        task = self._tasks.get(turn.request_id)
        if task is not None:
            task.cancel()
        # The server would notice the broken connection only when it has something to send.
        task = asyncio.create_task(self._abort_request(turn.key))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_request(self, rid: str) -> None:
        with contextlib.suppress(*SERVER_ERRORS):
            await self._server.api.abort(rid)

    def _fail_turns(self, error: Exception) -> None:
        for turn, future in self._unanswered():
            self._drop(turn)
            future.set_exception(error)

    async def _bring_up(self) -> None:
        try:
            await self.host.up()
        except EngineStartFailed as error:
            self._life.died(str(error))
            raise
        server = self._server
        self._incarnation = self.host.incarnation
        self.max_context, self.vocabulary = server.max_context, server.vocabulary
        self.eos_ids = server.eos_ids
        self._versions.forget(restarted=True)

    def _keeps_memory(self) -> FailedPrecondition | None:
        if self._server.described.frees_memory or self._server.launched:
            return None
        return FailedPrecondition(
            "the server cannot free its memory",
            kind="engine_cannot_sleep",
            field=f"policies.{self.policy}.engine.urls",
            value=self._server.api.url,
            remedy=f"Start it with {self.server_class.options['memory']}.",
        )

    async def _release(self, tags: frozenset[Memory]) -> None:
        """Release memory by the server's memory saver, once all engines of the server do; a
        launched server without it is ended."""
        self._versions.forget()
        await self._versions.settled()
        if self._background:  # aborts under way: a busy scheduler would die
            await asyncio.wait(self._background, timeout=_ABORT_SECONDS)
        await self._control(self.host.release(self, tags), "it did not go to sleep")

    async def _resume(self, tags: frozenset[Memory]) -> None:
        if self._server.described.frees_memory:
            await self._control(self.host.resume(tags), "it did not wake")
        elif tags == self._asleep:
            await self._bring_up()

    async def _control(self, call: Awaitable[None], failure: str) -> None:
        """Await a call after whose failure only a restart helps."""
        try:
            await call
        except (*SERVER_ERRORS, TimeoutError) as error:
            self._die(f"{failure}: {error!r}")
            raise EngineDied(self.engine_id, self.message) from error

    def takes_from_trainer(self, ref: common_pb.WeightsRef) -> bool:
        """See `ServingEngine.takes_from_trainer`. Adapters are small: they take another way."""
        if self._spec.lora is not None or not hasattr(self._server, "updater"):
            return False
        return self._server.updater.takes_from_trainer(ref)

    def loads_ahead(self, ref: common_pb.WeightsRef) -> bool:
        """See `ServingEngine.loads_ahead`. Only over the version before, whose tensors the server
        has shown to take; not where prefixes stay cached by version: some would be of weights that
        were never committed."""
        return (
            self.state == common_pb.ENGINE_STATE_HEALTHY
            and self.version == ref.version - 1
            and not (self._asleep or self._followed)
            and self._spec.engine.cache != "keep"
            and bool(self._held)
            and self._server.updater.knows_names(self._held)
            and self.takes_from_trainer(ref)
        )

    @property
    def _num_bytes(self) -> int:
        """See `ServingEngine._num_bytes`."""
        return sum(tensor.nbytes for tensor in self._held.values())

    async def _apply_ahead(
        self, ref: common_pb.WeightsRef, starting: Callable[[], None]
    ) -> LoadedAhead | None:
        weights = NewWeights(self._held, ref, self._source, self._wave, ahead=True)
        updater = self._server.updater
        async with self._failing():
            loaded = await updater.load_ahead(
                weights, starting=starting, gate=partial(self._gate, ref)
            )
        self._way = updater.way
        return loaded

    async def _verify_ahead(self, ref: common_pb.WeightsRef, loaded: LoadedAhead) -> None:
        async with self._failing():
            await self._server.updater.verify_ahead(ref, loaded, self._num_bytes)

    @contextlib.asynccontextmanager
    async def _failing(self) -> AsyncIterator[None]:
        """Convert the server's errors in an update into `UpdateFailed`."""
        try:
            yield
        except ServerGone as error:
            await self._lost(error)
            raise UpdateFailed(
                str(error), field="engine", value=self.engine_id, remedy="Restart the engine."
            ) from error
        except (BrokenReply, Refused) as error:
            raise UpdateFailed(
                str(error), field="engine", value=self.engine_id, remedy="Repeat the update."
            ) from error

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        await asyncio.to_thread(
            check_published, tensors, self._server.layout, self._spec.lora, ref.key
        )

    async def _fits_base(self, adapted: Adapted) -> None:
        await asyncio.to_thread(check_base, adapted, self._server.layout)
        await asyncio.to_thread(self.host.check_base, self.policy, adapted.base)

    def _read(
        self, ref: common_pb.WeightsRef, transfer: Transfer
    ) -> tuple[Tensors, Adapted | None]:
        self._source = transfer
        return super()._read(ref, transfer)

    def _known_base(self) -> BaseWeights | None:
        return self.host.base or super()._known_base()

    async def _prepared(
        self, tensors: Tensors, ref: common_pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, common_pb.WeightsRef]:
        if adapted is None and self.host.shared:
            base = BaseWeights(ref, tensors)
            await asyncio.to_thread(self.host.check_base, self.policy, base)
        return tensors, ref

    def distrust(self, reason: str) -> None:
        """See `ServingEngine.distrust`. A session of the lost keeper is closed before the load."""
        super().distrust(reason)
        self._left_open = True

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        if self._left_open:
            self._left_open = False
            with contextlib.suppress(*SERVER_ERRORS):
                await self._server.api.end_update()
        known, self._former = self.checksum or self._former, ""
        async with self._failing():
            if self._adapted is not None:
                return await self._load_adapter(self._adapted, ref)
            if self.host.keeps_base:
                return await self._serve_base(BaseWeights(ref, tensors))
            return await self._replace(tensors, ref, known)

    async def _replace(self, tensors: Tensors, ref: common_pb.WeightsRef, known: str) -> float:
        """Load all weights; `known`: checksum of those that the server holds, empty if unknown."""
        each_once = untied(tensors, self._server.layout)
        # With a tied tensor under both names its file is not what the server should read.
        source = self._source if each_once.keys() == tensors.keys() else None
        updater = self._server.updater
        exposed = await updater.run(
            NewWeights(each_once, ref, source, self._wave),
            changed=bool(known) and known != ref.checksum,
            gate=partial(self._gate, ref),
        )
        self._way = updater.way
        self._held = {name: tensor.to("meta") for name, tensor in each_once.items()}
        return exposed

    async def _load_adapter(self, adapted: Adapted, ref: common_pb.WeightsRef) -> float:
        """Load the base, unless the server has it, and the adapter, while the server generates."""
        exposed = await self._hold_base(adapted.base)
        served = await self._versions.load(adapted, ref, partial(self._life.waits, ref.version))
        self._return_turns(ref)
        await self._versions.switch(served)
        return exposed

    async def _serve_base(self, base: BaseWeights) -> float:
        """Serve the base itself, under adapters of other policies."""
        exposed = await self._hold_base(base)
        self._return_turns(base.ref)
        await self._versions.switch(ServedAdapter(None, base.ref.version))
        return exposed

    async def _hold_base(self, base: BaseWeights) -> float:
        """Have the server hold the base; return the seconds in which nothing was served."""
        load = partial(self._replace, base.tensors, base.ref)
        exposed = await self.host.hold_base(self.policy, base, load)
        if exposed is None:
            self._way = "adapter"
        return exposed or 0.0

    @property
    def _cache_key(self) -> str | None:
        """Which cached prefixes a request may use: this version's, if the cache is kept.
        (Adapters have their own caches already.)"""
        return f"v{self.host.loaded}" if self._spec.engine.cache == "keep" else None

    def _gate(self, ref: common_pb.WeightsRef, is_open: bool) -> None:
        """Let turns into the server, which holds `ref`, or hold them back."""
        if is_open:
            self.host.loaded = ref.version
            self.host.open.set()
        else:
            # Only now: turns may have begun while the version was prepared.
            self.host.updates += 1
            self.host.open.clear()
            self._return_turns(ref)

    async def _run(self, turn: EngineTurn, future: asyncio.Future[EngineResponse]) -> None:
        outcome: EngineResponse | Exception
        try:
            outcome = await self._respond(turn)
            self.host.answered += 1
        except ServerGone as error:
            outcome = await self._lost(error) or broken(self.engine_id, turn, error)
        except BrokenReply as error:
            outcome = broken(self.engine_id, turn, error)
        except Refused as error:
            outcome = refused(self.engine_id, turn, error)
        except Exception as error:  # whatever it is, the turn's caller waits for it
            outcome = error
        if future.done():
            return
        turn.closed = True
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    async def _respond(self, turn: EngineTurn) -> EngineResponse:
        served = self._served[turn] = self._versions.begin()
        try:
            return await self._request(turn, served)
        finally:
            del self._served[turn]
            self._versions.ended(served)

    async def _request(self, turn: EngineTurn, served: ServedAdapter) -> EngineResponse:
        """Request the response until it is complete: updates may interrupt it."""
        while True:
            host = self.host
            await host.open.wait()
            asked_of, updates = host.loaded, host.updates
            followed, known = self._followed, self.version
            turn.started_at = turn.started_at or time.monotonic()
            try:
                reply = await self._server.api.generate(
                    turn,
                    adapter=served.name,
                    routing=self._server.routing if self._records_routes else None,
                    cache_key=self._cache_key,
                )
            except Refused as error:
                raise await self._refusal(served, error, turn) from error
            if served.version is None:
                # Tokens of weights that are not verified yet must not get out.
                await self._settled.wait()
            elif not reply.is_over(asked_of):
                if updates == host.updates:  # else it has been loaded again meanwhile
                    host.doubt_base(self._not_the_base)
                raise EngineStale(self.engine_id, self._life.name)
            # Of a server that another worker keeps only its own word counts.
            steady = updates == host.updates and not self._followed
            versions = reply.versions(asked_of, steady=steady, adapter=served.version)
            if versions is None:
                turn.restart()
                if self._followed:
                    await self._catch_up()
                continue
            newest = max(versions, default=0)
            while self._followed and newest > (self.version or 0):
                await self._catch_up()  # until its keeper has verified that version
            if followed and not self._followed and newest > (known or 0):
                reason = f"its keeper was lost before it had verified version {newest}"
                raise TurnReturned(self.engine_id, reason)
            if not turn.versions:
                turn.read_tokens = len(turn.prompt_ids) - reply.cached_tokens
            turn.extend(reply.token_ids, reply.logprobs, versions)
            if reply.routes is not None:
                turn.routes = reply.routes
            self._turns.drew(len(reply.token_ids))
            if not reply.aborted or turn.request_id in self._aborting:
                return turn.result(aborted=reply.aborted)
            if turn.remaining == 0:
                return turn.result()
            if self._followed:
                if self._in_flight == "restart":
                    raise TurnReturned(self.engine_id, "new weights are being loaded")
                await self._catch_up()
            elif updates == host.updates:
                raise BrokenReply(f"the server aborted it: {reply.message or 'no reason given'}")
            turn.incarnation += 1

    async def _refusal(
        self, served: ServedAdapter, error: Refused, turn: EngineTurn | None = None
    ) -> Exception:
        """The error of a refused request, of `turn` or of a score: if the server has lost the
        adapter, or computes it wrongly, the engine has no weights any more."""
        if served.name is None or await self._versions.holds(served):
            return error
        if served == self._versions.now and self._life.serves:
            self._life.distrusted(f"the server has lost adapter '{served.name}': {error}")
        self._versions.lost(served)
        self._end_turns_of(served, besides=turn)
        await self._versions.drop(served)
        # It may have been started anew.
        await self.host.verify_base()
        return EngineStale(self.engine_id, self._life.name)

    def _end_turns_of(self, served: ServedAdapter, besides: EngineTurn | None) -> None:
        """End the turns of a lost adapter, without their tokens: it is unknown what drew them, and
        a server unloads no adapter, and loads no other, before its last turn has ended."""
        for turn, future in self._unanswered():
            if self._served.get(turn) == served:
                if turn is not besides:
                    self._drop(turn)
                    future.set_exception(EngineStale(self.engine_id, self._life.name))
                turn.restart()

    async def _lost(self, error: Exception) -> EngineDied | None:
        """After a broken connection: the error if the server is gone, None if it is alive."""
        if self._server.exited is None and await self._server.api.alive():
            return None
        self._die(self._server.exited or str(error))
        return EngineDied(self.engine_id, self.message or str(error))

    async def _score(
        self, asked: Sequence[ScoreRequest], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        """See `ServingEngine._score`. Servers divide by the temperature only what they sample."""
        if temperature != 1.0:
            raise ScoreRefused(
                f"{self.server_class.product} reports the log-probs of given tokens at temperature "
                "1",
                field="temperature",
                value=temperature,
                remedy="Ask for temperature 1, or serve the policy with `kind: embedded`.",
            )
        host = self.host
        await host.open.wait()
        # Nothing is awaited in between: this version answers, or `updates` has changed.
        served, updates, loaded = self._versions.begin(), host.updates, host.loaded
        slots = asyncio.Semaphore(_SCORES_AT_ONCE)

        async def one(item: ScoreRequest) -> list[float]:
            async with slots:
                return await self._score_one(item, served)

        try:
            async with asyncio.TaskGroup() as tasks:
                rows = [tasks.create_task(one(item)) for item in asked]
        except* SERVER_ERRORS as errors:
            raise await self._score_error(errors.exceptions[0], served) from errors
        finally:
            self._versions.ended(served)
        version = loaded if served.version is None else served.version
        if version is None or updates != host.updates:
            return None
        if served.name is not None and served.name not in self._versions.names:
            return None
        if self._followed and await self._named_version() != str(version):
            return None
        if served.version is not None and not await self._is_over(loaded):
            host.doubt_base(self._not_the_base)
            return None
        return [row.result() for row in rows], version

    async def _is_over(self, base: int | None) -> bool:
        """Return whether the server says that it holds the base, or says nothing."""
        with contextlib.suppress(*SERVER_ERRORS):
            return await self._server.api.version() in (None, str(base))
        return False

    @property
    def _not_the_base(self) -> str:
        return f"{self.url} holds weights that are not the base: it was started anew"

    async def _score_one(self, asked: ScoreRequest, served: ServedAdapter) -> list[float]:
        return await self._server.api.score(
            new_id("score"),
            [*asked.prompt_ids, *asked.ids],
            len(asked.prompt_ids) - 1,
            adapter=served.name,
            cache_key=self._cache_key,
        )

    async def _score_error(self, error: BaseException, served: ServedAdapter) -> Exception:
        if isinstance(error, Refused):
            with contextlib.suppress(*SERVER_ERRORS):
                if (refusal := await self._refusal(served, error)) is not error:
                    return refusal
        if isinstance(error, ServerGone) and (died := await self._lost(error)) is not None:
            return died
        if isinstance(error, Refused) and error.status == _BAD_REQUEST:  # too long, for instance
            return BadTurn(
                f"the server refuses to score it: {error.message}",
                field="prompts",
                remedy="Shorten prompt and continuation, or what the message says.",
            )
        return ReplyBroken(self.engine_id, "score", str(error))


def broken(engine_id: str, turn: EngineTurn, error: Exception) -> ReplyBroken:
    """The error of a turn whose answer is unusable, from a server that is alive."""
    return ReplyBroken(engine_id, turn.request_id, str(error))


def refused(engine_id: str, turn: EngineTurn, error: Refused) -> Exception:
    """The error of a refused turn: the server's fault (5xx), or the request's."""
    if error.status >= 500:
        return broken(engine_id, turn, error)
    return BadTurn(
        f"engine {engine_id} refused the turn: {error.message}",
        field="request_id",
        value=turn.request_id,
        remedy="See the server's message; its limits are in its log.",
    )
