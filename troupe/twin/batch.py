"""The batch of one engine under a cost model, and the clock of busy lanes.

The twin's engines and the simulated engines of the testbed, which take the same times on a live
cluster, share it.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, Protocol


class EnginePace(Protocol):
    """The times of an engine, as `policies.X.simulated` of a job gives them."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens that the engine reads per second."""

    @property
    def decode_seconds(self) -> float:
        """Seconds of one decoding step, independent of the running turns."""

    @property
    def decode_seconds_per_turn(self) -> float:
        """Seconds that every running turn adds to a decoding step."""


class EngineBatch:
    """The running turns of one engine by key, with their progress under the cost model.

    A decoding step takes `decode_seconds + decode_seconds_per_turn * running`; prompts are read at
    `prefill_tokens_per_second` and hold decoding up meanwhile.
    """

    __slots__ = ("_blocked_until", "_count", "_heap", "_now", "_pace", "_steps", "_turns")

    def __init__(self, pace: EnginePace) -> None:
        self._pace = pace
        self._now = 0.0
        # Time until which decoding is blocked by prefill or a weight update.
        self._blocked_until = 0.0
        # Decoding steps so far.
        self._steps = 0.0
        self._count = 0
        # By key: the steps at which it was admitted, its length, its number.
        self._turns: dict[Any, tuple[float, int, int]] = {}
        # (step at which the turn has its last token, number, key); those of removed turns stay.
        self._heap: list[tuple[float, int, Any]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def admit(self, key: Any, prompt_tokens: float, length: int, now: float) -> None:
        """Admit a turn of `length` response tokens; its prefill blocks the whole batch first."""
        self._count += 1
        self._turns[key] = (self._steps, length, self._count)
        heapq.heappush(self._heap, (self._steps + length, self._count, key))
        self.read(prompt_tokens, now)

    def read(self, tokens: float, now: float) -> None:
        """Block decoding for the prefill of `tokens` (a prompt, or kept turns again)."""
        self.block(tokens / self._pace.prefill_tokens_per_second, now)

    def block(self, seconds: float, now: float) -> None:
        """Block decoding for `seconds` more."""
        blocked = self._blocked_until
        self._blocked_until = (blocked if blocked > now else now) + seconds

    def unblock(self, now: float) -> None:
        """End the current block."""
        self._blocked_until = now

    def remove(self, key: Any) -> None:
        """Remove a turn; unknown keys are ignored."""
        self._turns.pop(key, None)

    def drawn(self, key: Any) -> int:
        """The number of tokens that a turn has, as of the last `advance`."""
        begin, length, _ = self._turns[key]
        # Tolerates rounding of the step count.
        return min(length, math.floor(self._steps - begin + 1e-6))

    def advance(self, now: float) -> list[Any]:
        """Advance the batch to `now`; returns the turns that have ended, in order."""
        ended: list[Any] = []
        turns = self._turns
        while True:
            reached = now if now < self._blocked_until else self._blocked_until
            if reached > self._now:
                self._now = reached
            first = self._first()
            if first is None or self._now >= now:
                break
            step = self._step_seconds
            at = self._now + (first[0] - self._steps) * step
            if at > now:
                self._steps += (now - self._now) / step
                break
            self._now, self._steps = at, first[0]
            heapq.heappop(self._heap)
            del turns[first[2]]
            ended.append(first[2])
        if now > self._now:
            self._now = now
        return ended

    def next_end(self) -> float | None:
        """The time when the next turn ends if the batch does not change; None if it is empty."""
        first = self._first()
        if first is None:
            return None
        left = (first[0] - self._steps) * self._step_seconds
        blocked = self._blocked_until
        return (blocked if blocked > self._now else self._now) + left

    def _first(self) -> tuple[float, int, Any] | None:
        heap, turns = self._heap, self._turns
        while heap:
            entry = turns.get(heap[0][2])
            if entry is not None and entry[2] == heap[0][1]:
                return heap[0]
            heapq.heappop(heap)
        return None

    @property
    def _step_seconds(self) -> float:
        pace = self._pace
        return pace.decode_seconds + pace.decode_seconds_per_turn * len(self._turns)


class BusyClock:
    """Seconds in which at least one of several lanes was busy, and the busy seconds of all lanes
    together. Lanes report their begins and ends in the order of time."""

    __slots__ = ("_busy", "_since", "any_seconds", "lane_seconds")

    def __init__(self) -> None:
        self._busy = 0
        self._since = 0.0
        self.any_seconds = 0.0
        self.lane_seconds = 0.0

    def change(self, by: int, now: float) -> None:
        """`by` more lanes are busy from now on."""
        self.settle(now)
        self._busy += by

    def settle(self, now: float) -> None:
        """Count the time until now."""
        if self._busy:
            self.any_seconds += now - self._since
            self.lane_seconds += self._busy * (now - self._since)
        self._since = now

    @property
    def busy(self) -> bool:
        """Whether any lane is busy."""
        return self._busy > 0
