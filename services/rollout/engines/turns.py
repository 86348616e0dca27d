"""Turns of an engine that have not ended: their tokens so far, their table, their shared
prompts."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from services.rollout.engines.requests import (
    Draw,
    EngineLoad,
    EngineResponse,
    FinishReason,
    spans_of,
)
from troupe.workflow.backend import Sampling
from troupe.workflow.token_ids import TokenIds

if TYPE_CHECKING:
    from services.rollout.engines.embedded.adapters import LiveVersion

# Window of `EngineLoad.tokens_per_second`: long enough to smooth steps of a few milliseconds, short
# enough to follow a phase of a job.
_RATE_SECONDS: Final = 5.0


class EngineTurn:
    """One generation request and the tokens drawn so far.

    One thread (the engine's) appends tokens; others may read at any time: `versions` is
    appended last, so the first `len(versions)` entries of all three lists belong together.
    """

    __slots__ = (
        "_name",
        "closed",
        "incarnation",
        "live",
        "logprobs",
        "max_new_tokens",
        "prompt_ids",
        "read_tokens",
        "request_id",
        "routes",
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
        prompt_ids: TokenIds,
        sampling: Sampling,
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.request_id = request_id
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
        # Experts of all tokens but the last, once it has been drawn, if they are recorded.
        self.routes: Any = None
        # What draws it, in an embedded engine.
        self.live: LiveVersion | None = None
        # Grows with each resubmission, so that the batcher's ids are never used twice.
        self.incarnation = 0
        # A trajectory that runs again, here or elsewhere, has the ids of its former turns.
        self._name = f"{request_id}#{secrets.token_hex(4)}"
        # Whether no more tokens are wanted.
        self.closed = False

    @property
    def key(self) -> str:
        """The turn's id in a batcher or server, never used twice."""
        return f"{self._name}.{self.incarnation}"

    def next_draw(self) -> Draw:
        """How the next token is sampled."""
        s = self.sampling
        position = s.drawn + len(self.token_ids)
        processed = s.logprobs == "processed"
        return Draw(s.temperature, s.top_k, s.top_p, self.seed, position, processed)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Record one token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def extend(
        self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Record several tokens at once; the three have equal length."""
        self.token_ids += tokens
        self.logprobs += logprobs
        self.versions += versions

    def restart(self) -> None:
        """Discard the tokens drawn so far."""
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
        """The response with the tokens drawn so far."""
        n = len(self.versions)
        tokens = self.token_ids[:n]
        # A turn that had its last token when it was aborted has ended regularly.
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
            routed_experts=self.routes,
        )


class TurnTable:
    """The turns in flight of an engine by request id, and the load that they make, with what is
    scored with them."""

    def __init__(self) -> None:
        self._turns: dict[str, EngineTurn] = {}
        self.scored_tokens = 0
        """Tokens of prompts and continuations that are being scored."""
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
        """Add a turn that begins."""
        self._turns[turn.request_id] = turn
        self._empty.clear()

    def remove(self, turn: EngineTurn) -> None:
        """Remove a turn that has ended. Repeatable."""
        # A turn refused for a duplicate id must not remove the one that has the id.
        if self._turns.get(turn.request_id) is turn:
            del self._turns[turn.request_id]
            turn.closed = True
            if not self._turns:
                self._empty.set()

    async def emptied(self) -> None:
        """Wait until no turn is left."""
        await self._empty.wait()

    def drew(self, count: int) -> None:
        """Count tokens drawn just now. May be called from the engine's thread."""
        self._generated += count
        self._rate.append((time.monotonic(), count))

    def load(self) -> EngineLoad:
        """The current load. O(turns in flight + steps of the last seconds)."""
        since = time.monotonic() - _RATE_SECONDS
        while self._rate and self._rate[0][0] < since:
            self._rate.popleft()
        turns = list(self._turns.values())
        running = sum(turn.started_at is not None for turn in turns)
        return EngineLoad(
            running=running,
            waiting=len(turns) - running,
            outstanding_tokens=sum(turn.outstanding for turn in turns) + self.scored_tokens,
            generated_tokens=self._generated,
            tokens_per_second=sum(count for _, count in list(self._rate)) / _RATE_SECONDS,
        )


# A prompt, and the weights that read it.
_Prompt = tuple["LiveVersion | None", bytes]


class PromptGate:
    """Holds back turns whose prompt another turn is reading with the same weights, so that it is
    computed once.

    The trajectories of a group open with the same prompt at the same moment; the prefix cache helps
    only those that arrive after the first was read. Thread-safe: the engine's thread opens the
    gate."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._followers: dict[_Prompt, list[EngineTurn]] = {}
        self._leads: dict[int, _Prompt] = {}

    def enter(self, turn: EngineTurn) -> bool:
        """Whether `turn` may be computed now; if not, a later `opened` returns it."""
        prompt = (turn.live, turn.prompt_ids.array.tobytes())
        with self._lock:
            followers = self._followers.get(prompt)
            if followers is not None:
                followers.append(turn)
                return False
            self._followers[prompt] = []
            self._leads[id(turn)] = prompt
            return True

    def opened(self, turn: EngineTurn) -> list[EngineTurn]:
        """The turns that waited for `turn`, which has its first token or has ended. Repeatable."""
        with self._lock:
            prompt = self._leads.pop(id(turn), None)
            return [] if prompt is None else self._followers.pop(prompt)
