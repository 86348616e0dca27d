"""What a step reports about its samples, added up over micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from services.trainer.rows import Row


def digest_of(sample_ids: Iterable[str]) -> int:
    """A witness of which samples were added: the sum modulo 2^64 of the xxh3-64 of their ids."""
    return sum(xxh3_64_intdigest(sample_id.encode()) for sample_id in sample_ids) % (1 << 64)


@dataclass
class BatchSummary:
    """Sums over the samples of a step."""

    samples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    # Response tokens of samples with advantage zero.
    idle_tokens: int = 0
    reward: float = 0.0
    reward_squares: float = 0.0
    advantage: float = 0.0
    versions: int = 0
    oldest: int | None = None
    # Samples that an earlier step has trained before.
    reused: int = 0
    # `digest_of` the samples' ids, which does not depend on order: the store compares it with what
    # it handed out.
    digest: int = 0

    def add(self, rows: Sequence[Row], advantages: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Add n rows with their advantages [n]."""
        for row, advantage in zip(rows, advantages.tolist(), strict=True):
            self.samples += 1
            self.tokens += len(row.ids)
            self.response_tokens += row.response_length
            self.idle_tokens += row.response_length if advantage == 0.0 else 0
            self.reward += row.reward
            self.reward_squares += row.reward * row.reward
            self.advantage += abs(advantage)
            self.versions += row.version
            self.oldest = row.version if self.oldest is None else min(self.oldest, row.version)
            self.reused += int(row.uses > 0)
        self.digest = (self.digest + digest_of(row.sample_id for row in rows)) % (1 << 64)

    def metrics(self, version: int) -> dict[str, float]:
        """By the names that the field uses; `version` is the one that the step starts from."""
        n = self.samples
        if n == 0:
            return {"samples": 0.0, "tokens": 0.0}
        mean = self.reward / n
        return {
            "samples": float(n),
            "tokens": float(self.tokens),
            "response_tokens": float(self.response_tokens),
            "response_length/mean": self.response_tokens / n,
            "reward/mean": mean,
            "reward/std": math.sqrt(max(0.0, self.reward_squares / n - mean * mean)),
            "advantage/abs_mean": self.advantage / n,
            "advantage/zero_fraction": self.idle_tokens / max(self.response_tokens, 1),
            "staleness/mean": version - self.versions / n,
            "staleness/max": float(version - (self.oldest or 0)),
            "reused_fraction": self.reused / n,
        }
