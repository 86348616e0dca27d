"""Continuous batching in modelled time: which turns run, how far they are, when one ends.

No clock and no event loop: time is an argument. All running turns advance together, one token
per decoding step, so one counter says how far each of them is, and the turn that ends next is the
top of a heap: an event costs O(log turns), however many tokens lie between two of them.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from troupe.job import PacedSpec


@dataclass(frozen=True)
class Response:
    """What a turn will have drawn when it ends: token ids and natural log-probs, equally many."""

    token_ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.token_ids)

    def after(self, drawn: int) -> Response:
        """What is left of it after `drawn` tokens."""
        return Response(self.token_ids[drawn:], self.logprobs[drawn:]) if drawn else self


def draw_response(
    pace: PacedSpec,
    *,
    seed: int,
    vocabulary: int,
    stop_ids: frozenset[int],
    max_new_tokens: int,
) -> Response:
    """A response as a function of `seed`: lognormal length, uniform tokens, finite log-probs.

    A stop token is its last and only its last, unless `max_new_tokens` cut it or there is none.
    """
    random = np.random.default_rng(seed)
    sigma = pace.response_tokens_sigma
    location = math.log(pace.response_tokens_mean) - sigma * sigma / 2
    length = max(1, round(float(random.lognormal(location, sigma))))
    stops = sorted(stop for stop in stop_ids if stop < vocabulary)
    cut = length > max_new_tokens
    length = min(length, max_new_tokens)
    # Ids above the k-th stop token are shifted by k: uniform over all that are no stop token.
    ids = random.integers(max(1, vocabulary - len(stops)), size=length)
    for stop in stops:
        ids += ids >= stop
    if stops and not cut:
        ids[-1] = stops[0]
    return Response(ids.tolist(), (-random.exponential(size=length)).tolist())


@dataclass(order=True)
class _Running:
    # The counter's value at which the turn has its last token.
    end: float
    key: str = field(compare=False)
    # The counter's value when the turn came.
    begin: float = field(compare=False)
    length: int = field(compare=False)


class PacedBatch:
    """The turns that one engine runs, by key."""

    def __init__(self, pace: PacedSpec) -> None:
        self._pace = pace
        self._now = 0.0
        # Until then prompts are read or weights loaded, and nothing is decoded.
        self._blocked_until = 0.0
        # Decoding steps so far.
        self._steps = 0.0
        self._turns: dict[str, _Running] = {}
        self._heap: list[_Running] = []

    def __len__(self) -> int:
        return len(self._turns)

    def admit(self, key: str, prompt_tokens: int, length: int, now: float) -> None:
        """A turn of `length` response tokens comes; its prompt is read before anything else."""
        turn = _Running(self._steps + length, key, self._steps, length)
        self._turns[key] = turn
        heapq.heappush(self._heap, turn)
        self.read(prompt_tokens, now)

    def read(self, tokens: int, now: float) -> None:
        """Read `tokens` (a prompt, or kept turns again) before decoding goes on."""
        self.block(tokens / self._pace.prefill_tokens_per_second, now)

    def block(self, seconds: float, now: float) -> None:
        """Decode nothing for `seconds`, after what blocks already."""
        self._blocked_until = max(self._blocked_until, now) + seconds

    def unblock(self, now: float) -> None:
        """What blocked is over."""
        self._blocked_until = now

    def remove(self, key: str) -> None:
        """A turn is given up. Unknown ones are gone already."""
        if self._turns.pop(key, None) is not None:
            self._heap = [turn for turn in self._heap if turn.key != key]
            heapq.heapify(self._heap)

    def drawn(self, key: str) -> int:
        """Tokens that a turn has, as of the last `advance`."""
        turn = self._turns[key]
        # What is within rounding of the next token has it.
        return min(turn.length, math.floor(self._steps - turn.begin + 1e-6))

    def advance(self, now: float) -> list[str]:
        """Let time pass until `now`; the turns that ended meanwhile, in their order."""
        ended = []
        while True:
            self._now = max(self._now, min(now, self._blocked_until))
            if not self._heap or self._now >= now:
                break
            step = self._step_seconds
            first = self._heap[0]
            at = self._now + (first.end - self._steps) * step
            if at > now:
                self._steps += (now - self._now) / step
                break
            self._now, self._steps = at, first.end
            heapq.heappop(self._heap)
            del self._turns[first.key]
            ended.append(first.key)
        self._now = max(self._now, now)
        return ended

    def next_end(self) -> float | None:
        """When the next turn ends if nothing comes between; None when nothing runs."""
        if not self._heap:
            return None
        left = (self._heap[0].end - self._steps) * self._step_seconds
        return max(self._now, self._blocked_until) + left

    @property
    def _step_seconds(self) -> float:
        pace = self._pace
        return pace.decode_seconds + pace.decode_seconds_per_turn * len(self._turns)
