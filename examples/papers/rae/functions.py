"""The advantage of the arm without a baseline."""

from __future__ import annotations

import torch

from troupe.algorithms.advantages import SampleBatch


def no_baseline(samples: SampleBatch) -> torch.Tensor:
    """A_i = r_i."""
    return samples.rewards
