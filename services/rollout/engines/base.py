"""What the router knows of an engine: one interface, whatever serves behind it.

An engine serves one policy at one verified version. The router calls `generate` from any
number of asyncio tasks; the engine batches them. Weights change under running requests:
those are kept and go on, and every token says which version drew it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from troupe.v1 import common_pb2 as pb

if TYPE_CHECKING:
    import torch

    from services.rollout.engines.scoring import Asked, Scored
    from troupe.transfer import Transfer
    from troupe.workflow import Sampling

FinishReason = Literal["stop", "length", "abort"]
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


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a response were drawn by `version`."""

    version: int
    start: int
    end: int

    def to_proto(self) -> pb.VersionSpan:
        """The same as a message."""
        return pb.VersionSpan(version=self.version, start=self.start, end=self.end)


@dataclass(frozen=True)
class Generation:
    """One response.

    `token_ids` and `logprobs` have equal length; a stop token that ended the response is its
    last element. `logprobs` are natural logs under softmax(logits / temperature), before top-k
    and top-p; greedy responses (temperature 0) count as temperature 1. That is what SGLang
    reports by default, and what a trainer must recompute: logits divided by the temperature.
    `finish_reason` is "abort" after `Engine.abort`; the tokens drawn until then are kept.
    `cached_tokens` counts prompt tokens whose keys and values were reused.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    finish_reason: FinishReason
    cached_tokens: int
    queue_seconds: float
    generate_seconds: float


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
class Adapter:
    """A LoRA adapter in memory: PEFT's `adapter_config.json` and its tensors by PEFT's names."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


class Engine(Protocol):
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
    ) -> Generation:
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
        self, asked: Sequence[Asked], temperature: float, *, deadline_seconds: float
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

    async def load_adapter(self, name: str, source: Path | Adapter) -> None:
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
