"""The turns an engine has in hand, and the load that they make."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator

from services.rollout.engines.base import (
    EngineLoad,
    FinishReason,
    Generation,
    SamplingParams,
    spans_of,
)
from services.rollout.engines.sampling import Draw

# Long enough to smooth steps of a few milliseconds, short enough to follow a phase of a job.
_RATE_SECONDS = 5.0


class Turn:
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

    def result(self, *, aborted: bool = False) -> Generation:
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
        return Generation(
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
        self._turns: dict[str, Turn] = {}
        self._generated = 0
        self._rate: deque[tuple[float, int]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(list(self._turns.values()))

    def get(self, request_id: str) -> Turn | None:
        """The turn of that id, unless it has ended."""
        return self._turns.get(request_id)

    def add(self, turn: Turn) -> None:
        """A turn begins."""
        self._turns[turn.request_id] = turn
        self._empty.clear()

    def remove(self, turn: Turn) -> None:
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
