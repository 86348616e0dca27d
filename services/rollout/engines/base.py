"""What the router knows of an engine: one interface, whatever serves behind it.

An engine serves one policy at one verified version. The router calls `generate` from any
number of asyncio tasks; the engine batches them. Weights change under running requests:
those are kept and go on, and every token says which version drew it.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Protocol, TypeVar

from services.rollout.engines.state import EngineState
from troupe.rpc.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    Unavailable,
)
from troupe.v1 import common_pb2 as pb
from troupe.workflow.backend import FinishReason as FinishReason
from troupe.workflow.backend import GeneratedTurn
from troupe.workflow.backend import VersionSpan as VersionSpan

if TYPE_CHECKING:
    import torch

    from troupe.transfer import Transfer
    from troupe.workflow import Sampling

LostT = TypeVar("LostT", bound="TurnLost")


class TurnLost(Unavailable):
    """The engine cannot end a turn. `drawn`: what it has of it, by verified weights, if anything:
    whoever asked may go on from there on another engine."""

    drawn: EngineResponse | None = None


def lost_turn(error: LostT, drawn: EngineResponse) -> LostT:
    """The same error for one turn."""
    own = copy.copy(error)
    own.drawn = drawn
    return own


class EngineDied(TurnLost):
    """The engine's thread or process is gone, or does not answer; its turns are lost."""

    default_kind = "engine_died"

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(
            f"the engine died: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn on another engine; this one serves again after a restart "
            "and a verified weight update.",
        )


class EngineStale(TurnLost):
    """The engine holds no verified weights (or is leaving) and takes no turns."""

    default_kind = "engine_stale"

    def __init__(self, engine_id: str, state: str) -> None:
        super().__init__(
            f"the engine is {state} and takes no turns",
            field="engine",
            value=engine_id,
            remedy="Choose another engine of the policy, or update this one's weights first.",
        )


class EngineAsleep(FailedPrecondition):
    """The engine has given its memory back and can do nothing until it is woken."""

    default_kind = "engine_asleep"

    def __init__(self, engine_id: str, what: str) -> None:
        super().__init__(
            f"the engine is asleep: {what}",
            field="engine",
            value=engine_id,
            remedy="Wake it; it then needs a verified weight update before it serves.",
        )


class TurnReturned(Unavailable):
    """The engine gives the turn back unfinished: it changes weights or goes to sleep."""

    default_kind = "turn_returned"

    def __init__(self, engine_id: str, reason: str) -> None:
        super().__init__(
            f"the turn was given back: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn on an engine that serves; nothing of it was used.",
        )


class AdapterRefused(FailedPrecondition):
    """The engine cannot take, or does not have, this LoRA adapter; nothing changed."""

    default_kind = "adapter_refused"


class EngineStartFailed(FailedPrecondition):
    """The engine could not be brought up; the reason is in the message."""

    default_kind = "engine_start_failed"


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room for a response in the engine's context."""

    default_kind = "prompt_too_long"

    def __init__(self, policy: str, prompt_tokens: int, max_context: int) -> None:
        super().__init__(
            f"a prompt of {prompt_tokens} tokens leaves no room for a response in a context of "
            f"{max_context} tokens",
            field=f"policies.{policy}.engine.max_context",
            value=max_context,
            remedy="Shorten the conversation, or raise max_context up to what the model's "
            "positions allow.",
        )


class TurnDeadline(DeadlineExceeded):
    """No response within the turn's time; the request was aborted."""

    default_kind = "turn_deadline"

    def __init__(self, engine_id: str, request_id: str, seconds: float, done: int) -> None:
        super().__init__(
            f"request {request_id} had {done} tokens after {seconds:g} s on engine {engine_id}",
            field="limits.turn_seconds",
            value=f"{seconds:g}",
            remedy="Allow more time per turn, fewer new tokens, or add engines.",
        )


class ScoreDeadline(DeadlineExceeded):
    """Continuations were not scored in time."""

    default_kind = "score_deadline"

    def __init__(self, engine_id: str, count: int, seconds: float) -> None:
        super().__init__(
            f"{count} continuations were not scored within {seconds:g} s on engine {engine_id}",
            field="limits.turn_seconds",
            value=f"{seconds:g}",
            remedy="Allow more time per turn, or ask for fewer at once.",
        )


