"""What a step reports about its fragments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.trainer.networks.rows import FragmentRow
from services.trainer.summary import digest_of


def digest(rows: Sequence[FragmentRow]) -> int:
    """As `BatchSummary.digest`."""
    return digest_of(row.sample_id for row in rows)


def metrics_of(rows: Sequence[FragmentRow], version: int) -> dict[str, float]:
    """By the names that language models have, where they mean the same; `version` is the one that
    the step starts from."""
    if not rows:
        return {"samples": 0.0}
    returns = np.concatenate([row.fragment.returns().ravel() for row in rows])
    versions = np.array([row.version for row in rows])
    return {
        "samples": float(len(rows)),
        "episodes": float(sum(row.fragment.episodes for row in rows)),
        "environment_steps": float(sum(row.fragment.steps for row in rows)),
        "reward/mean": float(returns.mean()),
        "reward/std": float(returns.std()),
        "staleness/mean": float(version - versions.mean()),
        "staleness/max": float(version - versions.min()),
        "reused_fraction": sum(row.uses > 0 for row in rows) / len(rows),
    }
