"""`SimulatedEngine`: an inference engine without a model that takes the time of a cost model.

States, versions, weight updates and checksums work as in every engine. `EngineBatch` computes
the times; one timer per engine, set to the end of the next turn, drives it.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from services.rollout.engines.base import ServingEngine, Tensors
from services.rollout.engines.errors import WeightsRefused
from services.rollout.engines.requests import EngineLoad, EngineResponse, Memory
from services.rollout.engines.turns import EngineTurn
from services.rollout.engines.weights import load_config
from testbed.timeline import Timeline, TimelineSpan
from troupe.job import PolicySpec, SimulatedSpec
from troupe.scheduling.defaults import EMBEDDED_CONTEXT
from troupe.twin.batch import EngineBatch
from troupe.v1 import common_pb2 as common_pb
from troupe.workflow.languages import end_ids


@dataclass(frozen=True)
class Response:
    """The full response of a turn: token ids and their log-probs in nats."""

    token_ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.token_ids)

    def after(self, drawn: int) -> Response:
        """Return the rest of the response after its first `drawn` tokens."""
        return Response(self.token_ids[drawn:], self.logprobs[drawn:]) if drawn else self


def draw_response(
    pace: SimulatedSpec,
    *,
    seed: int,
    vocabulary: int,
    stop_ids: frozenset[int],
    max_new_tokens: int,
) -> Response:
    """Draw a response by `seed`: lognormal length, uniform tokens, finite log-probs.

    The last token, and no other, is a stop token, unless `max_new_tokens` truncates the response or
    there are no stop tokens.
    """
    random = np.random.default_rng(seed)
    sigma = pace.response_tokens_sigma
    location = math.log(pace.response_tokens_mean) - sigma * sigma / 2
    length = max(1, round(float(random.lognormal(location, sigma))))
    stops = sorted(stop for stop in stop_ids if stop < vocabulary)
    cut = length > max_new_tokens
    length = min(length, max_new_tokens)
    # Ids above the k-th stop token are shifted by k: uniform over all ids except the stop tokens.
    ids = random.integers(max(1, vocabulary - len(stops)), size=length)
    for stop in stops:
        ids += ids >= stop
    if stops and not cut:
        ids[-1] = stops[0]
    return Response(ids.tolist(), (-random.exponential(size=length)).tolist())


# Changes of the batch within this many seconds form one span of the timeline.
_SPAN_SECONDS = 0.1


class SimulatedEngine(ServingEngine):
    """Engine that serves a policy with random tokens at the pace of `policies.X.simulated`.

    A weight update blocks decoding for `load_seconds` and then for another prefill of the kept
    turns, as in an engine that recomputes their KV cache with the new weights. There is no prefix
    cache.
    """

    kind: ClassVar[str] = "simulated"

    def __init__(
        self, engine_id: str, policy: str, spec: PolicySpec, *, trace_dir: Path | None = None
    ) -> None:
        """`trace_dir`: directory of the timeline (`testbed.timeline`); None: no timeline."""
        super().__init__(engine_id, policy, in_flight=spec.engine.in_flight)
        self._spec = spec
        self._pace = spec.simulated or SimulatedSpec()
        self._batch = EngineBatch(self._pace)
        self._responses: dict[str, Response] = {}
        self._timer: asyncio.TimerHandle | None = None
        # The weight version that draws tokens now.
        self._drawing = 0
        self._timeline = Timeline(trace_dir, f"engine-{engine_id}")
        self._span_from = self._counted_at = 0.0
        self._turn_seconds = 0.0

    async def _begin(self) -> None:
        """Read the model's configuration."""
        self._pace = (self._spec.simulated or SimulatedSpec()).of_class(self.device.device_class)
        model = self._spec.language_model
        config = await asyncio.to_thread(load_config, model, self.policy)
        self.vocabulary = config.get_text_config().vocab_size
        self.max_context = self._spec.engine.max_context or EMBEDDED_CONTEXT
        self.eos_ids = end_ids(config, model.path, model.revision)
        self._batch = EngineBatch(self._pace)

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns the tokens so far."""
        turn = self._turns.get(request_id)
        future = self._waiting.get(request_id)
        if turn is not None and future is not None and not future.done():
            self._tick()
            if not future.done():
                self._draw(turn)
                # Not `_drop`, which reads the clock again, so that the turn might end by itself.
                self._batch.remove(request_id)
                future.set_result(turn.result(aborted=True))
                self._reschedule()

    def load(self) -> EngineLoad:
        """Return the current load."""
        self._tick()
        for turn in self._turns:
            self._draw(turn)
        return super().load()

    async def check(self) -> common_pb.EngineState.ValueType:
        """Return the engine's state; a simulated engine cannot hang."""
        return self.state

    async def stop(self) -> None:
        """End all turns as aborted and move to STOPPED. Idempotent."""
        self._life.stopped()
        for turn in self._turns:
            await self.abort(turn.request_id)
        if self._timer is not None:
            self._timer.cancel()
        self._timeline.flush()

    async def _serve(self, turn: EngineTurn) -> EngineResponse:
        response = draw_response(
            self._pace,
            seed=turn.seed,
            vocabulary=self.vocabulary,
            stop_ids=turn.stop_ids,
            max_new_tokens=turn.sampling.drawn + turn.max_new_tokens,
        ).after(turn.sampling.drawn)
        key = turn.request_id
        future: asyncio.Future[EngineResponse] = asyncio.get_running_loop().create_future()
        self._tick()
        turn.started_at = now = time.monotonic()
        turn.read_tokens = len(turn.prompt_ids)
        self._responses[key], self._waiting[key] = response, future
        self._batch.admit(key, len(turn.prompt_ids), len(response), now)
        self._reschedule()
        try:
            return await future
        finally:
            del self._responses[key], self._waiting[key]

    def _drop(self, turn: EngineTurn) -> None:
        self._tick()
        self._batch.remove(turn.request_id)
        self._reschedule()

    def _fail_turns(self, error: Exception) -> None:
        for turn, future in self._unanswered():
            self._batch.remove(turn.request_id)
            future.set_exception(error)
        self._reschedule()

    async def _release(self, tags: frozenset[Memory]) -> None:
        self._tick()

    async def _resume(self, tags: frozenset[Memory]) -> None:
        self._tick()

    async def _fits(self, tensors: Tensors, ref: common_pb.WeightsRef) -> None:
        if not tensors:
            raise WeightsRefused(
                "no tensors are published under this key",
                field="weights",
                value=ref.key,
                remedy="Publish at least one tensor.",
            )

    async def _apply(self, tensors: Tensors, ref: common_pb.WeightsRef) -> float:
        self._tick()
        for turn in self._turns:
            self._draw(turn)
        self._return_turns(ref)
        began = time.time()
        self._batch.block(float("inf"), time.monotonic())
        self._reschedule()
        try:
            await asyncio.sleep(self._pace.load_seconds)
        finally:
            now = time.monotonic()
            self._batch.advance(now)
            self._batch.unblock(now)
            kept = [turn for turn, _ in self._unanswered()]
            self._batch.read(sum(len(t.prompt_ids) + len(t.versions) for t in kept), now)
            self._reschedule()
        self._drawing = ref.version
        self._timeline.add(TimelineSpan(self.engine_id, "load", self.policy, began, time.time()))
        return self._pace.load_seconds

    def _tick(self) -> None:
        """Advance the batch to now and answer the turns that have ended."""
        now = time.monotonic()
        self._count(now)
        for key in self._batch.advance(now):
            turn, future = self._turns.get(key), self._waiting.get(key)
            if turn is not None and future is not None and not future.done():
                self._draw(turn, len(self._responses[key]))
                future.set_result(turn.result())
        self._close_span(now)

    def _on_timer(self) -> None:
        self._timer = None
        self._tick()
        self._reschedule()

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._batch.next_end()
        if at is not None and at != float("inf"):
            delay = max(0.0, at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)

    def _draw(self, turn: EngineTurn, until: int | None = None) -> None:
        """Add to `turn` its tokens so far, drawn by the current version."""
        response = self._responses.get(turn.request_id)
        if response is None:
            return
        have = len(turn.versions)
        if until is None:
            future = self._waiting[turn.request_id]
            until = have if future.done() else self._batch.drawn(turn.request_id)
        if until > have:
            turn.token_ids += response.token_ids[have:until]
            turn.logprobs += response.logprobs[have:until]
            turn.versions += [self._drawing] * (until - have)
            self._turns.drew(until - have)

    def _count(self, now: float) -> None:
        """Add the batch's turn-seconds since the last call to the current timeline span."""
        if self._timeline.wanted:
            if not len(self._batch):
                self._span_from = now
            self._turn_seconds += len(self._batch) * (now - self._counted_at)
            self._counted_at = now

    def _close_span(self, now: float) -> None:
        """Write the busy span to the timeline if it is long enough or over."""
        seconds = now - self._span_from
        if not self._timeline.wanted or not self._turn_seconds:
            return
        if seconds >= _SPAN_SECONDS or not len(self._batch):
            wall = time.time()
            level = self._turn_seconds / seconds if seconds else 0.0
            self._timeline.add(
                TimelineSpan(self.engine_id, "generate", self.policy, wall - seconds, wall, level)
            )
            self._turn_seconds, self._span_from = 0.0, now