class ScoreRefused(FailedPrecondition):
    """The engine cannot compute these log-probs."""

    default_kind = "score_refused"


class BadTurn(InvalidArgument):
    """The request cannot be served by any engine of the policy."""

    default_kind = "bad_turn"


class ReplyBroken(Unavailable):
    """The engine lives, but this turn's answer is missing, cut off or refused."""

    default_kind = "engine_reply_broken"

    def __init__(self, engine_id: str, request_id: str, reason: str) -> None:
        super().__init__(
            f"no usable answer to request {request_id}: {reason}",
            field="engine",
            value=engine_id,
            remedy="Repeat the turn; the prompt and its tokens are unchanged.",
        )


class WeightsRefused(FailedPrecondition):
    """The published weights do not fit this engine's model, or are not what was announced.

    Nothing in the engine changed.
    """

    default_kind = "weights_refused"


class UpdateFailed(Unavailable):
    """The update broke off half-way: the engine is STALE until one succeeds."""

    default_kind = "weight_update_failed"


class NonFiniteLogits(Internal):
    """The model's output is NaN or infinite: the weights or the prompt are broken."""

    default_kind = "non_finite_logits"

    def __init__(self, engine_id: str, version: int | None) -> None:
        super().__init__(
            f"engine {engine_id} computed logits that are not finite with version {version}",
            remedy="Look for a NaN in the published weights; roll back to an earlier version.",
        )


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A continuation `ids` of a prompt; neither is empty."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of continuations, in the order in which they were asked, all by one version."""

    logprobs: list[list[float]]
    """One per id of each, under softmax(logits / temperature), given all ids before it."""
    version: int
    checksum: str


class Scoring(ABC):
    """`base.Engine.score` over one verb."""

    kind: ClassVar[str]
    engine_id: str
    policy: str
    max_context: int
    vocabulary: int
    _life: EngineState
    _settled: asyncio.Event

    async def score(
        self, asked: Sequence[ScoreRequest], temperature: float, *, deadline_seconds: float
    ) -> Scored:
        """Log-probs of continuations; see `base.Engine.score`."""
        if not asked:
            raise BadTurn("nothing is asked for", field="prompts", remedy="Give a continuation.")
        for one in asked:
            self._check(one)
        try:
            async with asyncio.timeout(deadline_seconds):
                while True:
                    await self._serving()
                    found = await self._score(asked, temperature)
                    # Weights that changed under way, or are not verified yet: once more.
                    await self._settled.wait()
                    if found is not None and found[1] == self._life.version:
                        break
        except TimeoutError as error:
            raise ScoreDeadline(self.engine_id, len(asked), deadline_seconds) from error
        logprobs, version = found
        if not all(math.isfinite(value) for row in logprobs for value in row):
            raise NonFiniteLogits(self.engine_id, version)
        return Scored(logprobs, version, self._life.checksum)

    async def _score(
        self, asked: Sequence[ScoreRequest], temperature: float
    ) -> tuple[list[list[float]], int] | None:
        """Log-probs and the version that computed them all; None when it changed under way."""
        raise ScoreRefused(
            f"a '{self.kind}' engine scores nothing",
            field=f"policies.{self.policy}.engine.kind",
            value=self.kind,
            remedy="Ask a policy that an embedded engine or SGLang serves.",
        )

    @abstractmethod
    async def _serving(self) -> None:
        """Wait out an update. Raises `EngineDied` or `EngineStale` when nothing is served."""

    def _check(self, one: ScoreRequest) -> None:
        if not one.prompt_ids or not one.ids:
            raise BadTurn(
                "a prompt or a continuation without tokens has no log-probs",
                field="prompts",
                remedy="Give at least one token of each.",
            )
        if self.vocabulary:
            low, high = min(*one.prompt_ids, *one.ids), max(*one.prompt_ids, *one.ids)
            if low < 0 or high >= self.vocabulary:
                raise BadTurn(
                    f"the vocabulary of policy '{self.policy}' has {self.vocabulary} tokens",
                    field="prompts",
                    value=low if low < 0 else high,
                    remedy="Use the policy's own tokenizer.",
                )
        length = len(one.prompt_ids) + len(one.ids)
        if self.max_context and length > self.max_context:
            raise BadTurn(
                f"prompt and continuation have {length} tokens, a context has {self.max_context}",
                field=f"policies.{self.policy}.engine.max_context",
                value=self.max_context,
                remedy="Shorten them, or raise max_context up to what the model's positions allow.",
            )


