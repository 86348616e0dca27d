"""Requests and responses of engines: tokens, scores, load."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from troupe.rpc.ids import new_id
from troupe.workflow.backend import FinishReason as FinishReason
from troupe.workflow.backend import GeneratedTurn
from troupe.workflow.backend import VersionSpan as VersionSpan

Memory = Literal["weights", "kv_cache"]
MEMORY: Final[frozenset[Memory]] = frozenset({"weights", "kv_cache"})


class Draw(NamedTuple):
    """How the next token of one turn is sampled; `position` counts the response's tokens."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int
    # Whether the log-prob comes from the truncated distribution.
    processed: bool = False


def spans_of(versions: Iterable[int]) -> list[VersionSpan]:
    """Run-length encoding of one version per token."""
    spans: list[VersionSpan] = []
    end = 0
    for version, run in itertools.groupby(versions):
        start, end = end, end + sum(1 for _ in run)
        spans.append(VersionSpan(version, start, end))
    return spans


# The answer to a turn: one class from the engine to the sample.
EngineResponse = GeneratedTurn


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A prompt and a continuation `ids` whose log-probs are asked for; neither is empty."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of continuations in the order of the requests, all computed by one version."""

    logprobs: list[list[float]]
    """Per continuation one per id, under softmax(logits / temperature), given all ids before it."""
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """A weight update of one engine that succeeded.

    `way`: how the weights came in. `mapped`: from the memory where they are published, no copy;
    `copied`: from there into the engine's own memory or its device; of servers `in_place`:
    read from there by the server, `file`, `handles`, `values`, `ipc`, `broadcast`, `adapter`
    (docs/engines.md). `exposed_seconds`: in which nothing was generated. `total_seconds`: from
    reading the published weights to their verification.
    """

    version: int
    way: str
    exposed_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class UpdateWave:
    """Engines that load a version from a trainer's device together.

    `wave_id`: unique. `servers`: how many they are in this process. `workers`: rollout workers that
    update the policy at the same time.
    """

    wave_id: str
    servers: int = 1
    workers: int = 1

    @staticmethod
    def of(servers: int = 1, workers: int = 1) -> UpdateWave:
        """Return a new wave."""
        return UpdateWave(new_id("wave"), servers, workers)


@dataclass(frozen=True, slots=True)
class LoadedAhead:
    """Weights that were loaded before their commit.

    `digest`: the server's own checksum of the weights before them; None if it computes none.
    `exposed_seconds`: see `UpdateReport`.
    """

    digest: str | None
    exposed_seconds: float


NO_UPDATE: Final = UpdateReport(-1, "", 0.0, 0.0)


@dataclass(frozen=True)
class DeviceSpeed:
    """The hardware of an engine: a class of devices and its measured tokens per second of prefill
    and of decoding (all turns together); 0: unknown."""

    device_class: str = ""
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether both rates are known."""
        return self.prefill_tokens_per_second > 0 and self.decode_tokens_per_second > 0


@dataclass(frozen=True)
class EngineLoad:
    """Load of an engine, for balancing.

    `outstanding_tokens`: prompt tokens not yet read plus response tokens still allowed, over all
    turns, and what is being scored. `generated_tokens` counts since `start`; `tokens_per_second` is
    over the last seconds. As a server reports them, 0 otherwise: `uncached_tokens`, prompt tokens
    of waiting requests that no cached prefix covers; `kv_usage`, the used fraction of the key-value
    cache; `cache_hit_rate`, the fraction of prompt tokens that came from the cache."""

    running: int
    waiting: int
    outstanding_tokens: int
    generated_tokens: int
    tokens_per_second: float
    uncached_tokens: int = 0
    kv_usage: float = 0.0
    cache_hit_rate: float = 0.0
