"""The batch of one engine under a cost model, and the clock of busy lanes.

The twin's engines share it with the simulated engines of the testbed, which take the same times on
a live cluster.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, Protocol


class EnginePace(Protocol):
    """The times of an engine, such as `policies.X.simulated` in a job."""

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
    `prefill_tokens_per_second` and block decoding meanwhile.
    """

    def __init__(self, pace: EnginePace) -> None:
        self._prefill = pace.prefill_tokens_per_second
        self._step, self._each = pace.decode_seconds, pace.decode_seconds_per_turn
        self._now = 0.0
        # Time until which decoding is blocked by prefill or a weight update.
        self._blocked_until = 0.0
        # Decoding steps so far.
        self._steps = 0.0
        self._count = 0
        # By key: the step at which the turn was admitted, and its length.
        self._turns: dict[Any, tuple[float, int]] = {}
        # (step at which the turn has its last token, number, key).
        self._heap: list[tuple[float, int, Any]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def admit(self, key: Any, prompt_tokens: float, length: int, now: float) -> bool:
        """Admit a turn of `length` response tokens; its prefill blocks the whole batch first.
        Return whether it ends next."""
        self._count = count = self._count + 1
        self._turns[key] = (self._steps, length)
        heap = self._heap
        heapq.heappush(heap, (self._steps + length, count, key))
        self.block(prompt_tokens / self._prefill, now)
        return heap[0][1] == count

    def read(self, tokens: float, now: float) -> None:
        """Block decoding for the prefill of `tokens` (a prompt, or kept turns again)."""
        self.block(tokens / self._prefill, now)

    def block(self, seconds: float, now: float) -> None:
        """Block decoding for `seconds` more."""
        blocked = self._blocked_until
        self._blocked_until = (blocked if blocked > now else now) + seconds

    def unblock(self, now: float) -> None:
        """End the current block."""
        self._blocked_until = now

    def remove(self, key: Any) -> None:
        """Remove a turn; unknown keys are ignored."""
        if self._turns.pop(key, None) is not None:
            self._heap = [one for one in self._heap if one[2] != key]
            heapq.heapify(self._heap)

    def drawn(self, key: Any) -> int:
        """Return a turn's number of tokens as of the last `advance`."""
        begin, length = self._turns[key]
        # Tolerates rounding of the step count.
        return min(length, math.floor(self._steps - begin + 1e-6))

    def advance(self, now: float) -> Sequence[Any]:
        """Advance the batch to `now`; return the turns that have ended, in order."""
        at = self._now
        if at >= now:
            return ()
        heap = self._heap
        if self._blocked_until > at:
            at = now if now < self._blocked_until else self._blocked_until
        ended: list[Any] = []
        while heap and at < now:
            last, _, key = heap[0]
            step = self._step + self._each * float(len(heap))
            end = at + (last - self._steps) * step
            if end > now:
                self._steps += (now - at) / step
                break
            at, self._steps = end, last
            heapq.heappop(heap)
            del self._turns[key]
            ended.append(key)
        self._now = now
        return ended

    def next_end(self) -> float | None:
        """Return the time when the next turn ends if the batch does not change; None if it is
        empty."""
        heap = self._heap
        if not heap:
            return None
        left = (heap[0][0] - self._steps) * (self._step + self._each * float(len(heap)))
        blocked = self._blocked_until
        return (blocked if blocked > self._now else self._now) + left


class BusyClock:
    """Seconds in which at least one of several lanes was busy, and the busy seconds of all lanes
    together. Lanes report their begins and ends in order of time."""

    __slots__ = ("_busy", "_since", "any_seconds", "lane_seconds")

    def __init__(self) -> None:
        self._busy = 0
        self._since = 0.0
        self.any_seconds = 0.0
        self.lane_seconds = 0.0

    def change(self, by: int, now: float) -> None:
        """Count `by` more lanes as busy from now on."""
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
