"""`EmbeddedEngine`: the engine whose model is computed by the rollout process's own torch.

Small models on CPUs: one command and no installation. A batcher computes the passes in a thread of
its own, for all policies whose engines stand on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import torch
from transformers import PreTrainedModel

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.embedded.adapters import LiveVersion, RowAdapter
from services.rollout.engines.embedded.host import STALL_SECONDS, EmbeddedHost
from services.rollout.engines.errors import (
    EngineDied,
    EngineStartFailed,
    TurnReturned,
)
from services.rollout.engines.hosts import EngineHost
from services.rollout.engines.requests import EngineResponse, Memory, ScoreRequest
from services.rollout.engines.server_process import EngineDevices
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.weights import (
    Adapted,
    BaseWeights,
    check_base,
    check_published,
    require_checksum,
)
from troupe.job import PolicySpec
from troupe.rpc.errors import Internal, TroupeError
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.backend import Sampling

log = logging.getLogger(__name__)

# Missed probes after which a SUSPECT engine is declared dead.
MISSES_UNTIL_DEAD: Final = 3
# An engine that was idle this long is asked for a token: a thread that lives but never computes
# looks like an idle one.
PROBE_AFTER_SECONDS: Final = 15.0
PROBE_SECONDS: Final = 10.0
# Tokens of one scoring pass, during which no turn gets on.
PASS_TOKENS: Final = 4096
# Logits of one scoring pass, in numbers.
_PASS_LOGITS: Final = 1 << 25


@dataclass(frozen=True)
class _Loading:
    """A version that is about to be served. `tensors`: the model's own weights, if they are to be
    loaded. `adapter`: over them, if the version is one."""

    base: BaseWeights
    tensors: Tensors | None
    adapter: RowAdapter | None


class EmbeddedEngine(ServingEngine):
    """Serves a policy with the rollout process's own torch.

    A version is served from where it was published, in this machine's shared memory: the engines of
    a policy share one copy. `threads`: torch threads of the process; more than one hurts on shared
    cores, where they spin.

    LoRA adapters are computed in float32 next to the base, whatever its dtype (adapters.py):
    merged weights would be a second copy of the base, and turns in flight would be computed again
    at each update.

    `deterministic`: a turn with a seed is bitwise a function of (weights, prompt, seed), whatever
    else is batched with it and whatever is cached; slower (docs/guarantees.md).

    `routed_experts`: turns of a mixture of experts say which experts their tokens were sent to.

    `device`: "cpu", "cuda" or "auto"; on GPUs, one of `devices`, which engines take in turn. A GPU
    has a copy of the weights per host.
    """

    kind: ClassVar[str] = "embedded"
    host_class: ClassVar[type[EngineHost]] = EmbeddedHost

    def __init__(
        self,
        engine_id: str,
        policy: str,
        spec: PolicySpec,
        *,
        host: EmbeddedHost | None = None,
        threads: int = 1,
        deterministic: bool = False,
        device: str = "cpu",
        devices: EngineDevices | None = None,
        routed_experts: bool = False,
    ) -> None:
        """`host`: the model that several policies share; None: one of its own, made with the other
        options."""
        self._host = host or EmbeddedHost(
            engine_id,
            {policy: spec},
            type(self),
            threads=threads,
            deterministic=deterministic,
            device=device,
            devices=devices,
            routed_experts=routed_experts,
        )
        super().__init__(engine_id, policy, in_flight=spec.engine.in_flight, host=self._host)
        self._spec = spec
        # The version that draws new turns, and the number of turns in flight by version.
        self._live = LiveVersion(self._drew)
        self._drawing: Counter[LiveVersion] = Counter()
        self._loading: _Loading | None = None
        # While the base under an adapter is replaced.
        self._rebasing = False
        self._misses = 0

    @property
    def held_devices(self) -> frozenset[int]:
        """Indices of the worker's devices that the engine computes on."""
        return self._host.held_devices

    @property
    def turns(self) -> int:
        """Turns in flight."""
        return len(self._turns)

    @property
    def live_versions(self) -> list[int]:
        """The versions that are loaded side by side, ascending; empty if that is only
        `version`."""
        served = {live.version for live in self._drawing}
        found = sorted(served if self.version is None else served | {self.version})
        return found if len(found) > 1 else []

    async def _begin(self) -> None:
        """Build the model without weights and start its batcher, unless another policy's engine has
        done so."""
        await self._bring_up()

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns the tokens so far."""
        turn = self._turns.get(request_id)
        future = self._waiting.get(request_id)
        if turn is not None and future is not None and not future.done():
            self._drop(turn)
            future.set_result(turn.result(aborted=True))

    async def check(self) -> common_pb.EngineState.ValueType:
        """Probe the batcher: it must be alive and, with turns in flight, draw tokens."""
        host = self._host
        if not self._life.alive or self._asleep:
            return self.state
        if not host.is_up:
            self._die("its thread ended")
            return self.state
        stalled = time.monotonic() - host.progress_at
        idle = not host.turns
        if idle and self._life.serves and stalled > PROBE_AFTER_SECONDS:
            missed = not await self._generates()
        else:
            missed = not idle and stalled > STALL_SECONDS
        if missed and self._life.serves:
            self._misses += 1
            reason = f"no token for {stalled:.0f} s"
            if self._misses >= MISSES_UNTIL_DEAD:
                self._die(reason)
            elif self.state == common_pb.ENGINE_STATE_HEALTHY:
                self._life.suspect(reason)
        elif not missed:
            self._misses = 0
            if self.state == common_pb.ENGINE_STATE_SUSPECT:
                self._life.recovered()
        return self.state

    async def _generates(self) -> bool:
        """Whether the model computes a token. The probe is not counted as load."""
        params = Sampling(max_new_tokens=1, seed=0)
        turn = self._new_turn(f"probe-{time.monotonic_ns()}", [0], params)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._serve(turn)
        except TimeoutError:
            self._drop(turn)
            return False
        except TroupeError as error:
            log.warning("engine %s: its probe failed: %s", self.engine_id, error)
            return False
        self._host.progress_at = time.monotonic()
        return True

    async def stop(self) -> None:
        """End turns as aborted, and leave the model."""
        self._life.stopped()
        for turn in self._turns:
            await self.abort(turn.request_id)
        await self._host.leave(self)

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        while self._rebasing:
            await self._settled.wait()
            await self._serving()
        batcher, _ = self._host.required(self)
        future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        self._waiting[turn.request_id] = future
        if self._host.turns == 1:
            self._host.progress_at = time.monotonic()
        live = self._live
        self._drawing[live] += 1
        try:
            batcher.submit(turn, live, self._ended)
            return await future
        finally:
            del self._waiting[turn.request_id]
            self._drawing[live] -= 1
            self._retire(live)

    def _retire(self, live: LiveVersion) -> None:
        """Drop a version that no current or future turn needs."""
        if self._drawing[live] == 0:
            del self._drawing[live]
            if live is not self._live and self._host.batcher is not None:
                self._host.batcher.retire(live)

    async def _score(
        self, asked: Sequence[ScoreRequest], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        found: dict[int, list[float]] = {}
        versions = set()
        for numbers in scoring_passes(asked, self.vocabulary):
            batcher, model = self._host.required(self)
            live, some = self._live, [asked[number] for number in numbers]

            def call(
                model: PreTrainedModel = model,
                some: list[ScoreRequest] = some,
                live: LiveVersion = live,
            ) -> tuple[list[list[float]], int]:
                return continuation_logprobs(model, some, temperature), live.version

            rows = len({_row(one) for one in some}) * len(_row(some[0]))
            scored = partial(batcher.run_between_passes, call, live.adapter, rows)
            try:
                logprobs, version = await asyncio.to_thread(scored)
            except (RuntimeError, TimeoutError) as error:
                raise EngineDied(self.engine_id, str(error)) from error
            versions.add(version)
            found |= zip(numbers, logprobs, strict=True)
        if len(versions) != 1:
            return None
        return [found[number] for number in range(len(asked))], versions.pop()

    def _drop(self, turn: EngineTurn) -> None:
        if self._host.batcher is not None:
            self._host.batcher.cancel(turn)

    def _fail_turns(self, error: Exception) -> None:
        for turn, future in self._unanswered():
            self._drop(turn)
            response = turn.result(aborted=True)
            if response.finish_reason == "abort":
                future.set_exception(error)
            else:  # it has its last token; the notification is on its way (`notify_ended`)
                future.set_result(response)

    async def _release(self, tags: frozenset[Memory]) -> None:
        self._forget_live()
        await self._host.release(self, tags)

    async def _resume(self, tags: frozenset[Memory]) -> None:
        if tags == self._asleep:  # all that was released: cache and model are built together
            await self._bring_up()

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        _, model = self._host.required(self)
        await asyncio.to_thread(check_published, tensors, model, self._spec.lora, ref.key)

    async def _fits_base(self, adapted: Adapted) -> None:
        _, model = self._host.required(self)
        if not self._host.holds(adapted.base.ref.checksum):
            await asyncio.to_thread(check_base, adapted, model)

    def _known_base(self) -> BaseWeights | None:
        return self._host.base

    async def _prepared(
        self, tensors: Tensors, ref: common_pb.WeightsRef, adapted: Adapted | None
    ) -> tuple[Tensors, common_pb.WeightsRef]:
        _, model = self._host.required(self)
        base, adapter = BaseWeights(ref, tensors), None
        if adapted is not None:
            base = adapted.base
            adapter = await asyncio.to_thread(_row_adapter, tensors, adapted, ref, model.device)
        self._loading = _Loading(base, await self._host.arranged(base, self), adapter)
        return tensors, ref

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        loading, self._loading = self._loading, None
        assert loading is not None  # prepared
        self._return_turns(ref)
        if loading.adapter is None:
            return await self._load_whole(loading, ref)
        host = self._host
        seconds = 0.0
        self._way = "adapter"
        if loading.tensors is not None:
            # Turns in flight have an adapter over the base that goes.
            reason = f"version {ref.version} has another base"
            self._rebasing = True
            try:
                self._fail_turns(TurnReturned(self.engine_id, reason))
                seconds += await host.load(loading.base, loading.tensors, self, _nothing)
            finally:
                self._rebasing = False
        batcher, _ = host.required(self)
        seconds += await host.between_passes(self, partial(batcher.admit, loading.adapter))
        self._forget_live()
        self._live = LiveVersion(self._drew, ref.version, loading.adapter)
        return seconds

    async def _load_whole(self, loading: _Loading, ref: common_pb.WeightsRef) -> float:
        """Serve the model's own weights, which running turns go on with."""
        if self._live.adapter is not None:
            self._forget_live()
        live = self._live

        def loaded() -> None:
            live.version = ref.version

        _, model = self._host.required(self)
        self._way = "mapped" if model.device.type == "cpu" else "copied"
        if loading.tensors is None:
            loaded()
            return 0.0
        return await self._host.load(loading.base, loading.tensors, self, loaded)

    def _forget_live(self) -> None:
        """Draw no new turns with the present version."""
        former, self._live = self._live, LiveVersion(self._drew)
        self._retire(former)

    async def _bring_up(self) -> None:
        """Have the host bring the model up; on failure DEAD and `EngineStartFailed`."""
        seconds = self._spec.engine.start_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._host.join(self)
        except TimeoutError as error:
            self._life.died(f"not ready within {seconds:g} s")
            raise EngineStartFailed(
                f"not ready within {seconds:g} s",
                field=f"policies.{self.policy}.engine.start_timeout_seconds",
                value=seconds,
                remedy="Allow more time, or look why the model's configuration loads slowly.",
            ) from error
        except EngineStartFailed as error:
            self._life.died(str(error))
            raise
        host = self._host
        self.max_context, self.vocabulary = host.max_context, host.vocabulary
        self.eos_ids = host.eos_ids
        self._misses = 0

    def require_wanted(self) -> None:
        """Raise `EngineDied` if the engine was stopped."""
        if self.state == common_pb.ENGINE_STATE_STOPPED:
            raise EngineDied(self.engine_id, "it was stopped")

    def _die(self, reason: str) -> None:
        self.died(reason)
        self._host.die(reason)

    def died(self, reason: str) -> None:
        """Be dead, as the model is. Repeatable."""
        super()._die(reason)
        self._live = LiveVersion(self._drew)

    def _drew(self, count: int) -> None:
        self._turns.drew(count)
        self._host.progress_at = time.monotonic()

    def _ended(self, turn: EngineTurn, error: str | None) -> None:
        """Called by the batcher in the event loop when it has finished `turn`."""
        if error is not None and not self._host.is_up:
            self._die(error)
            return
        future = self._waiting.get(turn.request_id)
        if future is None or future.done() or turn.closed:
            return
        turn.closed = True
        if not self._spec.trainable:  # nobody replays them
            turn.routes = None
        if error is None:
            future.set_result(turn.result())
        else:
            future.set_exception(
                Internal(
                    f"engine {self.engine_id} could not serve request {turn.request_id}: {error}",
                    kind="engine_request_failed",
                )
            )


