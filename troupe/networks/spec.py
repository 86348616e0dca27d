"""What a small network is and how it learns: the sections under `policies.P.network` of a job."""

from troupe.job.network import (
    DeterministicSpec,
    LearningSpec,
    NetworkSpec,
    PPOSpec,
    QLearningSpec,
)

__all__ = ["DeterministicSpec", "LearningSpec", "NetworkSpec", "PPOSpec", "QLearningSpec"]