Memory = Literal["weights", "kv_cache"]
MEMORY: Final[frozenset[Memory]] = frozenset({"weights", "kv_cache"})
# How long an engine that goes to sleep waits for the turns in hand.
DRAIN_SECONDS: Final = 30.0


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn.

    `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 keep every token. A `seed` makes the
    response a function of (weights, prompt, seed), whatever else is batched with it: up to
    floating-point noise, or bitwise in an engine of a deterministic job. `stop_token_ids` come on
    top of the model's end-of-sequence tokens. `drawn`: how many tokens at the prompt's end are the
    response's own, drawn by an engine that was lost; the next one is drawn as the one after them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    drawn: int = 0

    @classmethod
    def of(cls, sampling: Sampling) -> SamplingParams:
        """As a workflow's agent samples."""
        return cls(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            seed=sampling.seed,
        )


EngineResponse = GeneratedTurn
"""What an engine answers is what the workflow gets: one class from here to the sample."""


@dataclass(frozen=True)
class Device:
    """What an engine runs on: a class of devices, and tokens per second that it reads, and draws
    for all its turns together, as measured; 0: unknown."""

    device_class: str = ""
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether both rates are known."""
        return self.prefill_tokens_per_second > 0 and self.decode_tokens_per_second > 0


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do, for balancing.

    `outstanding_tokens`: prompt tokens not yet read plus response tokens still allowed, over
    all requests. `generated_tokens` counts since `start`; `tokens_per_second` is over the
    last few seconds. As a server reports them, 0 where none does: `uncached_tokens`, prompt tokens
    of waiting requests that no cached prefix covers; `kv_usage`, the fraction of the key-value
    cache in use; `cache_hit_rate`, the fraction of prompt tokens that came from the cache.
    """

    running: int
    waiting: int
    outstanding_tokens: int
    generated_tokens: int
    tokens_per_second: float
    uncached_tokens: int = 0
    kv_usage: float = 0.0
    cache_hit_rate: float = 0.0


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter in memory: PEFT's `adapter_config.json` and its tensors by PEFT's names."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class ServingEngine(Protocol):
    """One serving replica of one policy.

    Life (troupe.states.ENGINE): `start` leads to STALE, `update_weights` through UPDATING to
    HEALTHY; only then does `generate` serve. When the engine dies every waiting request fails
    with `EngineDied` and the state is DEAD; `start` again leads to STALE, never to HEALTHY.
    """

    @property
    def engine_id(self) -> str:
        """Unique within the rollout worker."""
        ...

    @property
    def policy(self) -> str:
        """Name of the policy served."""
        ...

    @property
    def kind(self) -> str:
        """`embedded` or `sglang`."""
        ...

    @property
    def restarts(self) -> int:
        """Times that `start` brought the engine back from DEAD."""
        ...

    device: Device
    """What it runs on; whoever makes the engine says so before it is started."""

    @property
    def message(self) -> str:
        """Why the engine is in its state, for people; empty when all is well."""
        ...

    @property
    def state(self) -> pb.EngineState.ValueType:
        """Where in its life the engine is."""
        ...

    @property
    def version(self) -> int | None:
        """Verified version that is served; None until the first update."""
        ...

    @property
    def checksum(self) -> str:
        """Checksum of the served weights (troupe.transfer); empty until the first update."""
        ...

    async def start(self) -> None:
        """Bring the engine up to STALE. Raises `EngineStartFailed` within its time limit."""
        ...

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
        """Draw one response to `prompt_ids`.

        A response is cut to the room that the prompt leaves in the context. Cancelling the task
        aborts the request. `priority`: higher ones leave the engine's own queue first, in engines
        that have one. `adapter`: a LoRA adapter loaded before. Raises `PromptTooLong`,
        `EngineStale` (nothing verified to serve with), `EngineDied`, `TurnDeadline`,
        `TurnReturned` (ask again), `BadTurn` (empty prompt, ids outside the vocabulary, no token
        asked for, an id in use, an unknown adapter) and `NonFiniteLogits`.
        """
        ...

    async def score(
        self, asked: Sequence[ScoreRequest], temperature: float, *, deadline_seconds: float
    ) -> Scored:
        """Log-probs of given continuations by one verified version; nothing is drawn.

        Raises `EngineStale`, `EngineDied`, `ScoreDeadline`, `ScoreRefused` (this engine cannot),
        `BadTurn` (no tokens, ids outside the vocabulary, longer than the context) and
        `NonFiniteLogits`.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request early: its `generate` returns what it has. Unknown ids are ignored."""
        ...

    async def accepts(self, ref: pb.WeightsRef, transfer: Transfer) -> None:
        """Raise `WeightsRefused` when what is published as `ref` cannot fit the engine's model.

        Reads names, shapes and dtypes only, and changes nothing: all engines of a policy are asked
        before the first is updated. An engine that is not up accepts anything.
        """
        ...

    async def update_weights(self, ref: pb.WeightsRef, transfer: Transfer) -> float:
        """Bring the engine to `ref` and verify it; returns the seconds it could not serve.

        Nothing is served from weights that were not verified: a refused update (names, shapes,
        dtypes, checksum of the published weights) leaves the engine as it was and raises
        `WeightsRefused` or a `TransferError`; one that fails half-way leaves it STALE and raises
        `UpdateFailed`. Repeating is harmless. Raises `EngineAsleep` until the engine is woken.
        """
        ...

    @property
    def asleep(self) -> frozenset[Memory]:
        """The memory that the engine has given back."""
        ...

    async def sleep(
        self, tags: Collection[Memory] = MEMORY, *, drain_seconds: float = DRAIN_SECONDS
    ) -> None:
        """Give memory back: no new turns (DRAINING), what is in hand ends, then STALE and asleep.

        Turns left after `drain_seconds` are given back (`TurnReturned`). Repeatable. Raises
        `EngineDied`, and FailedPrecondition when this engine cannot free its memory.
        """
        ...

    async def wake(self, tags: Collection[Memory] = MEMORY) -> None:
        """Take the memory again. The engine is STALE until an update is verified. Repeatable."""
        ...

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the LoRA adapters that turns may use."""
        ...

    async def load_adapter(self, name: str, source: Path | AdapterWeights) -> None:
        """Load a LoRA adapter from a PEFT directory that the engine sees, or from tensors.

        One of the same name is replaced. Raises `AdapterRefused`.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; unknown names are ignored."""
        ...

    async def drain(self, reason: str, *, deadline_seconds: float) -> int:
        """DRAINING: no new turns; those in hand may end until the deadline, then they are aborted.

        Returns how many were, when none is left. Only a HEALTHY engine drains; `IllegalTransition`
        otherwise. Should it die meanwhile its turns fail as ever, and the state is DEAD.
        """
        ...

    def assign(self, policy: str) -> None:
        """A drained (or dead) engine serves another policy with the same model from now on.

        STALE (or DEAD) until it is updated to a version of that policy. Raises `IllegalTransition`
        for an engine in any other state, or with turns.
        """
        ...

    def load(self) -> EngineLoad:
        """Current load; cheap, no I/O."""
        ...

    async def check(self) -> pb.EngineState.ValueType:
        """Probe the engine and return its state afterwards.

        A missed probe moves HEALTHY to SUSPECT, an answered one back; a gone thread or
        process, or several misses, to DEAD. Never raises for a sick engine.
        """
        ...

    async def stop(self) -> None:
        """End requests (as aborted), release everything; the state is STOPPED. Repeatable."""
        ...


def spans_of(versions: Iterable[int]) -> list[VersionSpan]:
    """Run-length form of one version per token."""
    spans: list[VersionSpan] = []
    end = 0
    for version, run in itertools.groupby(versions):
        start, end = end, end + sum(1 for _ in run)
        spans.append(VersionSpan(version, start, end))
    return spans