def _nothing() -> None:
    pass


def _row_adapter(
    published: Tensors, adapted: Adapted, ref: common_pb.WeightsRef, device: torch.device
) -> RowAdapter:
    """The adapter `published` as `ref`, in the form of passes. Blocking.

    Raises `WeightsRefused`.
    """
    require_checksum(published, ref)
    return RowAdapter.of(adapted.adapter, device)


def scoring_passes(asked: Sequence[ScoreRequest], vocabulary: int) -> list[list[int]]:
    """Indices into `asked` by scoring pass. Rows of a pass have one length, so none needs
    padding."""
    by_row: dict[tuple[int, ...], list[int]] = {}
    for number, one in enumerate(asked):
        by_row.setdefault(_row(one), []).append(number)
    by_length: dict[int, list[list[int]]] = {}
    for row, numbers in by_row.items():
        by_length.setdefault(len(row), []).append(numbers)
    found: list[list[int]] = []
    for length, rows in by_length.items():
        tail = max(len(asked[n].ids) for numbers in rows for n in numbers)
        room = max(1, min(PASS_TOKENS // length, _PASS_LOGITS // (tail * vocabulary)))
        parts = (rows[at : at + room] for at in range(0, len(rows), room))
        found += [[n for numbers in part for n in numbers] for part in parts]
    return found


def continuation_logprobs(
    model: PreTrainedModel, asked: Sequence[ScoreRequest], temperature: float
) -> list[list[float]]:
    """Log-probs of continuations by one pass; their rows have one length."""
    rows = {row: at for at, row in enumerate(dict.fromkeys(map(_row, asked)))}
    tail = max(len(one.ids) for one in asked)
    with torch.inference_mode(), _stock_attention(model):
        ids = torch.tensor(list(rows), device=model.device)
        out = model(input_ids=ids, use_cache=False, logits_to_keep=tail)
        table = torch.log_softmax(out.logits.float() / temperature, dim=-1)
        found: list[list[float]] = []
        for one in asked:
            ours = table[rows[_row(one)], tail - len(one.ids) :]
            chosen = torch.tensor(one.ids, device=model.device).unsqueeze(1)
            found.append(ours.gather(1, chosen).squeeze(1).tolist())
    return found


def _row(one: ScoreRequest) -> tuple[int, ...]:
    """The input of a pass: the last token predicts nothing."""
    return one.prompt_ids + one.ids[:-1]


@contextlib.contextmanager
def _stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Have the model compute with transformers' attention: a batcher's needs a batcher's cache."""
    own = model.config._attn_implementation
    # As `weights.skeleton` chooses it.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
